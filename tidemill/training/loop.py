"""The training loop: rounds of steps that all ranks agree on, and what follows each round (D1, D2, D7).

One round, on every rank:

    take batches -> report -> train this round's steps, while the next gather travels -> checkpoint, cut, report, evaluate

The loop knows no source, no model and no store: it is given a feed, a step and duties. It decides from `SyncPoint`s alone, so all
ranks do the same things at the same steps; they go on agreeing (ticks) while a final save or a slow store keeps them waiting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tidemill import logs
from tidemill.cadence import ENDINGS, NO_BATCH, RankReport, StopReason, SyncPoint, Trigger, agree
from tidemill.clock import Clock, EventTime, SystemClock
from tidemill.data.split import Delivery, Provenance
from tidemill.errors import DataError, DeadlineError, PeerLostError

if TYPE_CHECKING:
    from tidemill.features.batch import Batch

log = logging.getLogger(__name__)

DATA_WAIT_S = 0.05
"""How long a rank without a batch waits for one before it reports (D1)."""

RETRY_PAUSE_S = 1.0
"""How long an ending waits before it tries a failed save or release again, by rank 0's clock."""


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

    def end_pass(self) -> None:
        """All ranks have trained everything; what is saved now counts the pass."""
        ...

    def next_pass(self) -> bool:
        """Start the next pass, counting the one before unless `end_pass` has; False if that was the last."""
        ...

    def end_passes(self) -> None:
        """Count all passes that are left, as this one had nothing to train."""
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


