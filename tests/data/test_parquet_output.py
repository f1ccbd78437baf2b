from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.contracts import layout
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.parquet import ParquetOutput
from tidemill.errors import NotFoundError
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash


def table(first: int, rows: int) -> pa.Table:
    return pa.table({"n": pa.array(range(first, first + rows), pa.int64())})


def write(storage: Storage, first: int, rows: int, blocks: int = 3) -> OutputManifest:
    """Blocks of one part each."""
    output = ParquetOutput(storage, part_bytes=1)
    for block in range(blocks):
        output.write(table(first + block * rows, rows))
    return output.commit()


def read(storage: Storage) -> list[int] | None:
    """The rows of a whole output in order; None if there is none."""
    try:
        manifest = OutputManifest.parse(storage.read(layout.SUCCESS), where="_SUCCESS")
    except NotFoundError:
        return None
    rows: list[int] = []
    for entry in manifest.files:
        data = storage.read(entry.key)
        assert len(data) == entry.size
        rows += pq.read_table(pa.BufferReader(data))["n"].to_pylist()
    assert len(rows) == manifest.rows
    parts = [info.key for info in storage.list("part-")]
    assert parts == sorted(entry.key for entry in manifest.files)
    return rows


def test_rows_keep_their_order_over_parts_and_are_readable_as_a_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "out")
    manifest = write(storage, 0, 5)
    assert [entry.key for entry in manifest.files] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert read(storage) == list(range(15))
    assert pq.read_table(tmp_path / "out")["n"].to_pylist() == list(range(15))
    assert storage.list("_temporary/") == []


def test_small_tables_share_a_part(tmp_path: Path) -> None:
    output = ParquetOutput(LocalStorage(tmp_path))
    for first in range(0, 10, 2):
        output.write(table(first, 2))
    assert len(output.commit().files) == 1
    assert read(LocalStorage(tmp_path)) == list(range(10))


def test_nothing_is_visible_before_the_commit_and_nothing_is_left_after_an_abort(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    output = ParquetOutput(storage, part_bytes=1)
    output.write(table(0, 3))
    assert {info.key.split("/")[0] for info in storage.list()} == {"_temporary"}
    output.abort()
    assert storage.list() == []


def test_an_output_without_rows_is_whole_too(tmp_path: Path) -> None:
    assert ParquetOutput(LocalStorage(tmp_path)).commit().files == []
    assert read(LocalStorage(tmp_path)) == []


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    output = ParquetOutput(LocalStorage(tmp_path))
    output.write(table(0, 1))
    with pytest.raises(ValueError, match="names"):
        output.write(pa.table({"m": [1]}))


def test_whenever_a_run_dies_readers_see_the_old_rows_or_none_or_the_new_ones(tmp_path: Path) -> None:
    old, new = list(range(100, 106)), list(range(9))
    counting = FaultyStorage(LocalStorage(tmp_path / "count"))
    write(counting.inner, 100, 2)
    write(counting, 0, 3)
    assert counting.num_operations > 10
    seen = set()
    for number in range(1, counting.num_operations + 1):
        storage = LocalStorage(tmp_path / str(number))
        write(storage, 100, 2)
        faulty = FaultyStorage(storage)
        faulty.crash_at(number)
        with pytest.raises(SimulatedCrash):
            write(faulty, 0, 3)
        if (tmp_path / str(number) / layout.SUCCESS).exists():
            found = read(storage)
            assert found in (old, new)
            seen.add(tuple(found or ()))
        write(storage, 0, 3)
        assert read(storage) == new
        assert storage.list("_temporary/") == []
    assert seen == {tuple(old), tuple(new)}
