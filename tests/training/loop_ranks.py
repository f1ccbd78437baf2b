"""Ranks for tests of the loop: a scripted feed, a step that checks lockstep, and duties that settle when told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tidemill.cadence import Action, RankReport, SyncPoint, Trigger
from tidemill.clock import ManualClock
from tidemill.data.split import Delivery, Provenance, Run, SplitId
from tidemill.data.watermark import Watermark
from tidemill.features.batch import Batch, IdColumns
from tidemill.testing.rank_threads import Result, ThreadAgreement, ThreadGroup, ThreadPending, run_threads
from tidemill.training.loop import Duties, Duty, LoopSettings, LoopState, Outcome, TrainingLoop

T0 = 1_700_000_000.0


@dataclass(frozen=True)
class Rows:
    """A batch: the sum of its weights, and its event time after T0 (None: it has none)."""

    weight: float = 1.0
    at: float | None = None


@dataclass(frozen=True)
class Idle:
    """Nothing comes in time."""


@dataclass(frozen=True)
class EndOfPass:
    """A bounded pass ends; another one follows if the script goes on."""


@dataclass(frozen=True)
class Do:
    """Something happens on this rank's loop, then the next event follows."""

    action: Callable[[TrainingLoop], None]


PREEMPT = Do(lambda loop: loop.preempt())
HAND_OVER = Do(lambda loop: loop.hand_over())

Event = Rows | Idle | EndOfPass | Do | Exception


class ScriptedFeed:
    """Plays a script (`training.loop.Feed`); after its end it is silent, or at the end of its pass if that was its last event."""

    def __init__(self, rank: int, script: Sequence[Event], clock: ManualClock) -> None:
        self._split = SplitId("scripted", str(rank))
        self._script = list(script)
        self._clock = clock
        self._position = 0
        self._idle = False
        self._watermark = Watermark([self._split])
        self.loop: TrainingLoop
        self.at_report: dict[int, Callable[[TrainingLoop], None]] = {}
        self.taken: list[int] = []
        self.done: list[int] = []
        self.trained_until = -math.inf
        self.claims: list[float | None] = []
        """What was reported for each round."""
        self.passes = 0
        self.counted: list[int] = []
        """How many rows were done at the end of each pass that the loop counted before anything followed."""

    def take(self, timeout_s: float) -> Delivery[Batch] | None:
        while self._script and isinstance(self._script[0], Do):
            self._script.pop(0).action(self.loop)
        event = self._script[0] if self._script else Idle()
        if isinstance(event, EndOfPass):
            raise EOFError
        self._script = self._script[1:]
        if isinstance(event, Exception):
            raise event
        self._idle = isinstance(event, Idle)
        if isinstance(event, Idle):
            self._clock.advance(timeout_s)
            return None
        start, self._position = self._position, self._position + 1
        self.taken.append(start)
        at = math.nan if event.at is None else T0 + event.at
        is_last = bool(self._script) and isinstance(self._script[0], EndOfPass)
        return Delivery(Provenance((Run(self._split, start, start + 1, 1, event_time=at),), 1), batch(event.weight), is_last)

    def trained(self, provenance: Provenance) -> None:
        self._watermark.advance(provenance)
        for run in provenance.runs:
            self.done.append(run.start)
            if not math.isnan(run.event_time):
                self.trained_until = max(self.trained_until, run.event_time)

    def event_time(self, pending: Sequence[Provenance]) -> tuple[float | None, bool]:
        self.at_report.get(len(self.claims), lambda loop: None)(self.loop)
        value, abstains = self._watermark.report(pending, lambda split: self._idle)
        self.claims.append(value)
        return value, abstains

    def end_pass(self) -> None:
        self.counted.append(len(self.done))

    def end_passes(self) -> None:
        self.counted.append(len(self.done))

    def next_pass(self) -> bool:
        self.passes += 1
        self._script = self._script[1:]
        return bool(self._script)


