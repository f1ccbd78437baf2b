"""Files whose store fails while they are read: tried again from the next unread row, up to a deadline (issue 4; DCL 7)."""

from __future__ import annotations

import errno
import io
import time

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tidemill.config.data import FolderConfig
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.sources import outage
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.files import locate, reading
from tidemill.data.sources.folder import FolderSource
from tidemill.data.sources.outage import is_passing
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.errors import DataError, SourceChangedError, StorageError
from tidemill.testing.source_contract import numbered

ROWS = 400_000
TYPES = {"event_id": pa.string(), "event_time": pa.float64()}


class AnswerError(Exception):
    """As clients have them that know HTTP only."""

    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status = status


class Shaky(MemoryFileSystem):
    """Whatever is read behind a byte of a file fails, as long as there are failures left."""

    protocol = "shaky"
    store: dict = {}  # noqa: RUF012 - MemoryFileSystem keeps its objects in the class
    pseudo_dirs = [""]  # noqa: RUF012
    failures: list = []  # noqa: RUF012
    behind = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("shaky://"))

    def _open(self, path, mode="rb", **options):
        opened = super()._open(path, mode, **options)
        return _ShakyFile(opened.getvalue()) if mode == "rb" else opened


class _ShakyFile(io.BytesIO):
    def read(self, size=-1):
        if Shaky.failures and self.tell() + max(size, 0) > Shaky.behind:
            raise Shaky.failures.pop()
        return super().read(size)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.002)
    fsspec.register_implementation("shaky", Shaky, clobber=True)
    yield
    Shaky.store.clear()
    Shaky.failures = []


