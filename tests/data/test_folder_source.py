"""What is particular to a folder that is read as a stream."""

import json
import os
import shutil
import time
from contextlib import contextmanager

import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from tidemill.config.data import FolderConfig
from tidemill.data.assignment import plan
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.progress import Progress, verify_splits
from tidemill.data.sources import taken
from tidemill.data.sources.folder import FolderSource
from tidemill.data.split import Provenance
from tidemill.errors import DataError, SchemaError, SourceChangedError, StorageError
from tidemill.testing.source_contract import numbered

SETTINGS = {"poll_s": 0.005, "num_splits": 2, "incomplete_timeout_s": 0.05, "outage_timeout_s": 0.0}


def source(folder, columns=("value",), **settings):
    return FolderSource(
        FolderConfig(**{**SETTINGS, **settings}), str(folder), dict.fromkeys(columns), event_time_column="event_time"
    )


def write(folder, name, start, stop, table=None):
    """As writers should: under a name that is left alone, then renamed."""
    hidden = folder / f"_{name}.tmp"
    table = numbered(start, stop) if table is None else table
    if name.endswith(".arrow"):
        pyarrow.feather.write_feather(table, hidden, compression="uncompressed", chunksize=3)
    else:
        pq.write_table(table, hidden)
    hidden.rename(folder / name)


class Run:
    """One run of one rank that trains what it reads."""

    def __init__(self, made, progress, splits, reader):
        self.source, self.progress, self.splits, self.reader = made, progress, splits, reader

    def read(self, rows):
        """Values of the next so many rows, of whole reads."""
        values = []
        until = time.monotonic() + 20
        while len(values) < rows:
            assert time.monotonic() < until, values
            raw = self.reader.read(0.2)
            if raw is not None:
                values += raw.table["value"].to_pylist()
                self.progress.advance(Provenance(raw.runs, raw.num_rows))
        return values

    def read_nothing(self):
        for _ in range(5):
            raw = self.reader.read(0.02)
            assert raw is None or raw.num_rows == 0

    def states(self):
        done = self.progress.done
        described = [type(split)(split.id, None, self.source.describe(split, done.get(split.id, NOTHING))) for split in self.splits]
        return [type(state).model_validate_json(state.model_dump_json()) for state in self.progress.to_states(described)]


@contextmanager
def run(made, states=(), rank=(1, 0)):
    progress = Progress.from_states(states)
    splits = made.discover()
    if states:
        splits = verify_splits(made, splits, states)
    _, assigned = plan(splits, None, progress.done, *rank)
    reader = made.open_all(assigned)
    try:
        yield Run(made, progress, splits, reader)
    finally:
        reader.close()


def test_files_are_taken_in_the_order_of_their_names_as_they_appear(tmp_path):
    write(tmp_path, "b.parquet", 10, 20)
    write(tmp_path, "a.parquet", 0, 10)
    with run(source(tmp_path)) as it:
        assert it.read(20) == list(range(20))
        it.read_nothing()
        write(tmp_path, "d.parquet", 40, 45)
        assert it.read(5) == list(range(40, 45))
        write(tmp_path, "c.parquet", 30, 35)  # late, and taken all the same
        assert it.read(5) == list(range(30, 35))
        it.read_nothing()


def test_positions_of_read_files_join_up(tmp_path):
    for number in range(20):
        write(tmp_path, f"{number:02}.parquet", number, number + (number % 3))
    with run(source(tmp_path)) as it:
        it.read(19)
        it.read_nothing()
        assert [len(state.intervals) for state in it.states()] == [1, 1]


def test_arrow_and_parquet_files_of_subfolders(tmp_path):
    (tmp_path / "day=1").mkdir()
    write(tmp_path / "day=1", "1.arrow", 0, 7)
    write(tmp_path, "x.parquet", 7, 9)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "_temporary").mkdir()
    write(tmp_path / "_temporary", "1.parquet", 50, 60)
    with run(source(tmp_path, pattern="*[wt]")) as it:  # .arrow, .parquet, .txt
        (tmp_path / "notes.txt").unlink()
        assert it.read(9) == list(range(9))
        it.read_nothing()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_goes_on_in_the_middle_of_a_file_with_what_appeared_meanwhile(tmp_path, name):
    write(tmp_path, name, 0, 10)
    made = source(tmp_path, pattern="*")
    with run(made) as it:
        it.read(10)
        [state] = [state for state in it.states() if state.intervals]
    write(tmp_path, "b.parquet", 10, 13)
    middle = state.model_copy(update={"intervals": [(0, 4)]})
    with run(source(f"{tmp_path}/../{tmp_path.name}/", pattern="*"), [middle]) as it:
        assert it.read(9) == list(range(4, 13))
        it.read_nothing()


