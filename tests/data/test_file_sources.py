"""What all file sources must get right about which files there are: DCL 9.12, requirement-like facts of 1.7 and 1.8."""

from __future__ import annotations

import os
import random

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from tidemill.data.assignment import plan
from tidemill.data.intervals import NOTHING
from tidemill.data.progress import Progress, verify_splits
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.files import FileSet, locate
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.data.split import Provenance
from tidemill.errors import ConfigError, DataError, MissingExtraError, SourceChangedError, StorageError
from tidemill.testing.source_contract import numbered


class Bucket(MemoryFileSystem):
    """An object store in memory: objects have tags that change with their content, listings have no order."""

    protocol = ("bucket", "bkt")
    store: dict = {}  # noqa: RUF012 - MemoryFileSystem keeps its objects in the class
    pseudo_dirs = [""]  # noqa: RUF012
    failure: Exception | None = None
    find = AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bucket://").removeprefix("bkt://"))

    def info(self, path, **options):
        found = super().info(path, **options)
        if found["type"] == "file":
            content = self.store[self._strip_protocol(path)].getvalue()
            found["ETag"] = f'"{hash(content):x}"'
        return found

    def ls(self, path, detail=True, **options):
        if self.failure is not None:
            raise self.failure
        found = super().ls(path, detail=True, **options)
        random.shuffle(found)
        found = [self.info(entry["name"]) if entry["type"] == "file" else entry for entry in found]
        return found if detail else [entry["name"] for entry in found]


@pytest.fixture
def bucket():
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    fsspec.register_implementation("bkt", Bucket, clobber=True)
    Bucket.store.clear()
    Bucket.failure = None
    yield fsspec.filesystem("bucket")
    Bucket.store.clear()
    Bucket.failure = None


class Parquet:
    suffix = ".parquet"

    @staticmethod
    def source(paths):
        return ParquetSource(ParquetConfig(paths=paths, event_time_column="event_time"), ["event_id"])

    @staticmethod
    def write(table, out):
        pq.write_table(table, out, compression="none", use_dictionary=False, write_statistics=False)


class Csv:
    suffix = ".csv"

    @staticmethod
    def source(paths):
        types = {"event_id": pa.string(), "event_time": pa.float64()}
        return CsvSource(CsvConfig(paths=paths, with_header=True, event_time_column="event_time"), types)

    @staticmethod
    def write(table, out):
        pyarrow.csv.write_csv(table, out)


class Store:
    """One kind of files in one kind of store."""

    def __init__(self, kind, files, root):
        self.kind, self.files, self.root = kind, files, root

    def write(self, name, start, stop):
        with self.files.open(f"{self.root}/{name}{self.kind.suffix}", "wb") as out:
            self.kind.write(numbered(start, stop), out)

    def source(self, *names):
        return self.kind.source(",".join(f"{self.root}/{name}{self.kind.suffix}" for name in names))


@pytest.fixture(params=["local", "bucket"])
def root(request, tmp_path, bucket):
    if request.param == "local":
        return fsspec.filesystem("file"), str(tmp_path)
    return bucket, "bucket://data/day"


@pytest.fixture(params=[Parquet, Csv])
def store(request, root):
    found = Store(request.param, *root)
    found.write("b", 0, 20)
    found.write("a", 20, 40)
    return found


def train(source, states=(), limit=10**9):
    """Read up to so many rows; their ids and the states of a checkpoint then."""
    splits = source.discover()
    progress = Progress()
    if states:
        splits = verify_splits(source, splits, states)
        progress = Progress.from_states(states)
    _, assigned = plan(splits, None, progress.done, 1, 0)
    reader = source.open_all([part for part in assigned if part.remaining])
    ids = []
    try:
        while len(ids) < limit:
            raw = reader.read(1.0)
            ids += raw.table["event_id"].to_pylist()
            progress.advance(Provenance(raw.runs, raw.num_rows))
    except EOFError:
        pass
    finally:
        reader.close()
    return ids, progress.to_states(splits)


def ids(*ranges):
    return [f"e{number}" for start, stop in ranges for number in range(start, stop)]


def test_files_are_read_in_the_order_of_their_names_each_once(store):
    read, _ = train(store.source("b", "*", "a"))
    assert read == ids((20, 40), (0, 20))


def test_12a_a_file_that_was_added_adds_its_rows_alone(store):
    """DCL 9.12 (a)."""
    _, states = train(store.source("*"))
    store.write("aa", 40, 45)
    read, states = train(store.source("*"), states)
    assert read == ids((40, 45))
    assert train(store.source("*"), states)[0] == []


def test_12a_a_file_that_was_added_in_the_middle_of_the_day(store):
    """DCL 9.12 (a), with a part of the others done."""
    first, states = train(store.source("*"), limit=20)
    store.write("0", 40, 45)
    read, _ = train(store.source("*"), states)
    assert first + read == ids((20, 40), (40, 45), (0, 20))


