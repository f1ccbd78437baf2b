"""Plays two days in the life of a model: the daily cycle's own commands, a broker, a server and players, as child processes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill.contracts import layout
from tidemill.contracts.release import ReleaseManifest
from tidemill.data.click_world import write_day
from tidemill.demo.chaos import Chaos
from tidemill.demo.folder import DemoFolder
from tidemill.demo.freshness import next_offsets
from tidemill.demo.frozen import FrozenModel
from tidemill.demo.plan import FIRST_DAY, PARTITIONS, TOPIC, DemoPlan, demo_world
from tidemill.demo.players import PlayOptions
from tidemill.demo.playlog import IMPRESSION_SCHEMA, IMPRESSIONS, OPTIONS, ArrowTail, read_status
from tidemill.demo.presets import MODEL_NAME, write_configs
from tidemill.demo.state import DemoState, LineageState
from tidemill.demo.table import write_table
from tidemill.demo.watch import Watcher
from tidemill.errors import DeadlineError, LineageError, RetiredError, TidemillError
from tidemill.lineage.cycle import StepName, commands, load_cycle
from tidemill.lineage.deployments import serving_statuses
from tidemill.lineage.orchestrators.children import ChildSpec, ChildState
from tidemill.lineage.orchestrators.local import CycleResult, LocalCycle, child_name
from tidemill.testing.broker import DevelopmentBroker

PLAYERS = "players"
_POLL_S = 0.1
_READY_TIMEOUT_S = 120.0
_DRAIN_TIMEOUT_S = 90.0
_RESTART_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
# How children that are not awaited may end by themselves: a stream when it retires, also if it is started again after that.
_GOOD_ENDS = {PLAYERS: {0}, StepName.TRAIN_STREAM: {0, RetiredError.exit_code}}


class StopRequestedError(TidemillError):
    """The demo was asked to stop."""

    exit_code = 130


@dataclass(slots=True)
class Story:
    """What happened: the facts that a report starts from; what hasn't happened is None."""

    dates: tuple[str, str]
    """T-1 and T."""
    boundaries: tuple[float, float]
    """Where their tables end, in event time."""
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, begin and end in wall time."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    """When which lineage's trainer was killed."""
    play_started_at: float | None = None
    table_rows: int | None = None
    handover: CycleResult | None = None
    switched_at: float | None = None
    """When the successor was deployed."""
    first_progress_at: float | None = None
    """When the successor's first progress.json was seen."""
    restart_exit_code: int | None = None
    """Of the retired lineage's stream, started again."""
    stream_exit_code: int | None = None
    """Of the successor's stream, after SIGTERM."""


