"""Sets of positions as sorted, disjoint, half-open intervals: the algebra of what has been trained (D3)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


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

    def __len__(self) -> int:
        """How many positions."""
        return sum(stop - start for start, stop in self.intervals)

    def __bool__(self) -> bool:
        return bool(self.intervals)

    def __contains__(self, position: int) -> bool:
        index = bisect.bisect_right(self.intervals, (position, float("inf"))) - 1
        return index >= 0 and position < self.intervals[index][1]

    def __or__(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet.of((*self.intervals, *other.intervals))

    def add(self, start: int, stop: int) -> IntervalSet:
        """This set and [start, stop). Cheap if it extends the last interval, as reading in order does."""
        if self.intervals and start == self.intervals[-1][1] and stop > start:
            return IntervalSet((*self.intervals[:-1], (self.intervals[-1][0], stop)))
        return IntervalSet.of((*self.intervals, (start, stop)))

    def __sub__(self, other: IntervalSet) -> IntervalSet:
        left: list[tuple[int, int]] = []
        for start, stop in self.intervals:
            for cut_start, cut_stop in other.intervals:
                if cut_stop <= start or cut_start >= stop:
                    continue
                if cut_start > start:
                    left.append((start, cut_start))
                start = max(start, cut_stop)
            if start < stop:
                left.append((start, stop))
        return IntervalSet(tuple(left))

    def __and__(self, other: IntervalSet) -> IntervalSet:
        return self - (self - other)

    def first_gap(self, start: int) -> int:
        """The smallest position >= start that isn't in the set."""
        for low, high in self.intervals:
            if low <= start < high:
                return high
        return start