class LockstepStep:
    """A collective: every rank's weights must sum to what was agreed (`training.loop.Step`)."""

    def __init__(self, group: ThreadGroup, rank: int, clock: ManualClock) -> None:
        self._group = group
        self._rank = rank
        self._clock = clock
        self.global_weights: list[float] = []
        self.padded: list[int] = []

    def __call__(self, batch: Batch, global_weight: float) -> dict[str, np.ndarray]:
        assert global_weight > 0
        weights = self._group.gather("step", self._rank, float(batch.weights.sum()))
        assert sum(weights) == global_weight, f"step {len(self.global_weights)}: {weights} sum to other than {global_weight}"
        if batch.num_rows == 0:
            self.padded.append(len(self.global_weights))
        self.global_weights.append(global_weight)
        self._clock.advance(0.01)
        return {"probs": np.zeros(batch.num_rows, np.float32)}

    def padding(self) -> Batch:
        return batch(None)


class Writer:
    """Work in the background: number n settles after `delays[n]` reports, committed or not as `outcomes[n]` says; the last of each
    goes on for ever."""

    def __init__(self, delays: Sequence[int] = (1,), outcomes: Sequence[bool] = (True,)) -> None:
        self._delays = delays
        self._outcomes = outcomes
        self._left = 0
        self.number = 0
        self.settled_number = (0, False)

    def begin(self) -> int:
        self._left = self._delays[min(self.number, len(self._delays) - 1)]
        self.number += 1
        return self.number

    def ready(self) -> bool:
        return self.settled_number[0] == self.number

    def settled(self) -> tuple[int, bool]:
        """Asked once a report; every rank's counts its own."""
        if self.settled_number[0] < self.number:
            if self._left <= 0:
                self.settled_number = (self.number, self._outcomes[min(self.number, len(self._outcomes)) - 1])
            self._left -= 1
        return self.settled_number


@dataclass
class Rank:
    """What happened on one rank."""

    feed: ScriptedFeed
    step: LockstepStep
    clock: ManualClock
    entered: list[tuple[int, int]] = field(default_factory=list)
    """(step, row)"""
    actions: list[tuple[str, int]] = field(default_factory=list)
    """(action, step)"""
    settled: list[tuple[str, int, bool, int]] = field(default_factory=list)
    """(action, number, committed, round)"""
    points: list[SyncPoint] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """"report n", "step n", as they began"""
    outcome: Outcome | None = None
    error: BaseException | None = None
    examples: float = 0.0

    def of(self, *names: str) -> list[tuple[str, int]]:
        return [action for action in self.actions if action[0] in names]

    def entering(self, step: int, provenance: Provenance) -> None:
        self.order.append(f"step {step}")
        self.entered.append((step, provenance.runs[0].start))

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        assert len(outputs["probs"]) == delivery.payload.num_rows
        assert self.entered[-1] == (step, delivery.provenance.runs[0].start)


class EveryRound:
    """Due after each round, ticks included."""

    def due(self, point: SyncPoint) -> bool:
        return True

    def fired(self, point: SyncPoint) -> None:
        return

    def steps_to_next(self, step: int) -> int | None:
        return None


@dataclass
class Plan:
    """One rank's loop but for its feed. `checks`, `observers`, `evaluate_s` apply to this rank."""

    settings: LoopSettings = field(default_factory=LoopSettings)
    checkpoint: Callable[[], list[Trigger]] | None = None
    cut: Callable[[], list[Trigger]] | None = None
    evaluate: Callable[[], list[Trigger]] | None = None
    checkpoint_writer: Callable[[], Writer] = Writer
    cut_writer: Callable[[], Writer] = Writer
    max_cut_tries: int = 3
    state: LoopState = field(default_factory=LoopState)
    checks: Sequence[Callable[[], None]] = ()
    at_report: dict[int, Callable[[TrainingLoop], None]] = field(default_factory=dict)
    """What happens on this rank while it makes its n-th report."""
    observers: Sequence[Any] = ()
    evaluate_s: float = 0.0
    committed_step: int = -1
    position: Callable[[TrainingLoop | None], object] | None = None
    """Where a checkpoint stands besides its step; of None: where the one that was restored did."""
    round_s: float = 0.0
    """Seconds that each report takes, by this rank's clock."""


def all_duties(**fields: Any) -> Plan:
    """A plan in which every action may follow, but none before the end."""
    return Plan(**{"checkpoint": list, "cut": list, "evaluate": list, **fields})


