"""The training loop: rounds of steps that all ranks agree on, and what follows each round (D1, D2, D7).

One round, on every rank:

    take batches -> report -> train this round's steps, while the next gather travels -> checkpoint, cut, report, evaluate

The loop knows no source, no model and no store: it is given a feed, a step and duties. It decides from `SyncPoint`s alone, so all
ranks do the same things at the same steps; they go on agreeing (ticks) while a final save or a slow store keeps them waiting.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tidemill import logs
from tidemill.cadence import ENDINGS, NO_BATCH, RankReport, StopReason, SyncPoint, Trigger, agree
from tidemill.clock import Clock, EventTime, SystemClock
from tidemill.data.split import Delivery, Provenance
from tidemill.errors import DeadlineError, PeerLostError
from tidemill.features.batch import Batch

log = logging.getLogger(__name__)

DATA_WAIT_S = 0.05
"""How long a rank without a batch waits for one before it reports (D1)."""


class Pending(Protocol):
    """A gather under way."""

    def wait(self) -> list[RankReport]: ...


class Agreement(Protocol):
    """The gather on the side group."""

    def issue(self, report: RankReport) -> Pending: ...


class Feed(Protocol):
    """Batches with their provenance, pass by pass, and what has been trained of them."""

    def take(self, timeout_s: float) -> Delivery[Batch] | None:
        """The next batch; None if none came in time. Raises EOFError at the end of a pass."""
        ...

    def trained(self, provenance: Provenance) -> None:
        """A batch is done with: its rows count as trained."""
        ...

    def event_time(self, pending: Sequence[Provenance]) -> tuple[float | None, bool]:
        """This rank's event time as it will be once `pending` is trained, and whether the rank abstains."""
        ...

    def next_pass(self) -> bool:
        """Start the next pass; False if that was the last."""
        ...


class Step(Protocol):
    """One training step on every rank."""

    def __call__(self, batch: Batch, global_weight: float) -> dict[str, np.ndarray]:
        """Train on a batch; its outputs as they were before the update. Collective."""
        ...

    def padding(self) -> Batch:
        """A batch of the right size without a real row."""
        ...


class Observer(Protocol):
    """Sees every batch that enters a step, and what the model thought of it before the update."""

    def entering(self, step: int, provenance: Provenance) -> None: ...

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None: ...


@dataclass(slots=True)
class Duty:
    """An action that follows a round: its triggers, and, if it is finished in the background, what is outstanding.

    `act` runs on every rank at the same SyncPoint and returns the number of what it began (0: nothing to wait for). `settled`
    tells rank 0's newest settled number and whether it was committed. `on_settled` runs on every rank at the same SyncPoint.
    `ready`: whether this rank could begin now without waiting. `max_tries`: how often an ending tries to get it committed;
    0: until its deadline.
    """

    act: Callable[[SyncPoint], int]
    triggers: Sequence[Trigger] = ()
    ready: Callable[[], bool] = lambda: True
    settled: Callable[[], tuple[int, bool]] = lambda: (0, False)
    on_settled: Callable[[int, bool], None] = lambda number, committed: None
    max_tries: int = 0
    outstanding: int = 0
    last_step: int = -1
    committed_step: int = -1

    def is_due(self, point: SyncPoint) -> bool:
        # Every trigger is asked, so that each takes its reference.
        return True in [trigger.due(point) for trigger in self.triggers]

    def run(self, point: SyncPoint) -> None:
        self.last_step = point.last_step
        self.outstanding = self.act(point)
        for trigger in self.triggers:
            trigger.fired(point)

    def settle(self, number: int, committed: bool) -> None:
        """Take rank 0's word for what is outstanding."""
        if self.outstanding and number >= self.outstanding:
            self.on_settled(self.outstanding, committed)
            if committed:
                self.committed_step = self.last_step
            self.outstanding = 0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What bounds the loop. `num_steps` counts from the lineage's first step."""

    steps_per_round: int = 1
    num_steps: int | None = None
    quorum: float = 1.0
    finish_timeout_s: float = 600.0


