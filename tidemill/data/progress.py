"""Which rows have been trained: advanced by trained batches only, merged over ranks, written as split states (D3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from tidemill.contracts.progress import SplitState
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.split import Provenance, Split, SplitId, spans
from tidemill.errors import SourceChangedError
from tidemill.logs import log

if TYPE_CHECKING:
    from tidemill.data.source import Source

_MOST_LOOSE = 128
"""Batches of shuffled rows after which their positions are joined in: some ten milliseconds' work."""


class Progress:
    """Trained positions and the largest trained event time of every split, and the passes completed.

    Belongs to the training thread; `copy` gives a snapshot that another thread may keep.
    """

    def __init__(self, *, passes: int = 0) -> None:
        self.passes = passes
        self._done: dict[SplitId, IntervalSet] = {}
        # Positions of shuffled rows that aren't in `_done` yet: joining them in batch by batch would rebuild the sets each time.
        self._loose: dict[SplitId, list[np.ndarray]] = {}
        self._num_loose = 0
        self.max_event_time: dict[SplitId, float] = {}
        # As an earlier run described them; what to write for those that are no longer offered.
        self._saved: dict[SplitId, Split] = {}
        # What was read to the end before this run; never offered again, and written on.
        self._carried: dict[SplitId, SplitState] = {}

    @property
    def done(self) -> dict[SplitId, IntervalSet]:
        """The trained positions of each split that has any. To be read only."""
        for split, batches in self._loose.items():
            self._done[split] = self._done.get(split, NOTHING).add_many(*spans(np.concatenate(batches)))
        self._loose.clear()
        self._num_loose = 0
        return self._done

    def advance(self, provenance: Provenance) -> None:
        """Record that a batch was trained."""
        found: dict[SplitId, list[tuple[int, int]]] = {}
        for run in provenance.runs:
            found.setdefault(run.split, []).append((run.start, run.stop))
            self._reach(run.split, run.event_time)
        # All of a split at once: a shuffled read that was killed leaves very many intervals behind.
        for split, intervals in found.items():
            self._done[split] = self._done.get(split, NOTHING) | IntervalSet.of(intervals)
        for rows in provenance.scattered:
            self._loose.setdefault(rows.split, []).append(rows.positions)
            self._num_loose += 1
            self._reach(rows.split, rows.event_time)
        if self._num_loose >= _MOST_LOOSE:
            _ = self.done

    def complete_pass(self) -> None:
        """Begin the next trip over bounded data: nothing of it is done yet. Event times stay."""
        self.passes += 1
        self._loose.clear()
        self._num_loose = 0
        self._done = {}

    def copy(self) -> Progress:
        """An independent copy; cheap, since interval sets are immutable."""
        return Progress.merge([self])

    @classmethod
    def merge(cls, parts: Sequence[Progress]) -> Self:
        """All ranks' progress as one. Raises ValueError if they aren't in the same pass: positions of different passes can't
        be told apart in one set."""
        passes = {part.passes for part in parts} or {0}
        if len(passes) > 1:
            raise ValueError(f"can't merge progress of different passes: {sorted(passes)}")
        merged = cls(passes=passes.pop())
        known_to: dict[SplitId, IntervalSet | None] = {}
        for part in parts:
            for split, positions in part.done.items():
                known = merged._done.get(split)
                merged._done[split] = positions if known is None else known | positions
            for split, time in part.max_event_time.items():
                merged._reach(split, time)
            merged._carried.update(part._carried)
            for split, saved in part._saved.items():
                # The part that has come furthest knows best.
                if split not in merged._saved or _end(part._done.get(split)) > _end(known_to.get(split)):
                    merged._saved[split] = saved
                    known_to[split] = part._done.get(split)
        return merged

    def describe(self, splits: Iterable[Split]) -> None:
        """Keep how a checkpoint describes splits (`Source.describe`), for `to_states` once they are no longer offered."""
        self._saved.update((split.id, split) for split in splits)

    def carry(self, states: Iterable[SplitState]) -> None:
        """Keep states that are to be written on as they are, through all passes."""
        self._carried.update((SplitId(state.kind, state.split), state) for state in states)

    def to_states(self, splits: Sequence[Split]) -> list[SplitState]:
        """One state a split, in the order given, untouched ones included; then splits that are known from before only, and those
        that are carried."""
        known, done = {split.id for split in splits}, self.done
        gone = [self._saved.get(split, Split(split, None)) for split in sorted(set(done) - known)]
        carried = [self._carried[split] for split in sorted(set(self._carried) - known - set(done))]
        states = [
            SplitState(
                kind=split.id.kind,
                split=split.id.name,
                intervals=list(done.get(split.id, NOTHING)),
                num_rows=split.num_rows,
                fingerprint=split.fingerprint,
                max_event_time=self.max_event_time.get(split.id),
            )
            for split in (*splits, *gone)
        ]
        return states + carried

    @classmethod
    def from_states(cls, states: Iterable[SplitState], *, passes: int = 0) -> Self:
        """The progress that was saved."""
        progress = cls(passes=passes)
        for state in states:
            split = SplitId(state.kind, state.split)
            progress._saved[split] = Split(split, state.num_rows, state.fingerprint)
            if state.intervals:
                progress._done[split] = IntervalSet.of(state.intervals)
            if state.max_event_time is not None:
                progress._reach(split, state.max_event_time)
        return progress

    def _reach(self, split: SplitId, time: float) -> None:
        if not math.isnan(time) and time > self.max_event_time.get(split, -math.inf):
            self.max_event_time[split] = time


