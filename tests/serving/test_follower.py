from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from tests.serving.conftest import CLOCK_ZERO, Lineage, LineageMaker, columns_of, random_rows
from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import StorageError
from tidemill.lineage.by_hand import promote, roll_back
from tidemill.serving.follower import Follower, Identity
from tidemill.serving.metrics import Metrics
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.testing.faulty_storage import FaultyStorage

ROWS = random_rows(np.random.default_rng(5), 40)
STATUS = layout.serving_status("a")


def follower_of(storage: Storage) -> Follower:
    clock = ManualClock(CLOCK_ZERO + 10)
    return Follower(storage, Identity("a", "http://127.0.0.1:1"), Metrics(clock), clock)


def status_of(root: LocalStorage) -> ServingStatus:
    return ServingStatus.parse(root.read(STATUS), where=STATUS)


def assert_serves(follower: Follower, lineage: Lineage, position: tuple[int, int]) -> None:
    predictor = follower.predictor
    assert predictor is not None
    assert (predictor.generation.lineage, predictor.generation.position) == (lineage.folder, position)
    scores = predictor.score(columns_of(ROWS), len(ROWS))["logits"]
    assert np.array_equal(scores, lineage.states[position].scores(ROWS))


def test_follows_the_head(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, lineage, (0, 0))
    lineage.release()
    follower.poll()
    assert_serves(follower, lineage, (1, 1))
    lineage.release(term=2)
    lineage.release(term=2)
    follower.poll()
    assert_serves(follower, lineage, (2, 3))
    follower.poll()
    status = status_of(root)
    assert (status.heartbeat, status.ready, status.error) == (4, True, None)
    assert (status.deployment, status.lineage, status.snapshot_digest) == (1, lineage.folder, lineage.digest)
    assert (status.term, status.sequence, status.step, status.watermark) == (2, 3, 30, CLOCK_ZERO + 3)


