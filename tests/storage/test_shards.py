"""Table shards: naming, files, and resharding by slicing."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import CorruptError
from tidemill.storage.arrays import read_arrays, write_arrays
from tidemill.storage.backends.fsspec import FsspecStorage
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.shards import (
    TableShard,
    assemble,
    overlap,
    read_shards,
    split_tensor_name,
    tensor_name,
    write_shards,
)

WIDTH = 3


def _rows(start: int, stop: int, version: int = 0) -> np.ndarray:
    """Rows that say which row of which version they are."""
    return np.arange(start * WIDTH, stop * WIDTH, dtype=np.float32).reshape(-1, WIDTH) + 1_000_000 * version


def _full(start: int, stop: int, version: int = 0, table: str = "item") -> TableShard:
    return TableShard(table, start, stop, None, {"weight": _rows(start, stop, version), "momentum1": np.arange(start, stop) / 7})


def _touched(ids: list[int], start: int, stop: int, version: int, table: str = "item") -> TableShard:
    chosen = np.array(ids, np.int64)
    every = _full(0, stop, version, table)
    return TableShard(table, start, stop, chosen, {name: tensor[chosen] for name, tensor in every.tensors.items()})


def _cuts(num_rows: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """All ways to split [0, num_rows) into consecutive ranges, empty ones among them."""
    return st.lists(st.integers(0, num_rows), max_size=6).map(
        lambda cuts: list(zip([0, *sorted(cuts)], [*sorted(cuts), num_rows], strict=True))
    )


@st.composite
def _histories(draw: st.DrawFn) -> tuple[int, list[TableShard], np.ndarray]:
    """A table's size, its shards (full ones, then several sets of touched rows, each by a split of its own), and its true rows."""
    num_rows = draw(st.integers(1, 40))
    truth = _rows(0, num_rows)
    shards = draw(st.permutations([_full(start, stop) for start, stop in draw(_cuts(num_rows))]))
    for version in range(1, draw(st.integers(1, 4))):
        ids = draw(st.sets(st.integers(0, num_rows - 1)))
        for row in ids:
            truth[row] = _rows(row, row + 1, version)
        for start, stop in draw(_cuts(num_rows)):
            shards.append(_touched(sorted(row for row in ids if start <= row < stop), start, stop, version))
    return num_rows, shards, truth


@given(history=_histories(), data=st.data())
def test_any_split_gives_the_same_rows_after_any_other_split(
    history: tuple[int, list[TableShard], np.ndarray], data: st.DataObject
) -> None:
    num_rows, shards, truth = history
    for start, stop in data.draw(_cuts(num_rows)):
        np.testing.assert_array_equal(assemble(shards, "item", "weight", start, stop), truth[start:stop])


@given(history=_histories(), data=st.data())
def test_overlap_keeps_what_assembling_needs_and_no_more(
    history: tuple[int, list[TableShard], np.ndarray], data: st.DataObject
) -> None:
    num_rows, shards, truth = history
    start = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(start + 1, num_rows))
    parts = overlap(shards, start, stop)
    np.testing.assert_array_equal(assemble(parts, "item", "weight", start, stop), truth[start:stop])
    assert all(start <= part.row_start <= part.row_stop <= stop and part.num_rows > 0 for part in parts)


@given(history=_histories())
def test_shards_survive_their_files(history: tuple[int, list[TableShard], np.ndarray]) -> None:
    num_rows, shards, truth = history
    storage = FsspecStorage("memory://shards-round-trip")
    read = []
    for number, shard in enumerate(shards):
        stored = write_shards(storage, f"{number}", [shard, _full(0, 2, table="user/emb")], {"term": "1"})
        other, user = read_shards(storage, stored.key, sha256=stored.sha256, size=stored.size)
        assert (user.table, user.row_start, user.row_stop, user.ids) == ("user/emb", 0, 2, None)
        assert (other.table, other.row_start, other.row_stop) == (shard.table, shard.row_start, shard.row_stop)
        assert (other.ids is None) == (shard.ids is None)
        read.append(other)
    np.testing.assert_array_equal(assemble(read, "item", "weight", 0, num_rows), truth)


def test_names_inside_a_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write_shards(storage, "file", [_full(2, 4), _touched([1, 3], 0, 5, 1, table="user/emb")])
    assert read_arrays(storage, "file").keys() == {
        "item/weight",
        "item/momentum1",
        "user/emb/ids",
        "user/emb/weight",
        "user/emb/momentum1",
    }
    assert split_tensor_name(tensor_name("user/emb", "weight")) == ("user/emb", "weight")
    for name in ("weight", "/weight", "item/", ""):
        with pytest.raises(ValueError, match="doesn't name a table's tensor"):
            split_tensor_name(name)