def test_no_file_is_taken_twice_whatever_its_place_in_the_listing(tmp_path):
    for name, start in (("m.parquet", 0), ("z.parquet", 10)):
        write(tmp_path, name, start, start + 10)
    with run(source(tmp_path)) as it:
        it.read(20)
        states = it.states()
    write(tmp_path, "a.parquet", 20, 25)
    shutil.copy(tmp_path / "z.parquet", tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / "z.parquet")
    with run(source(tmp_path), states) as it:
        assert it.read(5) == list(range(20, 25))
        it.read_nothing()


def test_ranks_share_the_files_and_others_take_over(tmp_path):
    for number in range(12):
        write(tmp_path, f"{number:02}.parquet", 10 * number, 10 * number + 10)
    values, states = [], None
    for rank in range(2):
        with run(source(tmp_path, num_splits=4), rank=(2, rank)) as it:
            values += it.read(20)
            own = {split.id.name for split in it.splits if it.source.describe(split, NOTHING) != split.fingerprint}
            states = [*(states or []), *(state for state in it.states() if state.split in own)]
    assert len(states) == 4
    with run(source(tmp_path, num_splits=4), states) as it:
        values += it.read(120 - len(values))
        it.read_nothing()
    assert sorted(values) == list(range(120))
    with pytest.raises(SourceChangedError, match=r"read as 4 splits; set data_config\.folder\.num_splits to 4"):
        verify_splits(source(tmp_path, num_splits=3), source(tmp_path, num_splits=3).discover(), states)


def test_a_file_that_isnt_finished_is_waited_for_and_others_go_on(tmp_path):
    write(tmp_path, "b.parquet", 10, 13)
    whole = tmp_path / "whole"
    pq.write_table(numbered(0, 10), whole)
    content = whole.read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:100])
    with run(source(tmp_path, incomplete_timeout_s=60)) as it:
        assert it.read(3) == list(range(10, 13))
        it.read_nothing()
        (tmp_path / "a.parquet").write_bytes(content)
        assert it.read(10) == list(range(10))


class FinishedLate(FolderSource):
    """A folder whose writer finishes a file in its place between a listing and the opening."""

    content = b""

    def rows(self, name):
        with open(self.path(name), "wb") as out:
            out.write(self.content)
        return super().rows(name)


def test_a_file_has_the_size_that_it_was_opened_with(tmp_path):
    whole = tmp_path / "_whole"
    pq.write_table(numbered(0, 10), whole)
    (tmp_path / "a.parquet").write_bytes(b"half of it")
    made = FinishedLate(FolderConfig(**SETTINGS), str(tmp_path), {"value": None}, event_time_column="event_time")
    made.content = whole.read_bytes()
    with run(made) as it:
        assert it.read(10) == list(range(10))
        it.read_nothing()
        states = it.states()
    with run(source(tmp_path), states) as it:
        it.read_nothing()


