"""What is particular to Parquet files."""

import os
import shutil
from contextlib import closing
from functools import partial

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.data.assignment import plan
from tidemill.data.intervals import IntervalSet
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.errors import DataError, SchemaError, SourceChangedError
from tidemill.testing.source_contract import numbered


def source(*patterns, columns=None, time=None):
    return ParquetSource(ParquetConfig(paths=",".join(map(str, patterns)), event_time_column=time), columns)


def read(source, split, remaining=None):
    reader = source.open(split, remaining, IntervalSet())
    batches = []
    try:
        while True:
            batches.append(reader.read(1.0))
    except EOFError:
        return batches
    finally:
        reader.close()


def write(path, start, stop, **options):
    pq.write_table(numbered(start, stop), path, **options)
    return path


def test_files_are_sorted_and_read_once_however_they_are_named(tmp_path):
    for name in "cab":
        write(tmp_path / f"{name}.parquet", 0, 3)
    splits = source(tmp_path / "c.parquet", tmp_path / "*.parquet", f"{tmp_path}/./a.parquet").discover()
    assert [split.id.name for split in splits] == [str(tmp_path / f"{name}.parquet") for name in "abc"]


def test_nothing_matching_names_the_pattern(tmp_path):
    with pytest.raises(DataError, match=r"nothing-\*\.parquet"):
        source(tmp_path / "nothing-*.parquet").discover()
    with pytest.raises(DataError, match=r"it is a folder: write .*/\*\.parquet"):
        source(tmp_path).discover()


def test_what_isnt_parquet_is_named(tmp_path):
    for content in (b"x", b"not a parquet file at all"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
            source(tmp_path / "*.parquet").discover()


def test_damaged_rows_name_their_file(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, 0, 1000)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    found = source(path)
    with pytest.raises(DataError, match=r"a\.parquet: its rows can't be read"):
        read(found, found.discover()[0])


def test_missing_column_names_file_and_column(tmp_path):
    write(tmp_path / "a.parquet", 0, 3)
    with pytest.raises(SchemaError, match=r"a\.parquet: no column 'price'; it has event_id, event_time, value"):
        source(tmp_path / "*.parquet", columns=["price"]).discover()


def test_a_column_that_is_there_twice_is_named(tmp_path):
    numbers = pa.array([1, 2])
    pq.write_table(pa.Table.from_arrays([numbers, numbers], names=["id", "id"]), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: it has column 'id' twice"):
        source(tmp_path / "*", columns=["id"]).discover()


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_and_kills_nobody(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, 0, 200_000, row_group_size=1000)
    opened = source(path)
    with closing(opened.open(opened.discover()[0], None, IntervalSet())) as reader:
        assert reader.read(1.0) is not None
        os.truncate(path, 1000)
        with pytest.raises(DataError, match=r"a\.parquet: its rows can't be read; it is damaged, or has changed"):
            list(iter(partial(reader.read, 1.0), None))


def test_drift_between_files_names_file_column_and_types(tmp_path):
    write(tmp_path / "a.parquet", 0, 3)
    pq.write_table(pa.table({"event_id": ["x"], "event_time": [1], "value": [1.5]}), tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=r"b\.parquet: column 'value' is double, but int64 in .*a\.parquet"):
        source(tmp_path / "*.parquet", columns=["value"]).discover()
    assert len(source(tmp_path / "*.parquet", columns=["event_id"]).discover()) == 2


@pytest.mark.parametrize("wanted", [[(0, 25)], [(3, 4)], [(9, 11), (24, 25)], [(10, 20)], [(5, 7), (8, 22)]])
def test_reads_exactly_the_rows_asked_for(tmp_path, wanted):
    write(tmp_path / "a.parquet", 0, 25, row_group_size=10)
    made = source(tmp_path / "a.parquet", columns=["value"])
    [split] = made.discover()
    batches = read(made, split, IntervalSet.of(wanted))
    values = [value for batch in batches for value in batch.table.column("value").to_pylist()]
    assert values == [row for start, stop in wanted for row in range(start, stop)]
    assert IntervalSet.of((run.start, run.stop) for batch in batches for run in batch.runs).intervals == tuple(wanted)


def test_reads_only_the_columns_needed(tmp_path):
    write(tmp_path / "a.parquet", 0, 3)
    made = source(tmp_path / "a.parquet", columns=["value"], time="event_time")
    [batch] = read(made, made.discover()[0])
    assert batch.table.column_names == ["value", "event_time"]
    assert batch.event_time.tolist() == [0.0, 1.0, 2.0]
    assert batch.runs[0].event_time == 2.0


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1_500, None], pa.timestamp("ms")), [1.5, np.nan]),
        (pa.array([1_500_000_000], pa.timestamp("ns", "UTC")), [1.5]),
        (pa.array([3, None], pa.int64()), [3.0, np.nan]),
        (pa.array([2.5], pa.float32()), [2.5]),
    ],
)
def test_event_time_of_any_numeric_type(tmp_path, column, expected):
    pq.write_table(pa.table({"t": column}), tmp_path / "a.parquet")
    made = source(tmp_path / "a.parquet", time="t")
    [batch] = read(made, made.discover()[0])
    np.testing.assert_array_equal(batch.event_time, expected)