@dataclass(slots=True)
class Duties:
    """What may follow a round, in the order of `cadence.Action`."""

    checkpoint: Duty | None = None
    cut: Duty | None = None
    report: Duty | None = None
    evaluate: Duty | None = None

    def all(self) -> list[Duty]:
        return [duty for duty in (self.checkpoint, self.cut, self.report, self.evaluate) if duty is not None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    reason: StopReason
    step: int
    watermark: EventTime | None


@dataclass(slots=True)
class LoopState:
    """Where a run starts: zero, or what a checkpoint held. `examples`: the sum of the weights of all rows trained so far."""

    step: int = 0
    examples: float = 0.0
    watermark: EventTime | None = None


@dataclass(slots=True)
class _Finish:
    """The ending under way: what of D7's row is still to do, and until when."""

    reason: StopReason
    until: float
    tries: int = 0
    todo: list[Duty] = field(default_factory=list)


class TrainingLoop:
    """Trains until a reason to stop is agreed on, then finishes as that reason's row of D7 says.

    `run` belongs to the training thread; `preempt` and `hand_over` may be called from any thread or signal handler.
    """

    def __init__(
        self,
        *,
        agreement: Agreement,
        feed: Feed,
        step: Step,
        duties: Duties,
        settings: LoopSettings,
        observers: Sequence[Observer] = (),
        state: LoopState | None = None,
        checks: Sequence[Callable[[], None]] = (),
        clock: Clock | None = None,
    ) -> None:
        self._agreement = agreement
        self._feed = feed
        self._step = step
        self._duties = duties
        self._settings = settings
        self._observers = observers
        self._checks = checks
        self._clock = clock or SystemClock()
        self._hand: deque[Delivery[Batch]] = deque()
        start = state or LoopState()
        self._trained_steps = start.step
        self.examples = start.examples
        """The sum of the weights of all rows trained so far, on all ranks; the number of rows if none has another weight than 1."""
        self._watermark = start.watermark
        self._number = 0
        self._exhausted = False
        self._finish: _Finish | None = None
        self._preempted = threading.Event()
        self._handed_over = threading.Event()
        self._error: Exception | None = None

    def preempt(self) -> None:
        """Ask all ranks to stop after the coming round (SIGTERM, SIGINT)."""
        self._preempted.set()

    def hand_over(self) -> None:
        """Rank 0's verdict that the successor has caught up; it travels in the next report."""
        self._handed_over.set()

    def run(self) -> Outcome:
        """Train to the end. Collective. Raises this rank's own error, or PeerLostError if another rank failed."""
        self._fill(DATA_WAIT_S)
        pending = self._issue()
        while True:
            point = self._decide(pending.wait())
            if self._is_over(point):
                return Outcome(self._reason(point), point.last_step, point.watermark)
            self._begin_finish(point)
            self._fill_next(point)
            # The next gather travels while this round trains.
            pending = self._issue(after=point)
            self._train(point)
            self._follow(point)

    def _limit(self, step: int) -> int:
        """How many steps the round that begins at `step` may have: rounds end where something is due."""
        limits = [self._settings.steps_per_round]
        if self._settings.num_steps is not None:
            limits.append(max(self._settings.num_steps - step, 0))
        for duty in self._duties.all():
            ahead = (trigger.steps_to_next(step) for trigger in duty.triggers)
            limits += [steps for steps in ahead if steps is not None]
        return 0 if self._finish else min(limits)

    def _decide(self, reports: list[RankReport]) -> SyncPoint:
        point = agree(
            reports,
            number=self._number,
            first_step=self._trained_steps,
            share=self._settings.quorum,
            watermark=self._watermark,
            max_steps=self._limit(self._trained_steps),
        )
        self._number += 1
        self._watermark = point.watermark
        return point

    def _fill_next(self, point: SyncPoint) -> None:
        """Take batches for the round after `point`; wait for data only if this round has nothing to do."""
        self._fill(0.0 if point.weights else DATA_WAIT_S, keep=len(point.weights))

    def _fill(self, timeout_s: float, *, keep: int = 0) -> None:
        if self._finish or self._error:
            if timeout_s:
                self._clock.sleep(timeout_s)
            return
        try:
            while not self._exhausted and len(self._hand) < keep + self._settings.steps_per_round:
                delivery = self._feed.take(timeout_s if len(self._hand) <= keep else 0.0)
                if delivery is None:
                    return
                self._hand.append(delivery)
        except EOFError:
            self._exhausted = True
        except Exception as error:  # noqa: BLE001 - plug-in call: reported to all ranks in the next gather, then raised
            self._error = error

    def _issue(self, after: SyncPoint | None = None) -> Pending:
        first = 0 if after is None else min(len(after.weights), len(self._hand))
        step = self._trained_steps if after is None else after.last_step
        coming = [] if self._finish else list(self._hand)[first : first + self._limit(step)]
        return self._agreement.issue(self._report(list(self._hand)[:first], coming))

    def _report(self, current: list[Delivery[Batch]], coming: list[Delivery[Batch]]) -> RankReport:
        weights = [float(delivery.payload.weights.sum()) for delivery in coming]
        weights += [NO_BATCH] * (self._settings.steps_per_round - len(weights))
        event_time, abstains = self._feed.event_time([delivery.provenance for delivery in (*current, *coming)])
        cut, checkpoint = self._duties.cut, self._duties.checkpoint
        settled_cut, cut_ok = cut.settled() if cut else (0, False)
        settled_checkpoint, checkpoint_ok = checkpoint.settled() if checkpoint else (0, False)
        return RankReport(
            event_time=event_time,
            abstains=abstains,
            stop=self._own_reason(),
            writer_ready=all(duty.ready() for duty in self._duties.all()),
            weights=tuple(weights),
            clock=self._clock.time(),
            handover=self._handed_over.is_set(),
            settled_cut=settled_cut,
            settled_cut_ok=cut_ok,
            settled_checkpoint=settled_checkpoint,
            settled_checkpoint_ok=checkpoint_ok,
        )

    def _own_reason(self) -> StopReason:
        if not self._error:
            try:
                for check in self._checks:
                    check()
            except Exception as error:  # noqa: BLE001 - plug-in call: reported to all ranks, then raised
                self._error = error
        if self._error:
            return StopReason.FAILED
        if self._preempted.is_set():
            return StopReason.PREEMPTED
        if self._exhausted and not self._hand:
            return StopReason.EXHAUSTED
        return StopReason.NONE

    def _train(self, point: SyncPoint) -> None:
        step = point.first_step
        for weight in point.weights:
            delivery = self._hand.popleft() if self._hand else None
            if weight > 0:
                if delivery is not None:
                    for observer in self._observers:
                        observer.entering(step, delivery.provenance)
                outputs = self._step(delivery.payload if delivery is not None else self._step.padding(), weight)
                if delivery is not None:
                    for observer in self._observers:
                        observer.trained(step, delivery, outputs)
                step += 1
                self.examples += weight
            if delivery is not None:
                self._feed.trained(delivery.provenance)
        self._trained_steps = step

    def _follow(self, point: SyncPoint) -> None:
        """Checkpoint, cut, report, evaluate: whatever is due after this round and may begin."""
        duties = self._duties
        if duties.checkpoint:
            duties.checkpoint.settle(point.settled_checkpoint, point.settled_checkpoint_ok)
        if duties.cut:
            duties.cut.settle(point.settled_cut, point.settled_cut_ok)
        if self._finish is not None:
            self._continue_finish(self._finish, point)
            return
        for duty in duties.all():
            if duty.is_due(point) and self._may_begin(duty, point):
                duty.run(point)

    def _may_begin(self, duty: Duty, point: SyncPoint) -> bool:
        return not duty.outstanding and (point.writers_ready or duty in (self._duties.report, self._duties.evaluate))

    def _begin_finish(self, point: SyncPoint) -> None:
        """Take the reason to stop that this round brought, before the next report is made: it must not promise more batches."""
        reason = self._reason(point)
        if reason is StopReason.NONE or (self._finish and reason <= self._finish.reason):
            return
        if reason is StopReason.EXHAUSTED and self._feed.next_pass():
            self._exhausted = False
            return
        ending, duties = ENDINGS[reason], self._duties
        wanted = ((ending.evaluate, duties.evaluate), (ending.checkpoint, duties.checkpoint), (ending.release, duties.cut))
        self._finish = _Finish(
            reason=reason,
            until=self._clock.monotonic() + self._settings.finish_timeout_s,
            todo=[duty for wants, duty in wanted if wants and duty is not None],
        )
        log.info("stopping after step %d: %s", point.last_step, reason.name.lower())
        logs.event("train.stopping", step=point.last_step, reason=reason.name.lower())

    def _continue_finish(self, finish: _Finish, point: SyncPoint) -> None:
        """Do what is left of the ending in order, each once the one before it has settled; a failed commit is tried again."""
        while finish.todo:
            duty = finish.todo[0]
            gave_up = duty.max_tries and finish.tries >= duty.max_tries
            if not duty.outstanding and (duty.committed_step == point.last_step or gave_up):
                finish.todo.pop(0)
                finish.tries = 0
                continue
            if not self._may_begin(duty, point):
                return
            duty.run(point)
            finish.tries += 1
            if not duty.outstanding:
                duty.committed_step = point.last_step

    def _is_over(self, point: SyncPoint) -> bool:
        if self._reason(point) is StopReason.FAILED:
            if self._error:
                raise self._error
            raise PeerLostError(f"another rank failed at step {point.last_step}; its own log says why")
        if self._finish is None:
            return False
        if self._clock.monotonic() > self._finish.until:
            raise DeadlineError(f"the final save or release wasn't committed within {self._settings.finish_timeout_s:.0f} s")
        return not self._finish.todo

    def _reason(self, point: SyncPoint) -> StopReason:
        if self._finish and point.stop < self._finish.reason:
            return self._finish.reason
        limit = self._settings.num_steps
        reached = StopReason.STEP_LIMIT if limit is not None and point.last_step >= limit else StopReason.NONE
        return max(point.stop, reached)