def test_a_name_that_comes_again_has_all_its_time_to_be_finished(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with run(source(tmp_path, incomplete_timeout_s=60)) as it:
        it.read_nothing()
        assert it.reader._incomplete.keys() == {"a.parquet"}
        (tmp_path / "a.parquet").unlink()
        it.read_nothing()
        assert not it.reader._incomplete


def test_a_file_that_stays_unfinished_fails_the_run_by_name(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with run(source(tmp_path)) as it, pytest.raises(DataError, match=r"a\.parquet: not a Parquet file .*for 0\.05 s now"):
        it.read(1)
    (tmp_path / "a.parquet").rename(tmp_path / "a.arrow")
    with run(source(tmp_path, pattern="*")) as it, pytest.raises(DataError, match=r"a\.arrow: not an Arrow file"):
        it.read(1)


def test_a_file_that_changes_after_it_was_taken_is_an_error(tmp_path):
    write(tmp_path, "a.parquet", 0, 10)
    with run(source(tmp_path)) as it:
        it.read(10)
        states = it.states()
        write(tmp_path, "a.parquet", 0, 2000)
        with pytest.raises(SourceChangedError, match=r"a\.parquet: it had \d+ bytes when it was taken"):
            it.read(1)
    with run(source(tmp_path), states) as it, pytest.raises(SourceChangedError, match=r"a\.parquet: it had"):
        it.read(1)


class Tagged(MemoryFileSystem):
    """An object store in memory, whose objects have tags that change with their content."""

    protocol = "tagged"
    store: dict = {}  # noqa: RUF012 - MemoryFileSystem keeps its objects in the class
    pseudo_dirs = [""]  # noqa: RUF012
    find = AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("tagged://"))

    def info(self, path, **options):
        found = super().info(path, **options)
        return found | {"ETag": f'"{hash(self.store[found["name"]].getvalue()):x}"'} if found["type"] == "file" else found

    def ls(self, path, detail=True, **options):
        names = super().ls(path, detail=False, **options)
        return [self.info(name) for name in names] if detail else names


def test_a_file_rewritten_at_the_same_size_is_told_by_its_tag():
    fsspec.register_implementation("tagged", Tagged, clobber=True)
    Tagged.store.clear()
    files = fsspec.filesystem("tagged")

    def upload(first):
        with files.open("/stream/a.parquet", "wb") as out:
            pq.write_table(numbered(first, first + 5), out, compression="none")

    upload(10)
    with run(source("tagged://stream")) as it:
        assert it.read(5) == list(range(10, 15))
        it.read_nothing()
        states = it.states()
    with run(source("tagged://stream"), states) as it:
        it.read_nothing()
        size = files.size("/stream/a.parquet")
        upload(20)
        assert files.size("/stream/a.parquet") == size
        with pytest.raises(SourceChangedError, match=r"a\.parquet: its tag was \S+ when it was taken, and is"):
            it.read(1)


def test_a_file_that_left_before_it_was_trained_is_an_error(tmp_path):
    write(tmp_path, "a.parquet", 0, 10)
    with run(source(tmp_path)) as it:
        it.read(10)
        [state] = [state for state in it.states() if state.intervals]
    (tmp_path / "a.parquet").unlink()
    middle = state.model_copy(update={"intervals": [(0, 4)]})
    with run(source(tmp_path), [middle]) as it, pytest.raises(SourceChangedError, match=r"a\.parquet: the file is gone"):
        it.read(1)


def test_what_is_done_and_has_left_the_folder_is_forgotten(tmp_path, monkeypatch):
    for number in range(30):
        write(tmp_path, f"{number:02}.parquet", number, number + 1)
    with run(source(tmp_path)) as it:
        it.read(30)
        it.read_nothing()
        assert sum(len(state.fingerprint["files"]) for state in it.states()) == 30
        for number in range(28):
            (tmp_path / f"{number:02}.parquet").unlink()
        it.read_nothing()
        assert sum(len(state.fingerprint["files"]) for state in it.states()) == 30  # a listing may be wrong for a moment
        monkeypatch.setattr(taken, "_FORGET_AFTER_S", 0.0)
        states = it.states()
        assert sorted(name for state in states for name in state.fingerprint["files"]) == ["28.parquet", "29.parquet"]
        assert len(json.dumps([state.model_dump() for state in states])) < 1000
    write(tmp_path, "30.parquet", 30, 31)
    with run(source(tmp_path), states) as it:
        assert it.read(1) == [30]
        it.read_nothing()


def test_what_is_gone_but_not_trained_is_kept():
    files = taken.TakenFiles({})
    first, second = files.take("a", 1), files.take("b", 1)
    files.listed([], now=0.0)
    done = IntervalSet.of([(first.start, first.stop), (second.start, second.start + 5)])
    assert files.describe(done, now=599.0)["files"].keys() == {"a", "b"}
    assert files.describe(done, now=600.0) == {"next": 2, "files": {"b": [1, 1]}}
    assert files.left(done) == [second]


def test_types_are_those_of_the_first_file(tmp_path):
    narrow = numbered(10, 12).set_column(2, "value", pa.array([10, 11], pa.int16()))
    write(tmp_path, "a.parquet", 0, 3)
    write(tmp_path, "b.parquet", 0, 0, narrow)
    wide = numbered(20, 22).set_column(2, "value", pa.array(["x", "y"]))
    with run(source(tmp_path)) as it:
        assert it.read(5) == [0, 1, 2, 10, 11]
        write(tmp_path, "c.parquet", 0, 0, wide)
        with pytest.raises(SchemaError, match=r"c\.parquet: column 'value' is string, but int64 in .*a\.parquet"):
            it.read(1)


def test_a_missing_column_names_file_and_column(tmp_path):
    write(tmp_path, "a.arrow", 0, 3)
    made = source(tmp_path, ["price"], pattern="*")
    with run(made) as it, pytest.raises(SchemaError, match=r"a\.arrow: no column 'price'; it has event_id, event_time, value"):
        it.read(1)


def test_caught_up_when_nothing_is_left_to_read(tmp_path):
    write(tmp_path, "a.parquet", 0, 3)
    with run(source(tmp_path, num_splits=1)) as it:
        [split] = it.splits
        assert not it.reader.is_caught_up(split.id)  # nobody has looked yet
        it.read(3)
        it.read_nothing()
        assert it.reader.is_caught_up(split.id)


def test_event_times_come_from_the_column(tmp_path):
    write(tmp_path, "a.parquet", 5, 8)
    with run(source(tmp_path)) as it:
        raw = it.reader.read(5.0)
        assert raw.event_time.tolist() == [5.0, 6.0, 7.0]
        assert raw.runs[0].event_time == 7.0


def test_a_folder_that_isnt_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"/nowhere: no such folder; make it before the stream starts"):
        source(tmp_path / "nowhere").discover()
    made = source(tmp_path / "later")
    (tmp_path / "later").mkdir()
    assert len(made.discover()) == 2