def test_12b_a_rewritten_file_is_an_error_that_names_it(store):
    """DCL 9.12 (b)."""
    _, states = train(store.source("*"))
    store.write("a", 20, 41)
    with pytest.raises(SourceChangedError, match=rf"/a\{store.kind.suffix} changed since it was first read .*rows was 20, is 21"):
        train(store.source("*"), states)


def test_12b_a_rewritten_file_of_the_same_size_is_told_by_tag_or_content(store):
    if store.kind is Parquet and "://" not in store.root:
        pytest.skip("a local Parquet file without statistics is told apart by its size and footer only")
    _, states = train(store.source("*"))
    store.write("a", 30, 50)
    with pytest.raises(SourceChangedError, match=r"(etag|digest) was"):
        train(store.source("*"), states)


def test_12c_d_neither_the_order_of_listings_nor_the_words_of_patterns_matter(store):
    """DCL 9.12 (c), (d)."""
    _, states = train(store.source("*"))
    assert train(store.source("b", "a"), states)[0] == []
    assert train(store.source("[ab]", "?"), states)[0] == []
    other = store.root.replace("bucket://", "bkt://") if "://" in store.root else f"{store.root}/../{store.root.rpartition('/')[2]}"
    moved = Store(store.kind, store.files, other)
    assert train(moved.source("*"), states)[0] == []


def test_a_file_read_in_part_that_is_gone_is_an_error_that_names_it(store):
    _, states = train(store.source("*"), limit=20)
    part = [state.model_copy(update={"intervals": [(0, 7)]}) if state.intervals else state for state in states]
    store.files.rm(f"{store.root}/a{store.kind.suffix}")
    with pytest.raises(SourceChangedError, match=rf"/a\{store.kind.suffix} was read in part by an earlier run and is gone"):
        train(store.source("*"), part)


def test_a_pattern_follows_links_to_folders_and_a_tree_doesnt(tmp_path):
    """As in a shell: what "*" names is never left out, and "**" doesn't run in a circle."""
    (tmp_path / "far").mkdir()
    pq.write_table(numbered(0, 3), tmp_path / "far" / "x.parquet")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "day=1").symlink_to(tmp_path / "far")
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data")
    assert train(Parquet.source(f"{tmp_path}/data/*/*.parquet"))[0] == ids((0, 3))
    with pytest.raises(DataError, match="no Parquet file matches"):
        Parquet.source(f"{tmp_path}/data/**/*.parquet").discover()


def test_a_link_to_nothing_isnt_left_out_silently(tmp_path):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.parquet").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"b\.parquet: a link to something that isn't there"):
        FileSet(f"{tmp_path}/*.parquet", "Parquet file", "*.parquet").find()
    assert [file.path for file in FileSet(f"{tmp_path}/a*", "Parquet file", "*.parquet").find()] == [f"{tmp_path}/a.parquet"]


def test_a_name_that_isnt_text_is_told(tmp_path):
    open(os.fsencode(tmp_path) + b"/\xff.parquet", "wb").close()
    with pytest.raises(DataError, match=r"udcff\.parquet': the name isn't UTF-8"):
        FileSet(f"{tmp_path}/*.parquet", "Parquet file", "*.parquet").find()


def test_one_pattern_of_several_that_matches_nothing_is_named(store):
    with pytest.raises(DataError, match=rf"no \w+ file matches '.*/nothing\{store.kind.suffix}'"):
        store.source("a", "nothing").discover()


def test_a_store_that_cant_be_reached_can_be_retried(bucket):
    Bucket.failure = ConnectionError("no route")
    with pytest.raises(StorageError, match=r"bucket://data/\*: ConnectionError: no route"):
        Parquet.source("bucket://data/*").discover()


def test_a_store_that_goes_away_behind_the_listing_can_be_retried_too(bucket, monkeypatch):
    store = Store(Parquet, bucket, "bucket://data/day")
    store.write("a", 0, 3)
    source = ParquetSource(ParquetConfig(paths="bucket://data/day/a.parquet", outage_timeout_s=0.0))
    [split] = source.discover()

    def away(*args, **options):
        raise ConnectionError("no route")

    for call in ("info", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, call, away)
            with pytest.raises(StorageError, match=r"/data/day/a\.parquet: ConnectionError: no route"):
                source.open(split, None, NOTHING)


def test_stores_that_arent_known_or_installed_are_named():
    with pytest.raises(ConfigError, match=r"'nosuch://x/y': .*nosuch"):
        locate("nosuch://x/y")
    with pytest.raises(ConfigError, match="chained URLs"):
        locate("simplecache::memory://x")


def test_a_store_whose_package_is_missing_says_what_to_install(monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingExtraError, match="'s3://bucket/x': Install s3fs"):
        locate("s3://bucket/x")


def test_names_keep_the_host_and_never_who_logs_in(monkeypatch):
    class Remote(MemoryFileSystem):
        protocol = "sftp"

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (Remote(), "/data/*.csv"))
    place, path = locate("sftp://me:secret@host:22/data/*.csv")
    assert place.identity(path) == "sftp://host:22/data/*.csv"
