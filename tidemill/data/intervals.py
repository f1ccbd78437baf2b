"""Sets of positions as sorted, disjoint, half-open intervals: the algebra of what has been trained (D3)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class IntervalSet:
    """An immutable set of integers. `intervals` are sorted, disjoint, not adjacent, each [start, stop) with start < stop."""

    intervals: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int]]) -> IntervalSet:
        """The union of any intervals, in any order; empty ones are dropped. Raises ValueError if one ends before it starts."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(intervals):
            if stop < start:
                raise ValueError(f"interval [{start}, {stop}) ends before it starts")
            if stop == start:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        return cls(tuple(merged))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.intervals)

    def count(self) -> int:
        """How many positions. No `__len__`: iteration gives intervals, and a stream has more positions than a length can say."""
        return sum(stop - start for start, stop in self.intervals)

    def __bool__(self) -> bool:
        return bool(self.intervals)

    def __contains__(self, position: int) -> bool:
        index = bisect.bisect_right(self.intervals, (position, float("inf"))) - 1
        return index >= 0 and position < self.intervals[index][1]

    def __or__(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet.of((*self.intervals, *other.intervals))

    def add_many(self, starts: np.ndarray, stops: np.ndarray) -> IntervalSet:
        """This set and many intervals [starts[i], stops[i]), in any order, none of them empty; no loop in Python."""
        if not len(starts):
            return self
        own = np.asarray(self.intervals, dtype=np.int64).reshape(-1, 2)
        low, high = np.concatenate([own[:, 0], starts]), np.concatenate([own[:, 1], stops])
        order = np.argsort(low, kind="stable")
        low, high = low[order], np.maximum.accumulate(high[order])
        first = np.flatnonzero(np.concatenate([[True], low[1:] > high[:-1]]))
        last = np.append(first[1:] - 1, len(low) - 1)
        return IntervalSet(tuple(zip(low[first].tolist(), high[last].tolist(), strict=True)))

    def __sub__(self, other: IntervalSet) -> IntervalSet:
        left: list[tuple[int, int]] = []
        cuts, at = other.intervals, 0
        for start, stop in self.intervals:
            while at < len(cuts) and cuts[at][1] <= start:
                at += 1
            while at < len(cuts) and cuts[at][0] < stop and start < stop:
                if cuts[at][0] > start:
                    left.append((start, cuts[at][0]))
                start = cuts[at][1]
                # A cut that reaches into the next interval is needed there too.
                at += start < stop
            if start < stop:
                left.append((start, stop))
        return IntervalSet(tuple(left))

    def __and__(self, other: IntervalSet) -> IntervalSet:
        return self - (self - other)

    def holds(self, positions: np.ndarray) -> np.ndarray:
        """(n,) bool: which of the positions are in the set."""
        edges = np.asarray(self.intervals, dtype=np.int64).reshape(-1)
        # Edges alternate start, stop and strictly rise, so an odd number of them at or below a position means inside.
        return np.searchsorted(edges, positions, side="right") % 2 == 1

    def ranks(self, positions: np.ndarray) -> np.ndarray:
        """(n,) int64: how many members are smaller than each of the positions, which must be members themselves."""
        edges = np.asarray(self.intervals, dtype=np.int64).reshape(-1, 2)
        before = np.concatenate([[0], np.cumsum(edges[:, 1] - edges[:, 0])])
        index = np.searchsorted(edges[:, 0], positions, side="right") - 1
        return before[index] + positions - edges[index, 0]

    def slice(self, first: int, stop: int) -> IntervalSet:
        """The members whose rank in the set is in [first, stop)."""
        taken: list[tuple[int, int]] = []
        before = 0
        for low, high in self.intervals:
            start, end = low + max(first - before, 0), low + min(stop - before, high - low)
            if start < end:
                taken.append((start, end))
            before += high - low
        return IntervalSet(tuple(taken))

    def first_gap(self, start: int) -> int:
        """The smallest position >= start that isn't in the set."""
        for low, high in self.intervals:
            if low <= start < high:
                return high
        return start


NOTHING = IntervalSet()
"""The empty set."""
