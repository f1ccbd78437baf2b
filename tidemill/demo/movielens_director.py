"""Plays MovieLens-100k block by block through the same life: daily jobs, streams, hand-overs, a server and requests."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tidemill.contracts import layout
from tidemill.demo.chaos import Chaos
from tidemill.demo.folder import DemoFolder
from tidemill.demo.frozen import FrozenModel
from tidemill.demo.movielens import FEATURES, SCHEMA, Blocks
from tidemill.demo.movielens_players import ReplayOptions
from tidemill.demo.plan import TOPIC
from tidemill.demo.playlog import OPTIONS, impression_schema, read_status
from tidemill.demo.presets import MODEL_NAME, demo_cycle, write_cycle, write_pipeline
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
from tidemill.demo.watch import Watcher
from tidemill.errors import LineageError
from tidemill.lineage.cycle import StepName, load_cycle
from tidemill.lineage.deployments import serving_statuses
from tidemill.lineage.orchestrators.children import ChildSpec
from tidemill.lineage.orchestrators.local import CycleResult, LocalCycle, child_name
from tidemill.testing.broker import DevelopmentBroker

PIPELINE = "movielens.yaml"
_TOLERANCE_WALL_S = 4.0
_BATCH_SIZE = 64
# One user's ratings come one after another and go to one partition; the other one must not hold back the watermark for long.
_IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class MovieLensPlan:
    """How fast, and how often chaos kills the stream trainer."""

    requests_per_s: float = 25.0
    rows_per_request: int = 10
    kills: int = 0

    @property
    def rows_per_s(self) -> float:
        return self.requests_per_s * self.rows_per_request


@dataclass(frozen=True, slots=True)
class HandOver:
    """One hand-over: the cycle's result, when the successor was first heard of, and when it was deployed."""

    result: CycleResult
    first_progress_at: float | None
    switched_at: float