def _end(done: IntervalSet | None) -> int:
    return done.intervals[-1][1] if done else -1


def merge_states(parts: Iterable[Sequence[SplitState]]) -> list[SplitState]:
    """All ranks' states as one, sorted by kind and split: what any rank trained, up to the largest event time of any."""
    merged: dict[SplitId, SplitState] = {}
    for part in parts:
        for state in part:
            split = SplitId(state.kind, state.split)
            known = merged.get(split)
            merged[split] = state if known is None else _joined(known, state)
    return [merged[split] for split in sorted(merged)]


def _joined(one: SplitState, other: SplitState) -> SplitState:
    # Where a source says more of a split as it reads it, the rank that reads it knows best; others say what they began with.
    best = max(one, other, key=lambda state: (bool(state.fingerprint), max((stop for _, stop in state.intervals), default=0)))
    times = [time for time in (one.max_event_time, other.max_event_time) if time is not None]
    return one.model_copy(
        update={
            "intervals": list(IntervalSet.of([*one.intervals, *other.intervals])),
            "num_rows": one.num_rows if one.num_rows is not None else other.num_rows,
            "fingerprint": best.fingerprint,
            "max_event_time": max(times, default=None),
        }
    )


def verify_splits(source: Source, splits: Sequence[Split], states: Iterable[SplitState]) -> list[Split]:
    """Compare what a source offers with what an earlier run read of it; say how many splits are new, done and missing. Returns
    the splits as a run reads them that goes on from there (`Source.resumed`).

    Raises SourceChangedError naming the split if one isn't what it was, or was read in part and is gone. States of other kinds
    of source are ignored, and those that are replaced (`Source.replaced`).
    """
    offered = {split.id: split for split in splits}
    saved = {SplitId(state.kind, state.split): state for state in states if state.kind == source.kind}
    replaced = source.replaced(splits, saved)
    for name, state in saved.items():
        if name in replaced:
            continue
        if name in offered:
            source.verify(offered[name], state.fingerprint)
        elif state.intervals and not is_complete(state):
            raise SourceChangedError(f"{name} was read in part by an earlier run and is gone; put it back to resume")
    if saved:
        new, missing = len(offered.keys() - saved.keys()), len(saved.keys() - offered.keys())
        done = sum(is_complete(state) for state in saved.values())
        log.info(
            "%s splits: %d new, %d done, %d missing of %d", source.kind, new, done, missing, len(saved.keys() | offered.keys())
        )
    return source.resumed(splits, saved)


def without_replaced(source: Source, splits: Sequence[Split], states: Sequence[SplitState]) -> list[SplitState]:
    """The states of an earlier run that still mean the splits that are offered under their names."""
    saved = {SplitId(state.kind, state.split): state for state in states if state.kind == source.kind}
    replaced = source.replaced(splits, saved)
    return [state for state in states if SplitId(state.kind, state.split) not in replaced]


def is_complete(state: SplitState) -> bool:
    """Whether all rows of a bounded split were read."""
    return state.num_rows is not None and IntervalSet.of(state.intervals).count() == state.num_rows