def test_assembled_rows_are_the_callers_own(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write_shards(storage, "file", [_full(0, 4)])
    weight = assemble(read_shards(storage, "file"), "item", "weight", 0, 4)
    weight[:] = 0
    assert assemble(read_shards(storage, "file"), "item", "weight", 1, 2)[0, 0] == WIDTH


def test_an_empty_range_keeps_dtype_and_width() -> None:
    weight = assemble([_full(0, 4)], "item", "weight", 2, 2)
    assert (weight.shape, weight.dtype) == ((0, WIDTH), np.float32)


def test_other_tables_and_files_of_other_tensors_are_ignored() -> None:
    state = TableShard("item", 0, 4, None, {"momentum2": np.zeros(4)})
    shards = [_full(0, 4, table="user"), _full(0, 4), state, _touched([1], 0, 4, 9, table="user")]
    np.testing.assert_array_equal(assemble(shards, "item", "weight", 0, 4), _rows(0, 4))


def test_missing_rows_are_named() -> None:
    shards = [_full(0, 3), _full(5, 8), _touched([3, 9], 0, 20, 1)]
    with pytest.raises(CorruptError, match=r"table 'item': no shard holds weight of 12 rows: 4\.\.4, 8\.\.8, 10\.\.19$"):
        assemble(shards, "item", "weight", 0, 20)
    with pytest.raises(CorruptError, match=r"5 rows: 1\.\.1, 3\.\.3, 5\.\.5, \.\.\.$"):
        assemble([_touched([0, 2, 4, 6, 8], 0, 10, 1)], "item", "weight", 0, 10)
    with pytest.raises(CorruptError, match="table 'item': no shard holds 'weight'"):
        assemble([_full(0, 3, table="user")], "item", "weight", 0, 0)


def test_shards_of_another_shape_or_dtype_are_named() -> None:
    for odd in (np.zeros((2, WIDTH + 1), np.float32), np.zeros((2, WIDTH), np.float64)):
        with pytest.raises(CorruptError, match=r"table 'item': weight of rows \[4, 6\)"):
            assemble([_full(0, 4), TableShard("item", 4, 6, None, {"weight": odd})], "item", "weight", 0, 6)


@pytest.mark.parametrize(
    "ids", [[1, 1], [2, 1], [-1], [10], np.array([1.0]), np.array([1], np.int32), np.zeros((1, 1), np.int64)], ids=str
)
def test_bad_ids_are_refused(ids: object) -> None:
    chosen = ids if isinstance(ids, np.ndarray) else np.array(ids, np.int64)
    with pytest.raises(ValueError, match="table 'item': ids"):
        TableShard("item", 0, 10, chosen, {})


def test_parts_that_do_not_fit_are_refused() -> None:
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="isn't a row range"):
            TableShard("item", start, stop, None, {})
    for tensor in (np.zeros(3), np.array(1.0)):
        with pytest.raises(ValueError, match="weight has shape"):
            TableShard("item", 0, 2, None, {"weight": tensor})
    for name in ("", "a/b", "ids"):
        with pytest.raises(ValueError, match="can't name a tensor"):
            TableShard("item", 0, 2, None, {name: np.zeros(2)})


def test_a_table_has_one_shard_in_a_file() -> None:
    storage = FsspecStorage(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(ValueError, match="two shards of table 'item'"):
        write_shards(storage, "file", [_full(0, 2), _full(2, 4)])
    assert storage.list() == []


@pytest.mark.parametrize(
    ("arrays", "metadata"),
    [
        ({"weight": np.zeros(2)}, {}),
        ({"item/weight": np.zeros(2)}, {}),
        ({"item/weight": np.zeros(2)}, {"item/rows": "0:3"}),
        ({"item/weight": np.zeros(2)}, {"item/rows": "2"}),
        ({"item/weight": np.zeros(2)}, {"item/rows": "-2:0"}),
        ({"item/weight": np.zeros(2), "item/ids": np.array([1, 0])}, {"item/rows": "0:9"}),
    ],
)
def test_files_of_something_else_are_corrupt(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    storage = FsspecStorage(f"memory://{uuid.uuid4().hex}")
    write_arrays(storage, "file", arrays, metadata)
    with pytest.raises(CorruptError, match="'file' in memory://"):
        read_shards(storage, "file")
    storage.delete("file")