class MovieLensDirector(Stage):
    """Runs one replay. `run` belongs to one thread."""

    def __init__(
        self, plan: MovieLensPlan, seed: int, data: tuple[Path, Blocks], folder: DemoFolder, say: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.data, self.blocks = data
        times = self.blocks.rows["event_time"].to_numpy()[self.blocks.block_rows :]
        self.play_s = len(times) / plan.rows_per_s
        super().__init__(self.blocks.dates, folder, float(times[-1] - times[0]) / self.play_s, say)
        span = min(round(_TOLERANCE_WALL_S * plan.rows_per_s), len(times) // 2)
        self.tolerance_s = float(np.median(times[span:] - times[:-span]))
        """Event time that passes within 4 s of the play; the median, since the recorded days are not even."""
        self.hand_overs: list[HandOver] = []
        self.play_started_at: float | None = None
        self.stream_exit_code: int | None = None
        self._chaos: Chaos | None = None

    def frozen(self, number: int) -> FrozenModel:
        """The model as it was when a block ended."""
        return FrozenModel(self.folder.root / layout.lineage(self.dates[number - 1]), FEATURES)

    def run(self) -> None:
        """Play it all. Every process has ended on return, also if it raises: StopRequestedError after `stop`, or another
        TidemillError."""
        with ExitStack() as resources:
            with self._phase("the broker and the configs"):
                broker = resources.enter_context(DevelopmentBroker(self.folder.broker))
                create_topic(broker.bootstrap)
                self._write_configs(broker.bootstrap)
                self._cycle = cycle = resources.enter_context(LocalCycle(load_cycle(self.folder.cycle), poll_s=POLL_S))
                schema = impression_schema(SCHEMA)
                watcher = Watcher(self.state, cycle.root, cycle.children, self.folder.players, schema)
                resources.callback(watcher.stop)
                watcher.start()
            self._first_block(cycle, broker.bootstrap, watcher)
            if self.plan.kills:
                self._chaos = Chaos(self.kill_trainer, self.seed, self.play_s, self.plan.kills)
                resources.callback(self._chaos.stop)
                self._chaos.start()
            for number in range(2, self.blocks.count):
                self._next_block(cycle, number, watcher)
            self._end(cycle)

    def _write_configs(self, bootstrap: str) -> None:
        # Block k ends where block k+1 begins, whatever the calendar says.
        boundaries = {date: self.blocks.boundary(number) for number, date in enumerate(self.dates, start=1)}
        cycle = demo_cycle(self.folder, bootstrap, self.tolerance_s) | {"boundary": {"times": boundaries}}
        edits = cycle["stream"]["edits"]
        edits["data_config.batch_size"] = _BATCH_SIZE
        edits["data_config.kafka"]["idle_timeout_s"] = _IDLE_S
        write_pipeline(self.folder, PIPELINE)
        write_cycle(self.folder, cycle)

    def _first_block(self, cycle: LocalCycle, bootstrap: str, watcher: Watcher) -> None:
        date = self.dates[0]
        lineage = self._introduce(date)
        with self._phase(f"block 1 ({date}): train, export, stream, deploy"):
            self.blocks.write(1, self.folder.table(date))
            self._run_date(cycle, date)
            self._await(lambda: self._is_served(cycle, lineage), READY_TIMEOUT_S, "the server to be ready")
            self._await(lambda: newest_release(cycle, lineage) is not None, READY_TIMEOUT_S, f"the first release of {lineage}")
        self._follow(1, watcher)
        self._begin_play(cycle, bootstrap)

    def _begin_play(self, cycle: LocalCycle, bootstrap: str) -> None:
        options = ReplayOptions(
            url=serving_statuses(cycle.root)[0].url,
            model=MODEL_NAME,
            bootstrap=bootstrap,
            topic=TOPIC,
            requests_per_s=self.plan.requests_per_s,
            data=str(self.data),
            first_row=self.blocks.block_rows,
            end_row=self.blocks.count * self.blocks.block_rows,
            rows_per_request=self.plan.rows_per_request,
        )
        (self.folder.players / OPTIONS).write_text(json.dumps(asdict(options)), encoding="utf-8")
        argv = [sys.executable, "-m", "tidemill.demo.movielens_players", str(self.folder.players)]
        cycle.children.start(ChildSpec(PLAYERS, argv))
        self._await(lambda: read_status(self.folder.players).started_at is not None, READY_TIMEOUT_S, "the players to begin")
        self.play_started_at = read_status(self.folder.players).started_at

    def _next_block(self, cycle: LocalCycle, number: int, watcher: Watcher) -> None:
        """Let a block be played, then run its date: the hand-over from the stream that has learned from it."""
        date = self.dates[number - 1]
        with self._phase(f"block {number} of {self.blocks.count}: the stream of {self.dates[number - 2]} learns from it"):
            self._await(lambda: self._played_until() >= self.blocks.boundary(number), 3 * self.play_s + 60.0, f"block {number}")
        lineage = self._introduce(date)
        with self._phase(f"block {number} ({date}): train, export, stream, catch up, switch, retire the predecessor"):
            self.blocks.write(number, self.folder.table(date))
            result = self._run_date(cycle, date)
            first = self.state.lineages[lineage].first_progress_at
            self.hand_overs.append(HandOver(result, first, result.deployment.created_at))
            if not result.retired:
                raise LineageError(f"{result.predecessor} has not retired; see {self.folder.logs}")
        self._follow(number, watcher)

    def _end(self, cycle: LocalCycle) -> None:
        last = self.dates[-2]
        with self._phase(f"block {self.blocks.count}: the stream of {last} learns from it, and ends"):
            self._await(lambda: self._played_until() == math.inf, 3 * self.play_s + 60.0, "the last block")
            if self._chaos is not None:
                self._chaos.kill_soon()
                self._await(lambda: self._chaos is None or self._chaos.is_done, READY_TIMEOUT_S, "the last kill")
            lineage, ends = layout.lineage(last), self._topic_ends(impression_schema(SCHEMA))
            self._await(lambda: covers(newest_release(cycle, lineage), ends), DRAIN_TIMEOUT_S, f"{lineage} to release everything")
            self.stream_exit_code = stop_child(cycle, child_name(StepName.TRAIN_STREAM, last)).exit_code

    def _played_until(self) -> float:
        return read_status(self.folder.players).complete_until or 0.0

    def _introduce(self, date: str) -> str:
        """Let the watcher look at a new lineage, and no longer at those that have retired."""
        for name in [name for name, lineage in self.state.lineages.items() if lineage.status == "retired"]:
            del self.state.lineages[name]
        lineage = layout.lineage(date)
        self.state.lineages[lineage] = LineageState(lineage)
        return lineage

    def _follow(self, number: int, watcher: Watcher) -> None:
        """Hold the served model against the newest frozen one, until the next block ends."""
        frozen = self.frozen(number)
        frozen.load()
        watcher.scorer = frozen.scores
        self.state.boundary = self.blocks.boundary(number + 1)
