"""What ranks tell each other once a round, and the pure decisions that follow from it (D1, D2, D7).

Everything here is a pure function of its arguments: the same reports give the same `SyncPoint` on every rank.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tidemill.clock import EventTime


class StopReason(enum.IntEnum):
    """Why a run ends; a larger value takes precedence when ranks report several (D1)."""

    NONE = 0
    EXHAUSTED = 1
    STEP_LIMIT = 2
    PREEMPTED = 3
    HANDED_OVER = 4
    FAILED = 5


class Action(enum.IntEnum):
    """What may follow a round, in this order."""

    CHECKPOINT = 1
    CUT = 2
    REPORT = 3
    EVALUATE = 4


@dataclass(frozen=True, slots=True)
class Ending:
    """One row of the table of endings (D7)."""

    evaluate: bool
    checkpoint: bool
    release: bool
    record: str
    exit_code: int | None


ENDINGS: dict[StopReason, Ending] = {
    StopReason.EXHAUSTED: Ending(True, True, True, "completed", 0),
    StopReason.STEP_LIMIT: Ending(True, True, True, "completed", 0),
    StopReason.HANDED_OVER: Ending(False, False, True, "retired", 0),
    StopReason.PREEMPTED: Ending(False, True, True, "interrupted", 75),
    StopReason.FAILED: Ending(False, False, False, "failed", None),
}
"""Reason -> what still happens. `exit_code` None: the error's own."""


NO_BATCH = -1.0
"""Stands in `RankReport.weights` for a batch that a rank doesn't have. A batch whose rows all have weight 0 is one, of weight 0."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank puts into the gather.

    `event_time`: as of the end of the coming round; None: not reached. `abstains`: all its partitions are idle, or it has none.
    `weights`: the weight sum of each batch in hand, `NO_BATCH` where there is none; always as many as the config's steps_per_round.
    `writer_ready`, `checkpoint_ready`: whether this rank could begin a cut, or a checkpoint, without waiting.
    `settled_*`: rank 0's newest cut and checkpoint that is committed (ok) or failed; 0 = none yet.
    `clock`, `handover` and `settled_*` are read from rank 0 only. `ends_pass`: behind the batches in hand there is nothing left of
    this rank's share of the pass.
    """

    event_time: float | None
    abstains: bool
    stop: StopReason
    writer_ready: bool
    weights: tuple[float, ...]
    clock: float = 0.0
    handover: bool = False
    settled_cut: int = 0
    settled_cut_ok: bool = False
    settled_checkpoint: int = 0
    settled_checkpoint_ok: bool = False
    checkpoint_ready: bool = True
    ends_pass: bool = False

    def to_array(self) -> np.ndarray:
        """The report as float64 of a size that depends on the number of weights only."""
        head = (
            math.nan if self.event_time is None else self.event_time,
            self.abstains,
            self.stop,
            self.writer_ready,
            self.clock,
            self.handover,
            self.settled_cut,
            self.settled_cut_ok,
            self.settled_checkpoint,
            self.settled_checkpoint_ok,
            self.checkpoint_ready,
            self.ends_pass,
        )
        return np.array([*head, *self.weights], dtype=np.float64)

    @classmethod
    def from_array(cls, array: np.ndarray) -> RankReport:
        """The inverse of `to_array`."""
        values = [float(v) for v in array]
        return cls(
            event_time=None if math.isnan(values[0]) else values[0],
            abstains=bool(values[1]),
            stop=StopReason(int(values[2])),
            writer_ready=bool(values[3]),
            clock=values[4],
            handover=bool(values[5]),
            settled_cut=int(values[6]),
            settled_cut_ok=bool(values[7]),
            settled_checkpoint=int(values[8]),
            settled_checkpoint_ok=bool(values[9]),
            checkpoint_ready=bool(values[10]),
            ends_pass=bool(values[11]),
            weights=tuple(values[12:]),
        )


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """What all ranks know and decide about one round; the same on every rank."""

    number: int
    """Rounds before this one in the run."""
    first_step: int
    """Steps trained before this round."""
    weights: tuple[float, ...]
    """The global weight sum of each step of the round; a step of weight 0 isn't trained, but its rows are done with."""
    stop: StopReason
    watermark: EventTime | None
    clock: float
    writers_ready: bool
    settled_cut: int
    settled_cut_ok: bool
    settled_checkpoint: int
    settled_checkpoint_ok: bool
    checkpoints_ready: bool = True
    ends_pass: bool = False
    """This round trains the last batches of the pass."""

    @property
    def last_step(self) -> int:
        """Steps trained after this round."""
        return self.first_step + sum(1 for weight in self.weights if weight > 0)


def quorum(values: Sequence[float | None], abstains: Sequence[bool], share: float) -> float | None:
    """The largest time that a share of the voting ranks have reached, or None (D2).

    `values[i]` None counts as not reached. k = clamp(ceil(share * m - 1e-9), 1, m) of the m ranks that don't abstain.
    """
    voting = [value for value, abstain in zip(values, abstains, strict=True) if not abstain]
    if not voting:
        return None
    reached = sorted((value for value in voting if value is not None), reverse=True)
    k = min(max(math.ceil(share * len(voting) - 1e-9), 1), len(voting))
    return reached[k - 1] if len(reached) >= k else None


