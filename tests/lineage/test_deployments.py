"""Deployments: numbers that are never shared, dates that don't go back, rollbacks; and what the servers confirm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemill.clock import ManualClock
from tidemill.contracts.lineage import Deployment
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import CorruptError, LineageError, StorageError
from tidemill.lineage.deployments import (
    Pin,
    confirmed,
    deploy,
    is_deployed,
    newest_deployment,
    served_watermark,
    serving_statuses,
)
from tidemill.lineage.liveness import LivenessTracker
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Chunk
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash

DAY1, DAY2, DAY3 = "lineages/20240101", "lineages/20240102", "lineages/20240103"


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def active(root: LocalStorage) -> Deployment:
    return Deployment.parse(root.read("active.json"), where="active.json")


def test_numbers_go_up_and_the_hint_is_the_newest(root: LocalStorage) -> None:
    assert newest_deployment(root) is None
    first, second = deploy(root, DAY1, "d1", "first"), deploy(root, DAY2, "d2", "caught up")
    assert (first.number, second.number) == (1, 2)
    assert newest_deployment(root) == second == active(root)


def test_deploying_the_same_again_is_a_no_op(root: LocalStorage) -> None:
    first = deploy(root, DAY1, "d1", "first")
    assert deploy(root, DAY1, "d1", "again") == first
    assert deploy(root, DAY1, "another export", "again").number == 2


def test_an_older_date_is_refused_unless_it_is_a_pinned_rollback(root: LocalStorage) -> None:
    deploy(root, DAY2, "d2", "first")
    with pytest.raises(LineageError, match="older"):
        deploy(root, DAY1, "d1", "late")
    pinned = deploy(root, DAY1, "d1", "day 2 is bad", Pin(1, 9))
    assert (pinned.number, pinned.pin_term, pinned.pin_sequence) == (2, 1, 9)
    assert is_deployed(root, DAY2)
    assert not is_deployed(root, DAY3)


@pytest.mark.parametrize("lineage", ["20240101", "lineages/", "lineages/a/b", "/lineages/20240101", ""])
def test_only_lineages_of_the_root_can_be_deployed(root: LocalStorage, lineage: str) -> None:
    with pytest.raises(LineageError, match="isn't a lineage"):
        deploy(root, lineage, "d", "x")


def test_racing_deployers_never_share_a_number(root: LocalStorage) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(deploy, root, DAY1, f"d{number}", "race") for number in range(24)]
    numbers = sorted(future.result().number for future in futures)
    assert numbers == list(range(1, 25))
    newest = newest_deployment(root)
    assert newest is not None
    assert newest.number == 24


def test_an_older_deployer_that_loses_the_race_decides_anew(root: LocalStorage) -> None:
    class Raced(LocalStorage):
        """Just before this deployer creates its number, another one takes it."""

        def create(self, key: str, *chunks: Chunk) -> None:
            if key.startswith("deployments/") and newest_deployment(root) is None:
                deploy(root, DAY2, "d2", "was quicker")
            super().create(key, *chunks)

    with pytest.raises(LineageError, match="older"):
        deploy(Raced(root.root), DAY1, "d1", "slow")
    newest = newest_deployment(root)
    assert newest is not None
    assert (newest.number, newest.lineage) == (1, DAY2)


def test_a_deployer_that_dies_anywhere_leaves_a_state_that_the_next_one_completes(tmp_path: Path) -> None:
    completed = False
    for operation in range(1, 30):
        inner = LocalStorage(tmp_path / str(operation))
        deploy(inner, DAY1, "d1", "first")
        faulty = FaultyStorage(inner)
        faulty.crash_at(operation)
        try:
            deploy(faulty, DAY2, "d2", "dies")
            completed = True
        except SimulatedCrash:
            pass
        again = deploy(inner, DAY2, "d2", "again")
        assert again.number == 2
        assert active(inner) == newest_deployment(inner) == again
        if completed:
            break
    assert completed


def test_a_failing_hint_does_not_fail_the_deployment(root: LocalStorage) -> None:
    class NoHint(LocalStorage):
        def write(self, key: str, *chunks: Chunk) -> None:
            raise StorageError("read-only")

    assert deploy(NoHint(root.root), DAY1, "d1", "first", clock=ManualClock()).number == 1
    assert newest_deployment(root) is not None


def test_a_torn_newest_deployment_is_an_error_not_an_older_one(root: LocalStorage) -> None:
    deploy(root, DAY1, "d1", "first")
    root.write("deployments/00000002.json", b"{")
    with pytest.raises(CorruptError):
        newest_deployment(root)


class TestServing:
    def status(self, server: str, lineage: str | None, heartbeat: int, *, ready: bool = True, watermark: float | None = 1.0):
        return ServingStatus(
            server=server,
            url="u",
            heartbeat=heartbeat,
            ready=ready,
            deployment=1,
            lineage=lineage,
            snapshot_digest=None,
            term=None,
            sequence=None,
            step=None,
            watermark=watermark,
            swapped_at=None,
            updated_at=0.0,
        )

    def watched(self, *servers: tuple[str, str | None], ready: bool = True) -> bool:
        tracker = LivenessTracker(30.0, ManualClock())
        for heartbeat in (1, 2):
            result = confirmed([self.status(s, lin, heartbeat, ready=ready) for s, lin in servers], DAY2, tracker)
            assert heartbeat == 2 or not result.confirmed, "one look can't tell who is alive"
        return result.confirmed

    @pytest.mark.parametrize(
        ("servers", "expected"),
        [
            ((), False),
            ((("a", DAY2),), True),
            ((("a", DAY3),), True),
            ((("a", DAY1),), False),
            ((("a", DAY2), ("b", DAY3)), True),
            ((("a", DAY2), ("b", DAY1)), False),
            ((("a", DAY2), ("b", None)), False),
            ((("a", "somewhere/else"),), False),
        ],
    )
    def test_confirmed_is_all_live_servers(self, servers: tuple[tuple[str, str | None], ...], expected: bool) -> None:
        assert self.watched(*servers) is expected

    def test_a_server_that_is_not_ready_does_not_serve(self) -> None:
        assert not self.watched(("a", DAY2), ready=False)

    def test_a_server_seen_once_holds_the_confirmation_up_until_it_counts_as_dead(self) -> None:
        clock = ManualClock()
        tracker = LivenessTracker(30.0, clock)
        results = []
        for heartbeat in range(6):
            statuses = [self.status("new", DAY2, heartbeat), self.status("silent", DAY1, 1)]
            results.append(confirmed(statuses, DAY2, tracker).confirmed)
            clock.advance(10.0)
        assert results == [False, False, False, False, True, True]

    def test_the_served_watermark_is_the_minimum_over_live_servers(self) -> None:
        clock = ManualClock()
        tracker = LivenessTracker(30.0, clock)
        for heartbeat in (1, 2):
            result = served_watermark(
                [
                    self.status("a", DAY2, heartbeat, watermark=5.0),
                    self.status("b", DAY2, heartbeat, watermark=3.0),
                    self.status("gone", DAY1, 1, watermark=1.0),
                ],
                tracker,
            )
        assert result == 3.0
        assert served_watermark([self.status("a", DAY2, 3, watermark=None)], tracker) is None
        assert served_watermark([], tracker) is None

    def test_torn_statuses_are_left_out(self, root: LocalStorage) -> None:
        root.write("serving/a.json", self.status("a", DAY1, 1).to_bytes())
        root.write("serving/b.json", b"{")
        assert [status.server for status in serving_statuses(root)] == ["a"]
