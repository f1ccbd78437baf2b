"""Looks at lineages while they are served, take over or are left: what the deployer's pure decisions are made of."""

from __future__ import annotations

from typing import Literal

from tidemill.clock import Clock, SystemClock
from tidemill.contracts.lineage import RunRecord
from tidemill.lineage.fallback import Condition
from tidemill.lineage.handover import PredecessorView, SuccessorView
from tidemill.lineage.liveness import Liveness, LivenessTracker
from tidemill.lineage.progress import ProgressReader
from tidemill.lineage.records import read_lineage, run_records
from tidemill.storage.base import Storage

PAUSED = "publication_paused"
"""What a stream's record says, among its details, while its quality gate has paused publication."""


class SwitchWatch:
    """Looks at the two lineages of a switch. Not thread-safe."""

    def __init__(self, root: Storage, lineage: str, predecessor: str, liveness_s: float, *, clock: Clock | None = None) -> None:
        self._root = root
        self._lineage = lineage
        self._predecessor = predecessor
        self._successor_reader = ProgressReader(root, liveness_s, prefix=lineage, clock=clock)
        self._predecessor_reader = ProgressReader(root, liveness_s, prefix=predecessor, clock=clock)
        self._runs = LivenessTracker(liveness_s, clock)

    def successor(self) -> SuccessorView:
        return self._successor_reader.look()

    def predecessor(self) -> PredecessorView:
        """Alive by its newest run's record, which has a heartbeat before there is any progress.

        One that has retired in favour of another lineage counts as dead: that it is gone says nothing of this successor.
        """
        record = read_lineage(self._root, prefix=self._predecessor)
        retired = record is not None and record.status == "retired" and _is_same(record.successor, self._lineage)
        return PredecessorView(retired, self.liveness(), self._predecessor_reader.look().progress)

    def is_retired(self) -> bool:
        """Whether the predecessor has retired, in favour of whichever lineage."""
        record = read_lineage(self._root, prefix=self._predecessor)
        return record is not None and record.status == "retired"

    def liveness(self) -> Liveness:
        """The predecessor's."""
        runs = run_records(self._root, prefix=self._predecessor)
        if not runs or runs[-1].ended_at is not None:
            return Liveness.DEAD
        return self._runs.observe(self._predecessor, runs[-1].heartbeat, writer=runs[-1].run_id)


def _is_same(successor: str | None, lineage: str) -> bool:
    """A record names its successor by its key in the root, or by its folder."""
    return successor is not None and (successor == lineage or successor.rstrip("/").endswith(f"/{lineage}"))


_State = Literal["dead", "bad", "well"]


class ConditionWatch:
    """How long one lineage's stream has been dead, bad or well, by its records alone. Not thread-safe.

    A stream that is over (completed, retired) is none of these; nor is one whose heartbeat hasn't been watched for long enough.
    """

    def __init__(self, root: Storage, lineage: str, liveness_s: float, *, clock: Clock | None = None) -> None:
        self._root = root
        self._lineage = lineage
        self._clock = clock or SystemClock()
        self._tracker = LivenessTracker(liveness_s, clock)
        self._state: _State | None = None
        self._since = 0.0

    def look(self, *, ended: bool = False) -> Condition:
        """`ended`: whoever restarts the stream has given it up."""
        runs = run_records(self._root, prefix=self._lineage)
        state = self._judge(runs)
        now = self._clock.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        held_s = now - self._since
        return Condition(
            dead_s=held_s if state == "dead" else None,
            bad_s=held_s if state == "bad" else None,
            well_s=held_s if state == "well" else None,
            gone=ended and not self._is_over(runs),
        )

    def _is_over(self, runs: list[RunRecord]) -> bool:
        record = read_lineage(self._root, prefix=self._lineage)
        if record is not None and record.status == "retired":
            return True
        return bool(runs) and runs[-1].status in ("completed", "retired")

    def _judge(self, runs: list[RunRecord]) -> _State | None:
        if not runs or self._is_over(runs):
            return None
        newest = runs[-1]
        if newest.ended_at is not None:
            return "dead"
        alive = self._tracker.observe(self._lineage, newest.heartbeat, writer=newest.run_id)
        if alive is Liveness.UNKNOWN:
            return None
        if alive is Liveness.DEAD:
            return "dead"
        return "bad" if newest.details.get(PAUSED) is True else "well"
