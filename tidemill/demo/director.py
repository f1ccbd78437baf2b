"""Plays two days in the life of a model: the daily cycle's own commands, a broker, a server and players, as child processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from tidemill.contracts import layout
from tidemill.data.click_world import write_day
from tidemill.demo.chaos import Chaos
from tidemill.demo.folder import DemoFolder
from tidemill.demo.frozen import FrozenModel
from tidemill.demo.plan import FIRST_DAY, TOPIC, DemoPlan, demo_world
from tidemill.demo.players import PlayOptions
from tidemill.demo.playlog import IMPRESSION_SCHEMA, IMPRESSIONS, OPTIONS, ArrowTail, read_status
from tidemill.demo.presets import MODEL_NAME, write_configs
from tidemill.demo.stage import (
    DRAIN_TIMEOUT_S,
    PLAYERS,
    POLL_S,
    READY_TIMEOUT_S,
    Stage,
    covers,
    create_topic,
    newest_release,
    stop_child,
)
from tidemill.demo.state import LineageState
from tidemill.demo.table import write_table
from tidemill.demo.watch import Watcher
from tidemill.errors import LineageError
from tidemill.lineage.cycle import StepName, commands, load_cycle
from tidemill.lineage.deployments import serving_statuses
from tidemill.lineage.orchestrators.children import ChildSpec
from tidemill.lineage.orchestrators.local import CycleResult, LocalCycle, child_name
from tidemill.testing.broker import DevelopmentBroker

_RESTART_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Story:
    """What happened: the facts that a report starts from; what hasn't happened is None."""

    dates: tuple[str, str]
    """T-1 and T."""
    boundaries: tuple[float, float]
    """Where their tables end, in event time."""
    phases: list[tuple[str, float, float]]
    """Name, begin and end in wall time."""
    kills: list[tuple[float, str]]
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


class Director(Stage):
    """Runs one demo. `run` belongs to one thread; `stop` may be called from any, also from a signal handler."""

    def __init__(self, plan: DemoPlan, seed: int, folder: DemoFolder, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.seed = seed
        self.world = demo_world(seed)
        dates = self.world.date(FIRST_DAY), self.world.date(FIRST_DAY + 1)
        super().__init__(dates, folder, plan.speed, say)
        boundaries = self.world.day_start(FIRST_DAY + 1), self.world.day_start(FIRST_DAY + 2)
        self.story = Story(dates, boundaries, self.phases, self.kills)
        self.state.boundary = self.story.boundaries[1]
        self.frozen = FrozenModel(folder.root / layout.lineage(dates[0]))
        self._chaos: Chaos | None = None

    def run(self) -> Story:
        """Play it all. Every process has ended on return, also if it raises.

        Raises StopRequestedError after `stop`, TidemillError for what goes wrong; `story` holds what has happened until then.
        """
        with ExitStack() as resources:
            with self._phase("the world, the broker and day T-1's table"):
                broker = resources.enter_context(DevelopmentBroker(self.folder.broker))
                create_topic(broker.bootstrap)
                write_configs(self.folder, self.plan, broker.bootstrap)
                config = load_cycle(self.folder.cycle)
                self._cycle = cycle = resources.enter_context(LocalCycle(config, poll_s=POLL_S))
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
            self.story.switched_at = self._run_date(cycle, date).deployment.created_at
            self._await(lambda: self._is_served(cycle, lineage), READY_TIMEOUT_S, "the server to be ready")
            self._await(lambda: newest_release(cycle, lineage) is not None, READY_TIMEOUT_S, f"the first release of {lineage}")

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
        self._await(lambda: read_status(self.folder.players).started_at is not None, READY_TIMEOUT_S, "the players to begin")
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
            self.story.switched_at = result.deployment.created_at
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
            if stop_child(cycle, PLAYERS).exit_code != 0:
                raise LineageError(f"the players have failed; see {cycle.children.log_path(PLAYERS)}")
            lineage, ends = layout.lineage(self.story.dates[1]), self._topic_ends(IMPRESSION_SCHEMA)
            self._await(lambda: covers(newest_release(cycle, lineage), ends), DRAIN_TIMEOUT_S, f"{lineage} to release everything")
            self.story.stream_exit_code = stop_child(cycle, child_name(StepName.TRAIN_STREAM, self.story.dates[1])).exit_code

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