def run_loops(scripts: Sequence[Sequence[Event]], plan: Plan | Sequence[Plan]) -> list[Rank]:
    """Run one loop a script to its end, each rank on its own thread with its own ManualClock."""
    plans = [plan] * len(scripts) if isinstance(plan, Plan) else list(plan)
    ranks: list[Rank | None] = [None] * len(scripts)

    def run(group: ThreadGroup, number: int) -> Outcome:
        clock = ManualClock(T0)
        rank = Rank(ScriptedFeed(number, scripts[number], clock), LockstepStep(group, number, clock), clock)
        ranks[number] = rank
        loop = _loop(rank, plans[number], _Agreement(group, number, rank, plans[number].round_s))
        rank.feed.loop = loop
        rank.feed.at_report = plans[number].at_report
        try:
            return loop.run()
        finally:
            rank.examples = loop.examples

    results: list[Result[Outcome]] = run_threads(len(scripts), run)
    done = [rank for rank in ranks if rank is not None]
    for rank, result in zip(done, results, strict=True):
        rank.outcome, rank.error = result.value, result.error
    return done


def run_well(scripts: Sequence[Sequence[Event]], plan: Plan | Sequence[Plan]) -> list[Rank]:
    """`run_loops`, where no rank may fail."""
    ranks = run_loops(scripts, plan)
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
    return ranks


class _Agreement:
    """Notes when a report is issued."""

    def __init__(self, group: ThreadGroup, number: int, rank: Rank, round_s: float) -> None:
        self._inner = ThreadAgreement(group, number)
        self._rank = rank
        self._round_s = round_s
        self._count = 0

    def issue(self, report: RankReport) -> ThreadPending:
        self._rank.order.append(f"report {self._count}")
        self._count += 1
        self._rank.clock.advance(self._round_s)
        return self._inner.issue(report)


def _loop(rank: Rank, plan: Plan, agreement: _Agreement) -> TrainingLoop:
    def background(action: Action, writer: Writer, triggers: list[Trigger], max_tries: int) -> Duty:
        name = action.name.lower()

        def act(point: SyncPoint) -> int:
            rank.actions.append((name, point.last_step))
            return writer.begin()

        def on_settled(number: int, committed: bool) -> None:
            # The report, due after every round, has seen all rounds before this one.
            rank.settled.append((name, number, committed, len(rank.points)))

        return Duty(act, triggers, writer.ready, writer.settled, on_settled, max_tries)

    def report(point: SyncPoint) -> int:
        claim = rank.feed.claims[point.number]
        assert claim is None or claim <= rank.feed.trained_until, f"round {point.number} claims {claim}"
        rank.points.append(point)
        return 0

    def evaluate(point: SyncPoint) -> int:
        rank.actions.append(("evaluate", point.last_step))
        rank.clock.advance(plan.evaluate_s)
        return 0

    duties = Duties(report=Duty(report, [EveryRound()]))
    if plan.checkpoint:
        position = plan.position
        duties.checkpoint = background(Action.CHECKPOINT, plan.checkpoint_writer(), plan.checkpoint(), 0)
        duties.checkpoint.committed_step = plan.committed_step
        if position is not None:
            duties.checkpoint.position = lambda: position(loop)
            duties.checkpoint.committed_position = position(None)
    if plan.cut:
        duties.cut = background(Action.CUT, plan.cut_writer(), plan.cut(), plan.max_cut_tries)
    if plan.evaluate:
        duties.evaluate = Duty(evaluate, plan.evaluate())
    loop = TrainingLoop(
        agreement=agreement,
        feed=rank.feed,
        step=rank.step,
        duties=duties,
        settings=plan.settings,
        observers=[rank, *plan.observers],
        state=plan.state,
        checks=plan.checks,
        clock=rank.clock,
    )
    return loop


def batch(weight: float | None) -> Batch:
    """One row of that weight; None: padding."""
    none = IdColumns((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    return Batch(
        num_rows=0 if weight is None else 1,
        size=1,
        dense=torch.zeros(1, 0),
        ids=none,
        sequences=none,
        labels={"click": torch.zeros(1)},
        weights=torch.tensor([weight or 0.0]),
        extras={},
    )