def test_event_time_as_text_is_refused(tmp_path):
    write(tmp_path / "a.parquet", 0, 3)
    made = source(tmp_path / "a.parquet", time="event_id")
    with pytest.raises(SchemaError, match=r"a\.parquet: column 'event_id' is of type string"):
        read(made, made.discover()[0])


def test_copied_file_is_the_same_file(tmp_path):
    write(tmp_path / "a.parquet", 0, 30)
    made = source(tmp_path / "a.parquet")
    [before] = made.discover()
    shutil.copy(tmp_path / "a.parquet", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "a.parquet")
    os.utime(tmp_path / "a.parquet", (1, 1))
    [after] = made.discover()
    made.verify(after, before.fingerprint)


def test_rewritten_file_is_refused_with_what_differs(tmp_path):
    write(tmp_path / "a.parquet", 0, 30)
    made = source(tmp_path / "a.parquet")
    [before] = made.discover()
    write(tmp_path / "a.parquet", 0, 31)
    [after] = made.discover()
    with pytest.raises(SourceChangedError, match=r"a\.parquet changed .*rows was 30, is 31"):
        made.verify(after, before.fingerprint)
    with pytest.raises(SourceChangedError, match=r"rows was 30, is 31"):
        made.open(before, None, IntervalSet())


def test_file_that_vanished_is_named(tmp_path):
    write(tmp_path / "a.parquet", 0, 30)
    made = source(tmp_path / "a.parquet")
    [split] = made.discover()
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(SourceChangedError, match=r"a\.parquet: the file is gone"):
        made.open(split, None, IntervalSet())


LISTS = pa.list_(pa.int64())


@pytest.mark.parametrize(
    ("column", "read_as"),
    [
        (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
        (pa.array(["a", None, "b"], pa.large_string()), pa.string()),
        (pa.array(["a", None, "b"], pa.string_view()), pa.string()),
        (pa.array([[1, 2], None, []], pa.large_list(pa.int64())), LISTS),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), LISTS),
        (pa.array([["a"], None, ["b", None]], pa.large_list(pa.large_string())), pa.list_(pa.string())),
        (pa.array([[[1], []], None, [[2, 3]]], pa.list_(LISTS)), pa.list_(LISTS)),
        (pa.array([{"a": 1.5}, None, {}], pa.map_(pa.large_string(), pa.float64())), pa.map_(pa.string(), pa.float64())),
        (pa.array([{"x": 1}, None, {"x": 2}]), pa.struct({"x": pa.int64()})),
    ],
)
def test_nested_large_and_dictionary_types_are_read_alike(tmp_path, column, read_as):
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": column.cast(read_as)}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.nulls(2)}), tmp_path / "c.parquet")
    made = source(tmp_path / "*.parquet", columns=["x"])
    tables = [batch.table for split in made.discover() for batch in read(made, split)]
    assert [table.schema.field("x").type for table in tables] == [read_as] * 3
    assert pa.concat_tables(tables)["x"].to_pylist() == [*column.to_pylist(), *column.to_pylist(), None, None]


def test_a_shuffled_rest_is_read_in_one_go(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", 0, 5000, row_group_size=1000)
    made = source(tmp_path / "a.parquet", columns=["value"])
    [split] = made.discover()
    wanted = IntervalSet.of((row, row + 1) for row in range(0, 5000, 3) if not 2000 <= row < 3000)
    batches = read(made, split, wanted)
    assert [value for batch in batches for value in batch.table["value"].to_pylist()] == [start for start, _ in wanted]
    assert [(run.start, run.stop) for batch in batches for run in batch.runs] == list(wanted)
    assert len(batches) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_all_ranks_take_the_same_number_of_steps(tmp_path, ranks):
    """DCL 9.10: files and row groups of any size, rows dealt to within one."""
    for name, rows in (("a", 1), ("b", 97), ("c", 0), ("d", 40)):
        write(tmp_path / f"{name}.parquet", 0, rows, row_group_size=13)
    made = source(tmp_path / "*.parquet", columns=["value"])
    splits = made.discover()
    counts = []
    for rank in range(ranks):
        _, assigned = plan(splits, None, {}, ranks, rank)
        counts.append(sum(batch.num_rows for part in assigned for batch in read(made, part.split, part.remaining)))
    assert sum(counts) == 138
    assert max(counts) - min(counts) <= 1


def test_reads_behind_urls(tmp_path):
    files = fsspec.filesystem("memory")
    local = write(tmp_path / "a.parquet", 0, 25, row_group_size=10)
    files.pipe("/days/1/a.parquet", local.read_bytes())
    made = source("memory://days/*/*.parquet", columns=["value"])
    try:
        [split] = made.discover()
        assert split.id.name == "memory:///days/1/a.parquet"
        values = [v for batch in read(made, split, IntervalSet.of([(7, 23)])) for v in batch.table.column("value").to_pylist()]
        assert values == list(range(7, 23))
    finally:
        files.rm("/days", recursive=True)
