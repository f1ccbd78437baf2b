"""What every store must do. Subclass `StorageContract`, give it a `storage` fixture with an empty store, and let pytest run it."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tidemill.clock import ManualClock
from tidemill.errors import AlreadyExistsError, NotFoundError, StorageError
from tidemill.storage.base import Storage
from tidemill.storage.commit import copy_object, create_once, probe_exclusive_create

RACING_THREADS = 16
_RACES = 8
_REWRITES = 60
# Larger than any buffer on the way, so that a torn write would show.
_VERSION_SIZE = 256 * 1024

BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", ".tmp-1", "a/.tmp-1", "a\0b"]


class StorageContract:
    """Tests over one store; every test gets an empty one from the fixture `storage` that a subclass defines."""

    def test_reads_what_was_written(self, storage: Storage) -> None:
        storage.write("a/b/c.bin", b"\x00\xffdata")
        assert storage.read("a/b/c.bin") == b"\x00\xffdata"

    def test_joins_chunks_of_every_kind(self, storage: Storage) -> None:
        storage.write("written", b"one ", bytearray(b"two "), memoryview(b"three"))
        storage.create("created", b"one ", bytearray(b"two "), memoryview(b"three"))
        assert storage.read("written") == storage.read("created") == b"one two three"

    @pytest.mark.parametrize("chunks", [(), (b"",)])
    def test_keeps_empty_objects(self, storage: Storage, chunks: tuple[bytes, ...]) -> None:
        storage.write("written", *chunks)
        storage.create("created", *chunks)
        assert storage.read("written") == storage.read("created") == b""
        assert [(info.key, info.size) for info in storage.list()] == [("created", 0), ("written", 0)]

    def test_keeps_no_tie_to_the_callers_buffer(self, storage: Storage) -> None:
        buffer = bytearray(b"before")
        storage.write("written", buffer)
        storage.create("created", memoryview(buffer))
        buffer[:] = b"after!"
        assert storage.read("written") == storage.read("created") == b"before"

    def test_write_replaces(self, storage: Storage) -> None:
        storage.write("key", b"a longer first version")
        storage.write("key", b"second")
        assert storage.read("key") == b"second"
        assert [(info.key, info.size) for info in storage.list()] == [("key", 6)]

    def test_create_refuses_a_taken_key(self, storage: Storage) -> None:
        storage.create("key", b"first")
        with pytest.raises(AlreadyExistsError, match="key"):
            storage.create("key", b"second")
        storage.write("written", b"first")
        with pytest.raises(AlreadyExistsError, match="written"):
            storage.create("written", b"first")
        assert storage.read("key") == storage.read("written") == b"first"

    def test_missing_objects_are_named(self, storage: Storage) -> None:
        storage.write("folder/key", b"")
        for key in ("missing", "folder", "folder/missing", "folder/key/missing"):
            with pytest.raises(NotFoundError, match=key):
                storage.read(key)

    def test_delete(self, storage: Storage) -> None:
        storage.write("folder/one", b"1")
        storage.write("folder/two", b"2")
        for key in ("folder/one", "folder/one", "missing", "folder", "folder/two/deeper"):
            storage.delete(key)
        assert [info.key for info in storage.list()] == ["folder/two"]
        with pytest.raises(NotFoundError):
            storage.read("folder/one")
        storage.create("folder/one", b"again")
        assert storage.read("folder/one") == b"again"

    def test_lists_by_prefix_in_key_order(self, storage: Storage) -> None:
        keys = ["a-b", "a/b", "a/b.json", "a/c/d", "ab/c", "releases/00000002.json", "releases/00000010.json", "z/a/.hidden"]
        for key in reversed(keys):
            storage.write(key, key.encode())
        starts = {key[:length] for key in keys for length in range(len(key) + 1)}
        for prefix in [*sorted(starts), "missing", "missing/x", "a/b/c", "a/c/d/e"]:
            listed = storage.list(prefix)
            assert [info.key for info in listed] == [key for key in keys if key.startswith(prefix)], prefix
            assert all(info.size == len(info.key) for info in listed)

    @pytest.mark.parametrize("method", ["write", "create"])
    def test_nothing_lies_below_an_object_on_a_local_store(self, storage: Storage, method: str) -> None:
        storage.write("object", b"")
        if storage.local_path("object") is None:
            return  # object stores have no folders, so they may allow it
        with pytest.raises(StorageError, match="is an object") as caught:
            getattr(storage, method)("object/below", b"")
        assert not isinstance(caught.value, AlreadyExistsError | NotFoundError)

    def test_lists_an_empty_store(self, storage: Storage) -> None:
        assert storage.list() == []
        assert storage.list("releases/") == []

    def test_says_when_an_object_was_last_written(self, storage: Storage) -> None:
        storage.write("key", b"first")
        first = storage.list("key")[0].modified_at
        storage.write("key", b"second")
        assert math.isfinite(first)
        assert 1_600_000_000 < first <= storage.list("key")[0].modified_at

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_refuses_keys_that_could_leave_the_root(self, storage: Storage, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: storage.read(key),
            lambda: storage.write(key, b""),
            lambda: storage.create(key, b""),
            lambda: storage.delete(key),
            lambda: storage.local_path(key),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="isn't a storage key"):
                call()
        assert storage.list() == []

    @pytest.mark.parametrize("prefix", ["/", "../", "..", "a/../b", "a//"])
    def test_refuses_prefixes_that_could_leave_the_root(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(StorageError, match="no storage key starts with"):
            storage.list(prefix)

    def test_local_path_is_the_object_or_none(self, storage: Storage) -> None:
        storage.write("a/b", b"bytes")
        path = storage.local_path("a/b")
        assert path is None or path.read_bytes() == b"bytes"

    def test_one_of_many_racing_creators_wins(self, storage: Storage) -> None:
        for race in range(_RACES):
            key = f"terms/{race}.json"
            start = threading.Barrier(RACING_THREADS)

            def create(number: int, key: str = key, start: threading.Barrier = start) -> bool:
                start.wait(timeout=30)
                try:
                    storage.create(key, b"%d " % number * 1000)
                except AlreadyExistsError:
                    return False
                return True

            with ThreadPoolExecutor(RACING_THREADS) as pool, _frequent_switches():
                won = list(pool.map(create, range(RACING_THREADS)))
            assert won.count(True) == 1
            assert storage.read(key) == b"%d " % won.index(True) * 1000

    def test_readers_see_whole_versions_only(self, storage: Storage) -> None:
        def write() -> None:
            for version in range(_REWRITES):
                storage.write("head", bytes([version]) * _VERSION_SIZE)

        seen = _poll_while(write, lambda: [_whole(storage, "head"), *(info.size for info in storage.list())])
        assert seen - {None} <= {*range(_REWRITES), _VERSION_SIZE}

    def test_readers_see_created_objects_whole_or_not_at_all(self, storage: Storage) -> None:
        def create() -> None:
            for version in range(_REWRITES):
                storage.create(f"releases/{version}", bytes([version]) * _VERSION_SIZE)

        seen = _poll_while(create, lambda: [_whole(storage, info.key) for info in storage.list("releases/")[-1:]])
        assert seen <= set(range(_REWRITES))
        assert {info.size for info in storage.list()} == {_VERSION_SIZE}

    def test_create_once_tells_ours_from_theirs(self, storage: Storage) -> None:
        clock = ManualClock()
        assert create_once(storage, "releases/1.json", b"ours", clock=clock)
        assert create_once(storage, "releases/1.json", b"ours", clock=clock)
        assert not create_once(storage, "releases/1.json", b"theirs", clock=clock)
        assert storage.read("releases/1.json") == b"ours"

    def test_probing_finds_it_exclusive_and_leaves_nothing(self, storage: Storage) -> None:
        probe_exclusive_create(storage)
        assert storage.list() == []

    def test_copies_objects(self, storage: Storage) -> None:
        storage.write("from", b"bytes")
        storage.write("empty", b"")
        for _ in range(2):
            copy_object(storage, "from", storage, "to/here")
            copy_object(storage, "empty", storage, "to/empty")
        with pytest.raises(AlreadyExistsError, match="to/here"):
            copy_object(storage, "empty", storage, "to/here")
        with pytest.raises(NotFoundError, match="missing"):
            copy_object(storage, "missing", storage, "to/missing")
        storage.write("from", b"changed")
        assert storage.read("to/here") == b"bytes"
        assert [info.key for info in storage.list()] == ["empty", "from", "to/empty", "to/here"]


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Let threads take turns every few microseconds, so that a look followed by a write loses its race."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _whole(storage: Storage, key: str) -> int | None:
    """The version an object holds, None if it isn't there. A torn object fails the test."""
    try:
        data = storage.read(key)
    except NotFoundError:
        return None
    assert len(data) == _VERSION_SIZE
    assert data.count(data[0]) == len(data), "a reader saw parts of two versions"
    return data[0]


def _poll_while(work: Callable[[], None], look: Callable[[], list[int | None]]) -> set[int | None]:
    """All that `look` saw while `work` ran in another thread, and once after it."""
    seen: set[int | None] = set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        while not running.done():
            seen.update(look())
        running.result()
    return seen | set(look())
