"""Commits under failures: the three outcomes, probes, copies, and parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.clock import ManualClock
from tidemill.errors import AlreadyExistsError, DeadlineError, NotFoundError, StorageError, UnsafeStoreError
from tidemill.storage.backends.fsspec import FsspecStorage
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Chunk
from tidemill.storage.commit import TRIES, copy_object, create_once, probe_exclusive_create, view
from tidemill.storage.parts import await_parts, part_key, write_part
from tidemill.testing.faulty_storage import FaultyStorage, Operation, SimulatedCrash


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class OverwritingStorage(LocalStorage):
    """A store that ignores that a key is taken, as object stores without conditional puts do."""

    def create(self, key: str, *chunks: Chunk) -> None:
        self.write(key, *chunks)


class LyingStorage(LocalStorage):
    """A store that reports the conflict but overwrites all the same."""

    def create(self, key: str, *chunks: Chunk) -> None:
        taken = self.local_path(key).exists()
        self.write(key, *chunks)
        if taken:
            raise AlreadyExistsError(key)


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("failures", range(1, TRIES))
def test_unknown_outcome_is_settled_by_trying_again(local: LocalStorage, clock: ManualClock, landed: bool, failures: int) -> None:
    storage = FaultyStorage(local)
    # Only creates are counted here: whether a conflict is read back depends on which of them landed.
    creates = range(1, failures + 1) if not landed else [1]
    (storage.fail_after if landed else storage.fail_at)(*creates)
    assert create_once(storage, "head", b"ours", clock=clock)
    assert local.read("head") == b"ours"


def test_unknown_outcome_then_another_writer_won(local: LocalStorage, clock: ManualClock) -> None:
    local.create("head", b"theirs")
    storage = FaultyStorage(local)
    storage.fail_at(1, 3)  # the first create, and the first look at the winner
    assert not create_once(storage, "head", b"ours", clock=clock)
    assert [operation.method for operation in storage.operations] == ["create", "create", "read", "create", "read"]
    assert local.read("head") == b"theirs"


def test_a_store_that_stays_down_is_given_up(local: LocalStorage, clock: ManualClock) -> None:
    storage = FaultyStorage(local)
    storage.fail_at(*range(1, 100))
    start = clock.monotonic()
    with pytest.raises(StorageError, match=f"'head'.*outcome unknown after {TRIES} tries"):
        create_once(storage, "head", b"ours", clock=clock)
    assert storage.num_operations == TRIES
    assert 0 < clock.monotonic() - start < 10


def test_a_slow_store_is_given_up_at_the_deadline(local: LocalStorage, clock: ManualClock) -> None:
    storage = FaultyStorage(local, clock=clock)
    storage.fail_at(*range(1, 100))
    storage.delay(8.0)
    with pytest.raises(StorageError, match="outcome unknown after 2 tries"):
        create_once(storage, "head", b"ours", clock=clock, deadline_s=10.0)


def test_an_unsafe_store_is_not_tried_again(tmp_path: Path, clock: ManualClock) -> None:
    storage = FaultyStorage(FsspecStorage(f"file://{tmp_path}"))
    with pytest.raises(UnsafeStoreError):
        create_once(storage, "head", b"ours", clock=clock)
    assert storage.num_operations == 1


def test_probing_refuses_a_store_that_overwrites(tmp_path: Path) -> None:
    storage = OverwritingStorage(tmp_path)
    with pytest.raises(UnsafeStoreError, match="created the same object twice"):
        probe_exclusive_create(storage)
    assert storage.list() == []


def test_probing_refuses_a_store_that_overwrites_and_says_otherwise(tmp_path: Path) -> None:
    storage = LyingStorage(tmp_path)
    with pytest.raises(UnsafeStoreError, match="overwrote"):
        probe_exclusive_create(storage)
    assert storage.list() == []


def test_probing_passes_failures_on(local: LocalStorage) -> None:
    storage = FaultyStorage(local)
    storage.fail_at(1)
    with pytest.raises(StorageError, match="operation 1") as caught:
        probe_exclusive_create(storage)
    assert not isinstance(caught.value, UnsafeStoreError)


def test_copies_are_links_between_local_stores(local: LocalStorage, tmp_path: Path) -> None:
    target = LocalStorage(tmp_path / "other")
    local.write("shard", b"rows")
    for _ in range(2):
        copy_object(local, "shard", target, "deep/shard")
    assert target.local_path("deep/shard").samefile(local.local_path("shard"))
    local.write("shard", b"replaced")
    assert target.read("deep/shard") == b"rows"


def test_copies_of_symbolic_links_hold_the_bytes(local: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"rows")
    local.root.mkdir()
    local.local_path("link").symlink_to(tmp_path / "real")
    copy_object(local, "link", local, "copy")
    assert not local.local_path("copy").is_symlink()
    assert local.read("copy") == b"rows"


def test_copies_between_different_stores_survive_failures(local: LocalStorage, tmp_path: Path) -> None:
    target = FaultyStorage(LocalStorage(tmp_path / "other"))
    target.fail_after(1)
    local.write("shard", b"rows")
    copy_object(local, "shard", target, "shard")
    assert target.read("shard") == b"rows"


def test_view_outlives_the_object(local: LocalStorage) -> None:
    local.write("shard", b"rows")
    data = view(local, "shard")
    local.write("shard", b"other rows")
    local.delete("shard")
    assert data == b"rows"
    assert data.readonly
    with pytest.raises(NotFoundError, match="shard"):
        view(local, "shard")


def test_parts_come_back_in_rank_order(local: LocalStorage, clock: ManualClock) -> None:
    for rank in (2, 0, 1, 3):
        assert write_part(local, "segments/1/7", rank, b"%d" % rank) == part_key("segments/1/7", rank)
    assert local.list()[0].key == "segments/1/7/part-00000.json"
    assert await_parts(local, "segments/1/7", 3, 10.0, clock) == [b"0", b"1", b"2"]


class ArrivingClock(ManualClock):
    """Whenever somebody sleeps, the next rank's part arrives."""

    def __init__(self, storage: LocalStorage, ranks: list[int]) -> None:
        super().__init__()
        self._storage, self._ranks = storage, ranks

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self._ranks:
            rank = self._ranks.pop(0)
            write_part(self._storage, "cut", rank, b"%d" % rank)