def write(kind, name):
    with fsspec.filesystem("shaky").open(f"/day/{name}", "wb") as out:
        if kind == "csv":
            pyarrow.csv.write_csv(numbered(0, ROWS), out)
        elif kind == "arrow":
            pyarrow.feather.write_feather(numbered(0, ROWS), out, compression="uncompressed", chunksize=ROWS // 8)
        else:
            pq.write_table(numbered(0, ROWS), out, row_group_size=ROWS // 8)
        return out.tell()


def files_of(kind, timeout_s=60.0):
    paths = f"shaky:///day/a.{kind}"
    if kind == "csv":
        return CsvSource(CsvConfig(paths=paths, with_header=True, outage_timeout_s=timeout_s), TYPES)
    return ParquetSource(ParquetConfig(paths=paths, outage_timeout_s=timeout_s), list(TYPES))


def read_all(reader, rows=ROWS):
    """Ids and positions of so many rows, or of all up to the end."""
    ids, positions = [], []
    until = time.monotonic() + 60
    try:
        while len(ids) < rows:
            assert time.monotonic() < until
            raw = reader.read(0.1)
            if raw is not None:
                ids += raw.table["event_id"].to_pylist()
                positions += [(run.start, run.start + run.rows) for run in raw.runs]
    except EOFError:
        pass
    finally:
        reader.close()
    return ids, IntervalSet.of(positions)


def event_ids(rows=range(ROWS)):
    return [f"e{row}" for row in rows]


FAILURES = [OSError(errno.EIO, "Input/output error"), AnswerError(503), TimeoutError(), ConnectionResetError(), AnswerError(429)]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_each_row_comes_once_whatever_fails_that_may_pass(kind):
    """From the next unread row on: none is lost, none comes twice."""
    size = write(kind, f"a.{kind}")
    source = files_of(kind)
    [split] = source.discover()
    reader = source.open(split, None, NOTHING)
    first = reader.read(5.0)
    Shaky.failures, Shaky.behind = list(FAILURES), size // 2
    ids, rows = read_all(reader)
    assert first.table["event_id"].to_pylist() + ids == event_ids()
    assert rows == IntervalSet.of([(first.num_rows, ROWS)])
    assert not Shaky.failures, "the store must have failed"


def test_a_resumed_share_goes_on_with_what_is_left_of_it():
    size = write("parquet", "a.parquet")
    source = files_of("parquet")
    [split] = source.discover()
    share = IntervalSet.of([(10, 20), (100_000, 300_000), (399_990, ROWS)])
    reader = source.open(split, share, NOTHING)
    Shaky.failures, Shaky.behind = list(FAILURES), size // 2
    ids, rows = read_all(reader)
    assert rows == share
    assert ids == event_ids([row for start, stop in share for row in range(start, stop)])
    assert not Shaky.failures


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_behind_the_deadline_the_error_names_file_and_row(kind):
    size = write(kind, f"a.{kind}")
    source = files_of(kind, timeout_s=0.02)
    [split] = source.discover()
    reader = source.open(split, None, NOTHING)
    first = reader.read(5.0)
    Shaky.failures, Shaky.behind = [OSError(errno.EIO, "Input/output error")] * 1000, size // 8
    with pytest.raises(
        StorageError, match=rf"/day/a\.{kind}, row [1-9]\d*: nothing could be read for 0\.02 s: .*Input/output error"
    ):
        read_all(reader)
    assert first.num_rows


def test_a_file_that_was_changed_meanwhile_is_told():
    write("parquet", "a.parquet")
    source = files_of("parquet")
    [split] = source.discover()
    reader = source.open(split, None, NOTHING)
    reader.read(5.0)
    Shaky.failures, Shaky.behind = [TimeoutError()], 0
    with fsspec.filesystem("shaky").open("/day/a.parquet", "wb") as out:
        pq.write_table(numbered(0, 10), out)
    with pytest.raises(SourceChangedError, match=r"/day/a\.parquet changed since it was first read"):
        read_all(reader)


def test_what_cant_pass_isnt_tried_again():
    size = write("parquet", "a.parquet")
    source = files_of("parquet")
    [split] = source.discover()
    reader = source.open(split, None, NOTHING)
    reader.read(5.0)
    Shaky.failures, Shaky.behind = [PermissionError("no longer yours"), AnswerError(503)], size // 8
    Shaky.failures.reverse()
    with pytest.raises(StorageError, match=r"a\.parquet: PermissionError: no longer yours"):
        read_all(reader)
    assert len(Shaky.failures) == 1
    Shaky.failures = [OSError("the magic bytes are wrong")]
    with pytest.raises(DataError, match="magic bytes"):
        read_all(source.open(split, None, NOTHING))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_folders_file_goes_on_where_its_unread_rows_begin(kind):
    size = write(kind, f"a.{kind}")
    config = FolderConfig(pattern="*", poll_s=0.005, num_splits=1, outage_timeout_s=60.0)
    source = FolderSource(config, "shaky:///day", dict.fromkeys(["event_id"]), event_time_column="event_time")
    reader = source.open(source.discover()[0], None, NOTHING)
    first = reader.read(5.0)
    Shaky.failures, Shaky.behind = list(FAILURES), size // 2
    ids, _ = read_all(reader, ROWS - first.num_rows)
    assert first.table["event_id"].to_pylist() + ids == event_ids()
    assert not Shaky.failures


def test_a_folders_file_that_stays_unreadable_is_named_with_its_row():
    size = write("parquet", "a.parquet")
    config = FolderConfig(poll_s=0.005, num_splits=1, outage_timeout_s=0.02)
    source = FolderSource(config, "shaky:///day", dict.fromkeys(["event_id"]), event_time_column="event_time")
    reader = source.open(source.discover()[0], None, NOTHING)
    assert reader.read(5.0).num_rows
    Shaky.failures, Shaky.behind = [AnswerError(500)] * 1000, size // 8
    with pytest.raises(StorageError, match=r"/day/a\.parquet, row [1-9]\d*: nothing could be read for 0\.02 s: .*HTTP 500"):
        read_all(reader)


def test_a_local_disks_error_may_pass():
    """What the kernel answers with EIO keeps its number on the way through Arrow."""
    place, path = locate("/proc/self/mem")
    with pytest.raises(StorageError, match="/proc/self/mem: OSError") as caught, place.open(path) as stream, reading(path):
        stream.read(8)
    assert is_passing(caught.value.__cause__)


@pytest.mark.parametrize(
    "error", [OSError("no number"), OSError(errno.ENOSPC, "full"), AnswerError(404), ValueError("x"), KeyError(1)]
)
def test_what_will_not_pass(error):
    assert not is_passing(error)
