"""What every play needs: phases and notes for people, waiting with deadlines, and the cycle's children on the stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill.contracts import layout
from tidemill.contracts.release import ReleaseManifest
from tidemill.demo.folder import DemoFolder
from tidemill.demo.freshness import next_offsets
from tidemill.demo.plan import PARTITIONS, TOPIC
from tidemill.demo.playlog import IMPRESSIONS, ArrowTail
from tidemill.demo.state import DemoState
from tidemill.errors import DeadlineError, LineageError, RetiredError, TidemillError
from tidemill.lineage.cycle import StepName
from tidemill.lineage.deployments import serving_statuses
from tidemill.lineage.orchestrators.children import ChildState
from tidemill.lineage.orchestrators.local import CycleResult, LocalCycle, child_name

PLAYERS = "players"
POLL_S = 0.1
READY_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 60.0
# How children that are not awaited may end by themselves: a stream when it retires, also if it is started again after that.
_GOOD_ENDS = {PLAYERS: {0}, StepName.TRAIN_STREAM: {0, RetiredError.exit_code}}


class StopRequestedError(TidemillError):
    """The demo was asked to stop."""

    exit_code = 130


class Stage:
    """Where a play runs. Its methods belong to one thread, but `stop` and `kill_trainer`, which any may call."""

    def __init__(self, dates: tuple[str, ...], folder: DemoFolder, speed: float, say: Callable[[str], None]) -> None:
        self.dates = dates
        self.folder = folder
        self.state = DemoState(speed)
        self.phases: list[tuple[str, float, float]] = []
        """Name, begin and end in wall time."""
        self.kills: list[tuple[float, str]] = []
        """When which lineage's trainer was killed."""
        self._say = say
        # A plain flag: a signal handler sets it, and may have interrupted whoever holds an Event's lock.
        self._stopping = False
        self._cycle: LocalCycle | None = None

    def stop(self) -> None:
        """Make `run` raise StopRequestedError soon."""
        self._stopping = True
        if self._cycle is not None:
            self._cycle.request_stop()

    def kill_trainer(self) -> str | None:
        """SIGKILL to the newest stream trainer that runs, as a crash would end it; its lineage. Any thread."""
        if self._cycle is None:
            return None
        for date in reversed(self.dates):
            if self._cycle.children.kill(child_name(StepName.TRAIN_STREAM, date)):
                self.kills.append((time.time(), layout.lineage(date)))
                self.state.kills += 1
                self._note(f"SIGKILL to the stream trainer of {date}")
                return layout.lineage(date)
        return None

    def _run_date(self, cycle: LocalCycle, date: str) -> CycleResult:
        result = cycle.run_date(date)
        if result is None:
            raise StopRequestedError("stopped on request")
        self._note(f"deployment {result.deployment.number}: {result.deployment.lineage} ({result.deployment.reason})")
        return result

    def _is_served(self, cycle: LocalCycle, lineage: str) -> bool:
        return any(status.ready and status.lineage == lineage for status in serving_statuses(cycle.root))

    def _topic_ends(self, schema: pa.Schema) -> dict[int, int]:
        """By partition: behind the last offset that the players know of."""
        rows = ArrowTail(self.folder.players / IMPRESSIONS, schema).read()
        partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
        return {int(p): int(offsets[partitions == p].max()) + 1 for p in np.unique(partitions)}

    def _await(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll. Raises StopRequestedError, DeadlineError, and LineageError if the players or a stream have ended for good."""
        until = time.monotonic() + limit_s
        while not condition():
            time.sleep(POLL_S)
            if self._stopping:
                raise StopRequestedError("stopped on request")
            if time.monotonic() > until:
                raise DeadlineError(f"waited {limit_s:.0f} s in vain for {what}; see the logs in {self.folder.logs}")
            self._require_children()

    def _require_children(self) -> None:
        assert self._cycle is not None
        for name, state in self._cycle.children.states().items():
            failed = state.status == "exited" and state.exit_code not in _GOOD_ENDS.get(name.partition("-")[0], {state.exit_code})
            if failed or state.status == "given_up":
                raise LineageError(f"{name} has ended with {state.exit_code}; see {self._cycle.children.log_path(name)}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.state.phase = name
        self._note(name)
        began = time.time()
        try:
            yield
        finally:
            self.phases.append((name, began, time.time()))

    def _note(self, text: str) -> None:
        line = f"{self.state.elapsed_s:6.1f} s  {text}"
        self.state.notes.append(line)
        self._say(line)


def newest_release(cycle: LocalCycle, lineage: str) -> ReleaseManifest | None:
    """A lineage's newest committed release; None if it has none."""
    keys = [info.key for info in cycle.root.list(f"{lineage}/releases/")]
    found = [key for key in keys if layout.release_sequence(key.removeprefix(f"{lineage}/")) is not None]
    if not found:
        return None
    return ReleaseManifest.parse(cycle.root.read(max(found)), where=max(found))


def stop_child(cycle: LocalCycle, name: str) -> ChildState:
    state = cycle.children.stop(name, deadline_s=_STOP_TIMEOUT_S)
    assert state is not None
    return state


def covers(release: ReleaseManifest | None, ends: dict[int, int]) -> bool:
    if release is None:
        return False
    cut = next_offsets(release, TOPIC)
    return all(cut.get(partition, 0) >= end for partition, end in ends.items())


def create_topic(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(30.0)