def test_waits_for_late_parts_through_store_failures(local: LocalStorage) -> None:
    storage = FaultyStorage(local)
    storage.fail_at(1, 4, 5)
    assert await_parts(storage, "cut", 3, 60.0, ArrivingClock(local, [1, 2, 0])) == [b"0", b"1", b"2"]
    reads = [operation for operation in storage.operations if operation.method == "read"]
    assert Operation("read", "cut/part-00001.json") in reads


def test_missing_parts_are_named_at_the_deadline(local: LocalStorage) -> None:
    clock = ArrivingClock(local, [1, 4])
    start = clock.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 0, 2 under 'cut' in .* after 5 s$"):
        await_parts(local, "cut", 3, 5.0, clock)
    assert clock.monotonic() - start == pytest.approx(5.0)


def test_a_failing_store_is_named_at_the_deadline(local: LocalStorage, clock: ManualClock) -> None:
    storage = FaultyStorage(local)
    storage.fail_at(*range(1, 1000))
    with pytest.raises(DeadlineError, match=r"rank 0 under.*last failure: operation"):
        await_parts(storage, "cut", 1, 5.0, clock)
    assert 6 <= storage.num_operations <= 20  # often at first, then about once a second


def test_no_ranks_need_no_parts(local: LocalStorage, clock: ManualClock) -> None:
    assert await_parts(local, "cut", 0, 0.0, clock) == []


def test_faults_happen_where_they_were_set(local: LocalStorage) -> None:
    storage = FaultyStorage(local)
    storage.fail_at(2)
    storage.fail_after(3)
    storage.write("one", b"1")
    with pytest.raises(StorageError, match="operation 2, write of 'two'"):
        storage.write("two", b"2")
    with pytest.raises(StorageError, match="operation 3, write of 'three'"):
        storage.write("three", b"3")
    assert [info.key for info in storage.list()] == ["one", "three"]
    assert storage.operations == [
        Operation("write", "one"),
        Operation("write", "two"),
        Operation("write", "three"),
        Operation("list", ""),
    ]


def test_a_crashed_store_stays_dead(local: LocalStorage) -> None:
    storage = FaultyStorage(local)
    storage.crash_at(2)
    storage.write("one", b"1")
    for _ in range(2):
        with pytest.raises(SimulatedCrash, match="create of 'two'"):
            storage.create("two", b"2")
    assert not issubclass(SimulatedCrash, Exception)
    assert [info.key for info in local.list()] == ["one"]


def test_a_commit_survives_a_crash_at_every_operation(tmp_path: Path) -> None:
    def publish(storage: FaultyStorage) -> None:
        storage.write("segments/part", b"rows")
        assert create_once(storage, "releases/1.json", b"manifest", clock=ManualClock())

    complete = FaultyStorage(LocalStorage(tmp_path / "complete"))
    publish(complete)
    for number in range(1, complete.num_operations + 1):
        local = LocalStorage(tmp_path / str(number))
        storage = FaultyStorage(local)
        storage.crash_at(number)
        with pytest.raises(SimulatedCrash):
            publish(storage)
        assert local.list("releases/") == []
        publish(FaultyStorage(local))
        assert [info.key for info in local.list()] == ["releases/1.json", "segments/part"]


def test_a_flipped_byte_shows_in_reads_only(local: LocalStorage) -> None:
    storage = FaultyStorage(local)
    storage.write("key", b"abc")
    storage.flip_byte("key", 1)
    assert storage.read("key") == b"a\x9dc"
    assert storage.local_path("key") is None
    assert local.read("key") == b"abc"


def test_a_delay_is_spent_on_the_clock(local: LocalStorage, clock: ManualClock) -> None:
    storage = FaultyStorage(local, clock=clock)
    start = clock.monotonic()
    storage.write("key", b"")
    storage.delay(2.5)
    storage.read("key")
    storage.list()
    assert clock.monotonic() - start == 5.0