class Director:
    """Runs one demo. `run` belongs to one thread; `stop` may be called from any, also from a signal handler."""

    def __init__(self, plan: DemoPlan, seed: int, folder: DemoFolder, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.seed = seed
        self.folder = folder
        self.world = demo_world(seed)
        self.state = DemoState(plan.speed)
        dates = self.world.date(FIRST_DAY), self.world.date(FIRST_DAY + 1)
        self.story = Story(dates, (self.world.day_start(FIRST_DAY + 1), self.world.day_start(FIRST_DAY + 2)))
        self.state.boundary = self.story.boundaries[1]
        self.frozen = FrozenModel(folder.root / layout.lineage(dates[0]))
        self._say = say
        self._stopping = threading.Event()
        self._cycle: LocalCycle | None = None
        self._chaos: Chaos | None = None

    def stop(self) -> None:
        """Make `run` raise StopRequestedError soon."""
        self._stopping.set()
        if self._cycle is not None:
            self._cycle.request_stop()

    def kill_trainer(self) -> str | None:
        """SIGKILL to the newest stream trainer that runs, as a crash would end it; its lineage. Any thread."""
        if self._cycle is None:
            return None
        for date in reversed(self.story.dates):
            if self._cycle.children.kill(child_name(StepName.TRAIN_STREAM, date)):
                self.story.kills.append((time.time(), layout.lineage(date)))
                self.state.kills += 1
                self._note(f"SIGKILL to the stream trainer of {date}")
                return layout.lineage(date)
        return None

    def run(self) -> Story:
        """Play it all. Every process has ended on return, also if it raises.

        Raises StopRequestedError after `stop`, TidemillError for what goes wrong; `story` holds what has happened until then.
        """
        with ExitStack() as resources:
            with self._phase("the world, the broker and day T-1's table"):
                broker = resources.enter_context(DevelopmentBroker(self.folder.broker))
                _create_topic(broker.bootstrap)
                write_configs(self.folder, self.plan, broker.bootstrap)
                config = load_cycle(self.folder.cycle)
                self._cycle = cycle = resources.enter_context(LocalCycle(config, poll_s=_POLL_S))
                watcher = Watcher(self.state, cycle.root, cycle.children, self.folder.players)
                resources.callback(watcher.stop)
                watcher.start()
                write_day(self.world, FIRST_DAY, self.folder.table(self.story.dates[0]), self.plan.first_day_rows)
            self._first_day(cycle)
            self._begin_play(cycle, broker.bootstrap)
            self._day(cycle, resources, watcher)
            self._hand_over(cycle)
            self._after(cycle)
        return self.story

    def _first_day(self, cycle: LocalCycle) -> None:
        date = self.story.dates[0]
        lineage = layout.lineage(date)
        self.state.lineages[lineage] = LineageState(lineage)
        with self._phase(f"day T-1 ({date}): train, export, stream, deploy"):
            self._run_date(cycle, date)
            self._await(lambda: self._is_served(cycle, lineage), _READY_TIMEOUT_S, "the server to be ready")
            self._await(lambda: newest_release(cycle, lineage) is not None, _READY_TIMEOUT_S, f"the first release of {lineage}")

    def _begin_play(self, cycle: LocalCycle, bootstrap: str) -> None:
        plan = self.plan
        options = PlayOptions(
            url=serving_statuses(cycle.root)[0].url,
            model=MODEL_NAME,
            bootstrap=bootstrap,
            topic=TOPIC,
            seed=self.seed,
            day=FIRST_DAY + 1,
            speed=plan.speed,
            requests_per_s=plan.requests_per_s,
            candidates=plan.candidates,
            best_shown=plan.best_shown,
        )
        (self.folder.players / OPTIONS).write_text(json.dumps(asdict(options)), encoding="utf-8")
        cycle.children.start(ChildSpec(PLAYERS, [sys.executable, "-m", "tidemill.demo.players", str(self.folder.players)]))
        self._await(lambda: read_status(self.folder.players).started_at is not None, _READY_TIMEOUT_S, "the players to begin")
        self.story.play_started_at = read_status(self.folder.players).started_at

    def _day(self, cycle: LocalCycle, resources: ExitStack, watcher: Watcher) -> None:
        date, midnight = self.story.dates[1], self.story.boundaries[1]
        with self._phase(f"day T ({date}): the stream learns from what the server showed"):
            self.frozen.load()
            watcher.scorer = self.frozen.scores
            if self.plan.kills:
                self._chaos = Chaos(self.kill_trainer, self.seed, self.plan.day_s, self.plan.kills)
                resources.callback(self._chaos.stop)
                self._chaos.start()
            self._await(
                lambda: (read_status(self.folder.players).complete_until or 0.0) >= midnight, 3 * self.plan.day_s + 60.0, "midnight"
            )
        with self._phase("midnight: day T's table"):
            rows = ArrowTail(self.folder.players / IMPRESSIONS, IMPRESSION_SCHEMA).read()
            self.story.table_rows = write_table(rows, self.story.boundaries, self.folder.table(date))
            self._note(f"{self.story.table_rows} rows")

    def _hand_over(self, cycle: LocalCycle) -> None:
        date = self.story.dates[1]
        lineage = layout.lineage(date)
        self.state.lineages[lineage] = LineageState(lineage)
        with self._phase(f"day T ({date}): train, export, stream, catch up, switch, retire the predecessor"):
            self.story.handover = result = self._run_date(cycle, date)
            self.story.first_progress_at = self.state.lineages[lineage].first_progress_at
            if not result.retired:
                raise LineageError(f"{result.predecessor} has not retired; see {self.folder.logs}")
            self._note(f"{result.predecessor} has retired; {lineage} trailed it by {result.lag_s or 0.0:.0f} s of event time")

    def _after(self, cycle: LocalCycle) -> None:
        with self._phase("the retired lineage is started again; the successor runs on"):
            until = time.monotonic() + self.plan.after_switch_s
            if self._chaos is not None:
                self._chaos.kill_soon()
            self._start_retired(cycle)
            self._await(lambda: time.monotonic() >= until and self._chaos_is_done, _RESTART_TIMEOUT_S, "the last seconds")
        with self._phase("the players stop, the stream drains and ends"):
            if _stop(cycle, PLAYERS).exit_code != 0:
                raise LineageError(f"the players have failed; see {cycle.children.log_path(PLAYERS)}")
            lineage, ends = layout.lineage(self.story.dates[1]), self._topic_ends()
            self._await(lambda: _covers(newest_release(cycle, lineage), ends), _DRAIN_TIMEOUT_S, f"{lineage} to release everything")
            self.story.stream_exit_code = _stop(cycle, child_name(StepName.TRAIN_STREAM, self.story.dates[1])).exit_code

    def _start_retired(self, cycle: LocalCycle) -> None:
        """Start the retired lineage's stream again, by the very command that started it before."""
        date = self.story.dates[0]
        name = f"again-{date}"
        cycle.children.start(ChildSpec(name, commands(cycle.config, date, None)[StepName.TRAIN_STREAM]))

        def has_ended() -> bool:
            state = cycle.children.state(name)
            self.story.restart_exit_code = state.exit_code if state is not None and state.status == "exited" else None
            return self.story.restart_exit_code is not None

        self._await(has_ended, _RESTART_TIMEOUT_S, "the retired lineage to refuse")
        self._note(f"the retired lineage, started again, ends with exit code {self.story.restart_exit_code}")

    @property
    def _chaos_is_done(self) -> bool:
        return self._chaos is None or self._chaos.is_done

    def _run_date(self, cycle: LocalCycle, date: str) -> CycleResult:
        result = cycle.run_date(date)
        if result is None:
            raise StopRequestedError("stopped on request")
        self.story.switched_at = result.deployment.created_at
        self._note(f"deployment {result.deployment.number}: {result.deployment.lineage} ({result.deployment.reason})")
        return result

    def _is_served(self, cycle: LocalCycle, lineage: str) -> bool:
        return any(status.ready and status.lineage == lineage for status in serving_statuses(cycle.root))

    def _topic_ends(self) -> dict[int, int]:
        """By partition: behind the last offset that the players know of."""
        rows = ArrowTail(self.folder.players / IMPRESSIONS, IMPRESSION_SCHEMA).read()
        partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
        return {int(p): int(offsets[partitions == p].max()) + 1 for p in np.unique(partitions)}

    def _await(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll. Raises StopRequestedError, DeadlineError, and LineageError if the players or a stream have ended for good."""
        until = time.monotonic() + limit_s
        while not condition():
            if self._stopping.wait(_POLL_S):
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
            self.story.phases.append((name, began, time.time()))

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


def _stop(cycle: LocalCycle, name: str) -> ChildState:
    state = cycle.children.stop(name, deadline_s=_STOP_TIMEOUT_S)
    assert state is not None
    return state


def _covers(release: ReleaseManifest | None, ends: dict[int, int]) -> bool:
    if release is None:
        return False
    cut = next_offsets(release, TOPIC)
    return all(cut.get(partition, 0) >= end for partition, end in ends.items())


def _create_topic(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(30.0)