def test_an_old_generation_goes_with_its_last_request(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    follower = follower_of(root)
    follower.poll()
    in_flight = follower.predictor
    assert in_flight is not None
    tables = weakref.ref(in_flight.generation.tables)
    lineage.release(everything=True)
    follower.poll()
    assert_serves(follower, lineage, (1, 1))
    assert np.array_equal(in_flight.score(columns_of(ROWS), len(ROWS))["logits"], lineage.states[0, 0].scores(ROWS))
    del in_flight
    gc.collect()
    assert tables() is None


def test_a_snapshot_without_probe_rows_is_served(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage(probes=None)
    lineage.deploy(1)
    lineage.release()
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, lineage, (1, 1))


def test_a_root_without_deployments_is_not_ready(root: LocalStorage, new_lineage: LineageMaker) -> None:
    new_lineage()
    follower = follower_of(root)
    follower.poll()
    assert follower.predictor is None
    status = status_of(root)
    assert not status.ready
    assert "neither deployments nor a snapshot" in (status.error or "")


def test_one_folder_is_followed_and_never_written(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    storage = LocalStorage(root.root / lineage.folder)
    before = [info.key for info in storage.list()]
    follower = follower_of(storage)
    follower.poll()
    assert [info.key for info in storage.list()] == before
    lineage.release()
    follower.poll()
    assert follower.generation is not None
    assert follower.generation.name()["lineage"] == "20240101"
    assert follower.generation.position == (1, 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
@pytest.mark.parametrize("what", ["manifest", "segment", "dense"])
def test_a_damaged_release_keeps_the_generation_until_it_is_whole(
    root: LocalStorage, new_lineage: LineageMaker, what: str, damage: str
) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    lineage.release()
    manifest = lineage.release()
    lineage.release()
    files = {"manifest": layout.release(2), "segment": manifest.files[0].key, "dense": manifest.files[-1].key}
    key = lineage.key(files[what])
    whole = root.read(key)
    if damage == "delete":
        root.delete(key)
    elif damage == "cut":
        root.write(key, whole[: len(whole) // 2])
    else:
        root.write(key, whole[:1] + bytes([whole[1] ^ 255]) + whole[2:])
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, lineage, (1, 1))
    assert status_of(root).error is not None
    root.write(key, whole)
    follower.poll()
    assert_serves(follower, lineage, (1, 3))
    assert status_of(root).error is None


def test_a_release_that_does_not_fit_holds_up_nothing_before_it(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    follower = follower_of(root)
    follower.poll()
    lineage.release()
    lineage.release(term=3)
    lineage.release(term=2)
    follower.poll()
    assert_serves(follower, lineage, (3, 2))
    assert "doesn't follow" in (follower.error or "")


def test_a_higher_deployment_switches_and_a_lower_one_is_ignored(root: LocalStorage, new_lineage: LineageMaker) -> None:
    first, second = new_lineage("20240101", seed=1), new_lineage("20240102", seed=2)
    second.release()
    first.deploy(3)
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, first, (0, 0))
    second.deploy(2)
    follower.poll()
    assert_serves(follower, first, (0, 0))
    second.deploy(4)
    follower.poll()
    assert_serves(follower, second, (1, 1))
    root.delete(layout.deployment(4))
    follower.poll()
    assert_serves(follower, second, (1, 1))
    assert "vanished" in (follower.error or "")
    assert status_of(root).deployment == 4


def test_pins_hold_back_and_roll_back(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    for _ in range(4):
        lineage.release()
    lineage.deploy(1)
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, lineage, (1, 4))
    lineage.deploy(2, pin=(1, 2))
    follower.poll()
    assert_serves(follower, lineage, (1, 2))
    lineage.release()
    follower.poll()
    assert_serves(follower, lineage, (1, 2))
    lineage.deploy(3, pin=(1, 7))
    follower.poll()
    assert_serves(follower, lineage, (1, 5))
    lineage.deploy(4)
    lineage.release()
    follower.poll()
    assert_serves(follower, lineage, (1, 6))
    assert follower.generation is not None
    assert follower.generation.deployment == 4


@pytest.mark.parametrize("why", ["missing", "other digest", "torn program"])
def test_a_deployment_that_cannot_be_served_keeps_the_generation(root: LocalStorage, new_lineage: LineageMaker, why: str) -> None:
    first, second = new_lineage("20240101", seed=1), new_lineage("20240102", seed=2)
    first.deploy(1)
    follower = follower_of(root)
    follower.poll()
    broken = {"missing": layout.SNAPSHOT, "torn program": "snapshot/program.pt2"}.get(why)
    whole = b""
    if broken:
        whole = root.read(second.key(broken))
        root.write(second.key(broken), whole[:100]) if why == "torn program" else root.delete(second.key(broken))
    second.deploy(2, **({} if broken else {"snapshot_digest": "a" * 64}))
    first.release()
    follower.poll()
    assert_serves(follower, first, (0, 0))
    status = status_of(root)
    assert status.ready
    assert (status.deployment, status.lineage) == (1, first.folder)
    assert "20240102" in (status.error or "")
    if broken:
        root.write(second.key(broken), whole)
    else:
        second.deploy(3)
    follower.poll()
    assert_serves(follower, second, (0, 0))
    assert follower.error is None


@pytest.mark.parametrize("torn", [1, 2])
def test_another_lineage_is_served_with_all_its_releases_or_not_at_all(
    root: LocalStorage, new_lineage: LineageMaker, torn: int
) -> None:
    first, second = new_lineage("20240101", seed=1), new_lineage("20240102", seed=2)
    first.deploy(1)
    first.release()
    follower = follower_of(root)
    follower.poll()
    second.release()
    second.release()
    second.deploy(2)
    key = second.key(layout.release(torn))
    whole = root.read(key)
    root.write(key, whole[:100])
    follower.poll()
    assert_serves(follower, first, (1, 1))
    status = status_of(root)
    assert (status.deployment, status.lineage) == (1, first.folder)
    assert status.error is not None
    root.write(key, whole)
    follower.poll()
    assert_serves(follower, second, (1, 2))
    assert follower.error is None


def test_a_torn_deployment_is_named_and_skipped(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    root.write(layout.deployment(2), b"{")
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, lineage, (0, 0))
    assert "00000002.json" in (status_of(root).error or "")


def test_a_release_whose_scores_are_not_finite_is_not_served(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    follower = follower_of(root)
    follower.poll()
    lineage.state.tables["pooled/item_emb"][:] = np.inf
    whole_rows = lineage._change

    def poisoned(spec, generator, everything):
        arrays = whole_rows(spec, generator, everything)
        arrays[f"{spec.name}/rows"] = np.full_like(arrays[f"{spec.name}/rows"], np.nan)
        return arrays

    lineage._change = poisoned
    lineage.release(everything=True)
    follower.poll()
    assert_serves(follower, lineage, (0, 0))
    assert "aren't finite" in (follower.error or "")


def test_no_storage_fault_ends_the_following(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    lineage.release()
    counting = FaultyStorage(root)
    follower_of(counting).poll()
    num_operations = counting.num_operations
    assert num_operations > 15
    for number in range(1, num_operations + 1):
        storage = FaultyStorage(root)
        storage.fail_at(number)
        follower = follower_of(storage)
        follower.poll()
        follower.poll()
        assert_serves(follower, lineage, (1, 1))
        assert follower.error is None


class _Surprise(LocalStorage):
    """Fails in a way that no store should, a few times."""

    def __init__(self, root: LocalStorage, times: int, seen: Callable[[], None]) -> None:
        super().__init__(root.root)
        self._left = times
        self._seen = seen

    def list(self, prefix: str = ""):
        if self._left:
            self._left -= 1
            raise RuntimeError("a surprise")
        self._seen()
        return super().list(prefix)


def test_the_thread_survives_surprises_and_stops(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    recovered = threading.Event()
    clock = ManualClock()
    follower = Follower(
        _Surprise(root, 3, recovered.set), Identity("a", "http://127.0.0.1:1"), Metrics(clock), clock, poll_interval_s=0.01
    )
    follower.start()
    assert recovered.wait(20)
    follower.stop(deadline_s=20)
    status = status_of(root)
    assert not status.ready
    assert status.heartbeat >= 4


def test_a_status_that_cannot_be_written_is_counted(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)

    class ReadOnly(LocalStorage):
        def write(self, key, *chunks):
            raise StorageError("read-only")

    clock = ManualClock(CLOCK_ZERO + 10)
    metrics = Metrics(clock)
    follower = Follower(ReadOnly(root.root), Identity("a", "http://127.0.0.1:1"), metrics, clock)
    metrics.watch(lambda: follower.generation)
    lineage.release()
    follower.poll()
    assert_serves(follower, lineage, (1, 1))
    text = metrics.text().decode()
    assert "tidemill_status_errors_total 1.0" in text
    assert "tidemill_generation_sequence 1.0" in text
    assert "tidemill_generation_age_seconds 10.0" in text
    assert "tidemill_freshness_seconds 12.0" in text
    assert "tidemill_rows_applied_total 28.0" in text
    assert "tidemill_swaps_total 1.0" in text


def test_rollbacks_and_promotions_by_hand_are_obeyed(root: LocalStorage, new_lineage: LineageMaker) -> None:
    """A rollback freezes the newest good release of the lineage before; a promotion ends it."""
    first, second = new_lineage("20240101", seed=1), new_lineage("20240102", seed=2)
    for lineage in (first, first, first, second):
        lineage.release()
    root.write(first.key(layout.release(3)), b"torn")
    promote(root, "20240101", "first")
    promote(root, "20240102", "caught up")
    follower = follower_of(root)
    follower.poll()
    assert_serves(follower, second, (1, 1))
    roll_back(root, "day 2 is bad")
    second.release()
    follower.poll()
    assert_serves(follower, first, (1, 2))
    assert (follower.error, status_of(root).deployment) == (None, 3)
    roll_back(root, "further back", date="20240101", sequence=0)
    follower.poll()
    assert_serves(follower, first, (0, 0))
    promote(root, "20240102", "good after all")
    follower.poll()
    assert_serves(follower, second, (1, 2))