def test_a_store_that_is_away_for_a_moment_is_asked_again(tmp_path, monkeypatch):
    write(tmp_path, "a.parquet", 0, 3)
    made = source(tmp_path, outage_timeout_s=60)
    find, failures = made.place.files.find, iter([ConnectionError("away"), OSError("still away")])

    def flaky(*args, **options):
        for failure in failures:
            raise failure
        return find(*args, **options)

    monkeypatch.setattr(made.place.files, "find", flaky)
    with run(made) as it:
        assert it.read(3) == [0, 1, 2]


def test_a_folder_that_is_gone_isnt_an_empty_one(tmp_path, monkeypatch):
    """Else a file system that wasn't mounted for a while would have its files forgotten, and trained again."""
    monkeypatch.setattr(taken, "_FORGET_AFTER_S", 0.0)
    folder, away = tmp_path / "in", tmp_path / "away"
    folder.mkdir()
    write(folder, "a.parquet", 0, 3)
    with run(source(folder, outage_timeout_s=60)) as it:
        assert it.read(3) == [0, 1, 2]
        folder.rename(away)
        assert it.reader.read(0.1) is None
        it.states()
        write(away, "b.parquet", 3, 5)
        away.rename(folder)
        assert it.read(2) == [3, 4]
    with run(source(folder)) as it:
        folder.rename(away)
        with pytest.raises(StorageError, match=r"/in: the folder is gone"):
            it.read(6)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_column_that_is_there_twice_is_named(tmp_path, name):
    table = numbered(0, 3)
    write(tmp_path, name, 0, 3, table.append_column("value", table["value"]))
    made = source(tmp_path, pattern="*")
    with run(made) as it, pytest.raises(SchemaError, match=r"a\.\w+: it has column 'value' twice"):
        it.read(3)


def test_a_name_that_isnt_text_is_told(tmp_path):
    write(tmp_path, "a.parquet", 0, 3)
    (tmp_path / os.fsdecode(b"\xff.parquet")).touch()
    with run(source(tmp_path)) as it, pytest.raises(DataError, match=r"udcff\.parquet': the name isn't UTF-8"):
        it.read(4)


def test_reads_behind_urls():
    files = fsspec.filesystem("memory")
    with files.open("/stream-folder/a.parquet", "wb") as out:
        pq.write_table(numbered(0, 5), out)
    try:
        with run(source("memory://stream-folder")) as it:
            assert {split.id.name for split in it.splits} == {f"memory:///stream-folder:{n}" for n in range(2)}
            assert it.read(5) == list(range(5))
    finally:
        files.rm("/stream-folder", recursive=True)