def agree(
    reports: Sequence[RankReport],
    *,
    number: int,
    first_step: int,
    share: float,
    watermark: EventTime | None,
    max_steps: int,
) -> SyncPoint:
    """The round's decisions from all ranks' reports, in rank order.

    `watermark` is the last agreed one: it never goes back, and stays if all ranks abstain. `max_steps`: steps to the next step
    trigger or limit; a rank that reports more batches in hand trains only that many.
    """
    stops = [report.stop for report in reports]
    urgent = max((stop for stop in stops if stop > StopReason.STEP_LIMIT), default=StopReason.NONE)
    if reports[0].handover:
        urgent = max(urgent, StopReason.HANDED_OVER)
    stop = urgent if urgent else min(stops)
    columns = list(zip(*(report.weights for report in reports), strict=True))
    present = [column for column in columns[:max_steps] if any(weight >= 0 for weight in column)]
    weights = tuple(float(sum(weight for weight in column if weight >= 0)) for column in present)
    reached = quorum([r.event_time for r in reports], [r.abstains for r in reports], share)
    if reached is not None and (watermark is None or reached > watermark):
        watermark = EventTime(reached)
    zero = reports[0]
    return SyncPoint(
        number=number,
        first_step=first_step,
        weights=weights,
        stop=stop,
        watermark=watermark,
        clock=zero.clock,
        writers_ready=all(report.writer_ready for report in reports),
        settled_cut=zero.settled_cut,
        settled_cut_ok=zero.settled_cut_ok,
        settled_checkpoint=zero.settled_checkpoint,
        settled_checkpoint_ok=zero.settled_checkpoint_ok,
        checkpoints_ready=all(report.checkpoint_ready for report in reports),
        ends_pass=bool(weights) and all(report.ends_pass for report in reports),
    )


class Stateful(Protocol):
    """Something that a checkpoint must save and that the checkpoint code doesn't know. State is arrays and JSON, never pickled."""

    def state(self) -> dict[str, Any]:
        """This rank's state, copied so that later training doesn't change it: numpy arrays by name, and JSON values."""
        ...

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Take back what `state` gave on every rank of the run that saved, in rank order; their number may differ from ours."""
        ...


class Trigger(Protocol):
    """Decides from consecutive SyncPoints whether an action is due. Pure but for the reference point that it keeps."""

    def due(self, point: SyncPoint) -> bool:
        """Whether the action is due after this round."""
        ...

    def fired(self, point: SyncPoint) -> None:
        """The action was taken, for whatever reason: the reference moves here."""
        ...

    def steps_to_next(self, step: int) -> int | None:
        """Steps until the trigger is due for sure; None if steps don't decide it."""
        ...


class AtStart:
    """Due at the first round of a run, step or not, and until the action was taken once."""

    def __init__(self) -> None:
        self._fired = False

    def due(self, point: SyncPoint) -> bool:
        return not self._fired

    def fired(self, point: SyncPoint) -> None:
        self._fired = True

    def steps_to_next(self, step: int) -> int | None:
        return None


class EverySteps:
    """Due each time the step count passes a multiple of n. `start`: the step that a restored run begins at."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n = n
        self._last = start

    def due(self, point: SyncPoint) -> bool:
        return point.last_step // self.n > self._last // self.n

    def fired(self, point: SyncPoint) -> None:
        self._last = point.last_step

    def steps_to_next(self, step: int) -> int | None:
        return self.n - step % self.n


class EverySeconds:
    """Due when rank 0's clock has moved on by an interval since the action was last taken; the first round is the reference."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._last: float | None = None

    def due(self, point: SyncPoint) -> bool:
        if self._last is None:
            self._last = point.clock
        # A clock that was set back would stop the action for as long as the jump: take it as a new reference instead.
        if point.clock < self._last:
            self._last = point.clock
        return point.clock - self._last >= self.interval_s

    def fired(self, point: SyncPoint) -> None:
        self._last = point.clock

    def steps_to_next(self, step: int) -> int | None:
        return None


class EventTimeCrossing:
    """Due when the watermark enters a new bucket of `interval_s` (aligned to the Unix epoch) or passes one of `targets`.

    The first watermark only sets the reference, unless one was restored.
    """

    def __init__(self, interval_s: float = 0.0, targets: Iterable[float] = (), reference: float | None = None) -> None:
        self.interval_s = interval_s
        self.targets = tuple(sorted(targets))
        self._last = reference

    def due(self, point: SyncPoint) -> bool:
        now = point.watermark
        if now is None:
            return False
        if self._last is None:
            self._last = now
            return False
        crossed = self.interval_s > 0 and now // self.interval_s > self._last // self.interval_s
        return crossed or any(self._last < target <= now for target in self.targets)

    def fired(self, point: SyncPoint) -> None:
        if point.watermark is not None:
            self._last = point.watermark

    def steps_to_next(self, step: int) -> int | None:
        return None