@dataclass(slots=True, eq=False)
class Duty:
    """An action that follows a round: its triggers, and, if it is finished in the background, what is outstanding.

    `act` runs on every rank at the same SyncPoint, may be collective, and returns the number of what it began (0: it is done, and
    there is nothing to wait for). `settled` tells rank 0's newest settled number and whether it was committed. `on_settled` runs
    on every rank at the same SyncPoint. `ready`: whether this rank could begin now without waiting. `max_tries`: how often an
    ending tries to get it committed; 0: until its deadline. `position`: what may move on without a step, and is the same on all
    ranks; `committed_step` and `committed_position`: where it was last done; an ending there doesn't do it again.
    """

    act: Callable[[SyncPoint], int]
    triggers: Sequence[Trigger] = ()
    ready: Callable[[], bool] = lambda: True
    settled: Callable[[], tuple[int, bool]] = lambda: (0, False)
    on_settled: Callable[[int, bool], None] = lambda number, committed: None
    max_tries: int = 0
    position: Callable[[], object] = lambda: None
    outstanding: int = 0
    last_step: int = -1
    last_position: object = None
    committed_step: int = -1
    committed_position: object = None

    def is_due(self, point: SyncPoint) -> bool:
        # Every trigger is asked, so that each takes its reference.
        return True in [trigger.due(point) for trigger in self.triggers]

    def is_done(self, point: SyncPoint) -> bool:
        """Whether nothing has changed since it was last done."""
        return (self.committed_step, self.committed_position) == (point.last_step, self.position())

    def run(self, point: SyncPoint) -> None:
        self.last_step, self.last_position = point.last_step, self.position()
        self.outstanding = self.act(point)
        if not self.outstanding:
            self.committed_step, self.committed_position = self.last_step, self.last_position
        for trigger in self.triggers:
            trigger.fired(point)

    def settle(self, number: int, committed: bool) -> None:
        """Take rank 0's word for what is outstanding."""
        if self.outstanding and number >= self.outstanding:
            self.on_settled(self.outstanding, committed)
            if committed:
                self.committed_step, self.committed_position = self.last_step, self.last_position
            self.outstanding = 0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What bounds the loop. `num_steps` counts from the lineage's first step.

    `finish_timeout_s`: for each action of an ending; tries of one action included. `refuse_empty`: a run that ends without a row
    ever trained is an error.
    """

    steps_per_round: int = 1
    num_steps: int | None = None
    quorum: float = 1.0
    finish_timeout_s: float = 600.0
    refuse_empty: bool = False


@dataclass(slots=True)
class Duties:
    """What may follow a round, in the order of `cadence.Action`."""

    checkpoint: Duty | None = None
    cut: Duty | None = None
    report: Duty | None = None
    evaluate: Duty | None = None

    def all(self) -> list[Duty]:
        return [duty for duty in (self.checkpoint, self.cut, self.report, self.evaluate) if duty is not None]

    def name(self, duty: Duty) -> str:
        """Which one of them a duty is."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is duty)


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
    """The ending under way: what of D7's row is still to do, in order, and how the first of it is going.

    `until`: by this rank's monotonic clock. `tried_at`: by rank 0's clock, as agreed.
    """

    reason: StopReason
    todo: list[Duty]
    until: float
    tries: int = 0
    tried_at: float = -math.inf


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
        """`checks` are called before each report; what one raises stops all ranks."""
        self._agreement = agreement
        self._feed = feed
        self._step = step
        self._duties = duties
        self._settings = settings
        self._observers = observers
        self._checks = checks
        self._clock = clock or SystemClock()
        start = state or LoopState()
        self._trained_steps = start.step
        self.examples = start.examples
        """The sum of the weights of all rows trained so far, on all ranks; the number of rows if none has another weight than 1."""
        self.batches = 0
        """How many batches this run is done with, each one batch on all ranks: also those without weight, which make no step."""
        self._watermark = start.watermark
        self.published_watermark = start.watermark
        """The watermark that was agreed on before the round under way."""
        self._number = 0
        self._room = 0
        """How many steps the round that was last reported may have."""
        self._promised: list[Delivery[Batch]] = []
        """This rank's batches of that round: what is taken is always trained, in the very round that it was reported for."""
        self._exhausted = False
        self._pass_began_at: int | None = None
        self._finish: _Finish | None = None
        # Plain booleans: an Event's lock can't be taken twice, and a signal handler may interrupt another one.
        self._preempted = False
        self._handed_over = False
        self._error: Exception | None = None

    def preempt(self) -> None:
        """Ask all ranks to stop after the coming round (SIGTERM, SIGINT)."""
        self._preempted = True

    def hand_over(self) -> None:
        """Rank 0's verdict that the successor has caught up; it travels in the next report."""
        self._handed_over = True

    def run(self) -> Outcome:
        """Train to the end. Collective.

        Raises this rank's own error once all ranks know of it, PeerLostError if another rank failed. What the step or an action
        raises is raised at once, since both may be collective: the others run into their timeout.
        """
        pending = self._report_next(self._trained_steps, [], DATA_WAIT_S)
        while True:
            point = self._decide(pending.wait())
            if self._finish and not self._finish.todo:
                return Outcome(self._finish.reason, point.last_step, point.watermark)
            self._begin_finish(point)
            current = self._promised
            # The next gather travels while this round trains. Wait for data only if there is nothing else to do.
            pending = self._report_next(point.last_step, current, 0.0 if point.weights else DATA_WAIT_S)
            self._train(point, current)
            if point.ends_pass:
                with self._telling_all_ranks():
                    self._feed.end_pass()
            self._follow(point)

    def _decide(self, reports: list[RankReport]) -> SyncPoint:
        """The round's SyncPoint. Raises if a rank failed."""
        point = agree(
            reports,
            number=self._number,
            first_step=self._trained_steps,
            share=self._settings.quorum,
            watermark=self._watermark,
            max_steps=self._room,
        )
        if point.stop is StopReason.FAILED:
            failed = [rank for rank, report in enumerate(reports) if report.stop is StopReason.FAILED]
            raise self._error or PeerLostError(f"rank {failed[0]} failed at step {point.first_step}; its own log says why")
        self._number += 1
        self.published_watermark, self._watermark = self._watermark, point.watermark
        return point

    def _report_next(self, step: int, current: Sequence[Delivery[Batch]], timeout_s: float) -> Pending:
        """Take the batches of the round that begins at `step`, behind `current`, and start its gather."""
        self._room = self._limit(step)
        self._promised = self._take(self._room, timeout_s)
        return self._agreement.issue(self._report(current))

    def _limit(self, step: int) -> int:
        """How many steps the round that begins at `step` may have: rounds end where something is due."""
        if self._finish:
            return 0
        limits = [self._settings.steps_per_round]
        if self._settings.num_steps is not None:
            limits.append(max(self._settings.num_steps - step, 0))
        for duty in self._duties.all():
            ahead = (trigger.steps_to_next(step) for trigger in duty.triggers)
            limits += [steps for steps in ahead if steps is not None]
        return min(limits)

    def _take(self, room: int, timeout_s: float) -> list[Delivery[Batch]]:
        """Up to `room` batches; waits for the first one only."""
        taken: list[Delivery[Batch]] = []
        if self._finish:
            self._clock.sleep(timeout_s)
        with self._telling_all_ranks():
            while not self._exhausted and not self._error and len(taken) < room:
                try:
                    delivery = self._feed.take(0.0 if taken else timeout_s)
                except EOFError:
                    self._exhausted = True
                    break
                if delivery is None:
                    break
                _require_weight(delivery)
                taken.append(delivery)
                self._exhausted = delivery.is_last
        return taken

    def _report(self, current: Sequence[Delivery[Batch]]) -> RankReport:
        weights = [_weight(delivery) for delivery in self._promised]
        weights += [NO_BATCH] * (self._settings.steps_per_round - len(weights))
        event_time, abstains = self._feed.event_time([delivery.provenance for delivery in (*current, *self._promised)])
        cut, checkpoint = self._duties.cut, self._duties.checkpoint
        settled_cut, cut_ok = cut.settled() if cut else (0, False)
        settled_checkpoint, checkpoint_ok = checkpoint.settled() if checkpoint else (0, False)
        return RankReport(
            event_time=event_time,
            abstains=abstains,
            stop=self._own_reason(),
            writer_ready=cut is None or cut.ready(),
            weights=tuple(weights),
            clock=self._clock.time(),
            handover=self._handed_over,
            settled_cut=settled_cut,
            settled_cut_ok=cut_ok,
            settled_checkpoint=settled_checkpoint,
            settled_checkpoint_ok=checkpoint_ok,
            checkpoint_ready=checkpoint is None or checkpoint.ready(),
            ends_pass=self._exhausted,
        )

    def _own_reason(self) -> StopReason:
        with self._telling_all_ranks():
            for check in self._checks:
                check()
            self._require_time()
        if self._error:
            return StopReason.FAILED
        if self._preempted:
            return StopReason.PREEMPTED
        if self._exhausted and not self._promised:
            return StopReason.EXHAUSTED
        return StopReason.NONE

    def _require_time(self) -> None:
        """Raises DeadlineError if an action of the ending has taken too long."""
        finish = self._finish
        if finish and finish.todo and self._clock.monotonic() > finish.until:
            name = self._duties.name(finish.todo[0])
            limit = f"{self._settings.finish_timeout_s:.0f} s ({finish.tries} tries)"
            raise DeadlineError(f"the final {name} wasn't done within {limit}; its own log lines say why")

    @contextmanager
    def _telling_all_ranks(self) -> Iterator[None]:
        """Keep what is raised inside: the next report tells all ranks, which then stop together. Not for collective work."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - plug-in call
            self._error = self._error or error

    def _train(self, point: SyncPoint, current: Sequence[Delivery[Batch]]) -> None:
        step = point.first_step
        for weight, delivery in zip_longest(point.weights, current):
            if weight > 0:
                self._train_step(step, delivery, weight)
                step += 1
                self.examples += weight
            if delivery is not None:
                self._feed.trained(delivery.provenance)
        self._trained_steps = step
        self.batches += len(point.weights)

    def _train_step(self, step: int, delivery: Delivery[Batch] | None, weight: float) -> None:
        if delivery is None:
            self._step(self._step.padding(), weight)
            return
        with self._telling_all_ranks():
            for observer in self._observers:
                observer.entering(step, delivery.provenance)
        outputs = self._step(delivery.payload, weight)
        with self._telling_all_ranks():
            for observer in self._observers:
                observer.trained(step, delivery, outputs)

    def _follow(self, point: SyncPoint) -> None:
        """Checkpoint, cut, report, evaluate: whatever is due after this round and may begin."""
        duties = self._duties
        if duties.checkpoint:
            duties.checkpoint.settle(point.settled_checkpoint, point.settled_checkpoint_ok)
        if duties.cut:
            duties.cut.settle(point.settled_cut, point.settled_cut_ok)
        if self._finish:
            self._continue_finish(self._finish, point)
        # During an ending the others run only as it says; others go on looking at our progress.
        regular = duties.all() if self._finish is None else [duty for duty in (duties.report,) if duty]
        for duty in regular:
            if duty.is_due(point) and self._may_begin(duty, point):
                duty.run(point)

    def _may_begin(self, duty: Duty, point: SyncPoint) -> bool:
        if duty.outstanding:
            return False
        if duty is self._duties.checkpoint:
            return point.checkpoints_ready
        return duty is not self._duties.cut or point.writers_ready

    def _begin_finish(self, point: SyncPoint) -> None:
        """Take the reason to stop that this round brought, before the next report is made: it must not promise more batches."""
        reason = self._reason(point)
        if reason is StopReason.NONE or (self._finish and reason <= self._finish.reason):
            return
        if reason is StopReason.EXHAUSTED and self._begin_pass():
            return
        if reason is StopReason.EXHAUSTED and point.last_step == 0 and self._settings.refuse_empty:
            raise DataError("the input holds no row to train on; see what train_input_path names, and the rows' weights")
        ending, duties = ENDINGS[reason], self._duties
        wanted = ((ending.evaluate, duties.evaluate), (ending.checkpoint, duties.checkpoint), (ending.release, duties.cut))
        self._finish = _Finish(
            reason=reason,
            todo=[duty for wants, duty in wanted if wants and duty is not None],
            until=self._clock.monotonic() + self._settings.finish_timeout_s,
        )
        log.info("stopping after step %d: %s", point.last_step, reason.name.lower())
        logs.event("train.stopping", step=point.last_step, reason=reason.name.lower())

    def _begin_pass(self) -> bool:
        """Begin the next pass, if there is one. A pass that trained nothing is the last: so would all that follow; they count."""
        with self._telling_all_ranks():
            if self._pass_began_at == self._trained_steps:
                self._feed.end_passes()
                return False
            if not self._feed.next_pass():
                return False
            self._exhausted = False
        self._pass_began_at = self._trained_steps
        return True

    def _continue_finish(self, finish: _Finish, point: SyncPoint) -> None:
        """Do what is left of the ending in order, each once the one before it has settled; a failed commit is tried again."""
        while finish.todo:
            duty = finish.todo[0]
            gave_up = 0 < duty.max_tries <= finish.tries
            if not duty.outstanding and (duty.is_done(point) or gave_up):
                finish.todo.pop(0)
                finish.tries, finish.tried_at = 0, -math.inf
                finish.until = self._clock.monotonic() + self._settings.finish_timeout_s
                continue
            # By distance: a clock that was set back must not put off the next try.
            if not self._may_begin(duty, point) or abs(point.clock - finish.tried_at) < RETRY_PAUSE_S:
                return
            if finish.tries == 1:
                self._announce_tries(duty, finish)
            duty.run(point)
            finish.tries += 1
            finish.tried_at = point.clock

    def _announce_tries(self, duty: Duty, finish: _Finish) -> None:
        """Whoever waits for the end should know early why it doesn't come: a full disk, say, can still be cleared."""
        left = max(finish.until - self._clock.monotonic(), 0.0)
        limit = f"{duty.max_tries} times in all" if duty.max_tries else f"for {left:.0f} s; the run fails if none succeeds"
        log.warning("the final %s failed (the lines above say why); trying again, %s", self._duties.name(duty), limit)

    def _reason(self, point: SyncPoint) -> StopReason:
        if self._finish and point.stop < self._finish.reason:
            return self._finish.reason
        limit = self._settings.num_steps
        reached = StopReason.STEP_LIMIT if limit is not None and point.last_step >= limit else StopReason.NONE
        return max(point.stop, reached)


def _weight(delivery: Delivery[Batch]) -> float:
    return float(delivery.payload.weights.sum())


def _require_weight(delivery: Delivery[Batch]) -> None:
    """Raises DataError for a batch that no step can be made of."""
    weight = _weight(delivery)
    if not 0 <= weight < math.inf:
        where = delivery.provenance.places()
        raise DataError(f"the sample weights of a batch sum to {weight} ({where}); weights must be finite and not negative")
