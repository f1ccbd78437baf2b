"""What exists outside all runs: rows with ids in files, or in partitions where they arrive as time goes by."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.data.assignment import Assigned
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import RawBatch, Run, Split, SplitId, join_runs
from tidemill.errors import DataError, SourceChangedError
from tidemill.testing.simulation.scheduler import Scheduler

KIND = "simulated"


@dataclass(slots=True)
class Part:
    """A file or a partition: for each row its id, position (ascending), event time, cost, and when it can be read (ascending)."""

    name: str
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    appears_at: float = 0.0
    in_turn: bool = False

    @property
    def id(self) -> SplitId:
        return SplitId(KIND, self.name)

    def arrived(self, now: float) -> int:
        """How many rows can be read."""
        return bisect.bisect_right(self.arrivals, now)


@dataclass(slots=True)
class World:
    """All rows of a story. `boundary`: rows with an earlier event time aren't to be trained. `pace_s`: how long a read of a file
    takes; without it a file is over before anything can happen to the run, and nothing goes on in the middle of one."""

    bounded: bool
    parts: list[Part] = field(default_factory=list)
    boundary: float | None = None
    pace_s: float = 0.0
    num_ids: int = 0
    part_of: dict[int, Part] = field(default_factory=dict)
    time_of: dict[int, float] = field(default_factory=dict)

    def add(self, part: Part, *, position: int, time: float, cost: float, arrival: float) -> None:
        """One more row."""
        part.ids.append(self.num_ids)
        part.positions.append(position)
        part.times.append(time)
        part.costs.append(cost)
        part.arrivals.append(arrival)
        self.part_of[self.num_ids] = part
        self.time_of[self.num_ids] = time
        self.num_ids += 1

    @property
    def table_size(self) -> int:
        """Rows of a table with one for each id."""
        return max(self.num_ids, 1)

    @property
    def expected(self) -> list[int]:
        """The ids that must be trained."""
        return [one for one in range(self.num_ids) if self.boundary is None or self.time_of[one] >= self.boundary]


def make_world(rng: random.Random) -> World:
    """Some files, or some partitions; of a few rows each, sometimes of none."""
    world = World(bounded=rng.random() < 0.5)
    in_turn = rng.random() < 0.3
    for number in range(rng.randint(1, 4)):
        late = 0.0 if world.bounded or number == 0 or rng.random() < 0.6 else rng.uniform(0.0, 3.0)
        part = Part(f"part:{number}", appears_at=late, in_turn=world.bounded and in_turn)
        world.parts.append(part)
        rate = rng.choice([10.0, 50.0, 300.0])
        position, arrival, time = 0, late, 1000.0 + rng.uniform(-5.0, 5.0)
        for _ in range(rng.choice([0, 5, 20, 40, 80] if world.bounded else [0, 1, 5, 20, 40])):
            if not world.bounded:
                position += rng.randint(1, 3) if rng.random() < 0.2 else 0
                arrival += rng.expovariate(rate) + (rng.uniform(0.3, 3.0) if rng.random() < 0.02 else 0.0)
            time += rng.uniform(0.0, 1.0)
            cost = rng.choice([1.0, 2.0, 9.0])
            world.add(part, position=position, time=round(time, 3), cost=cost, arrival=arrival)
            position += 1
    if world.bounded:
        world.pace_s = rng.choice([0.0, 0.03, 0.1, 0.3])
    elif rng.random() < 0.3:
        world.boundary = 1003.0
    return world


class WorldSource(Source):
    """Reads the world; `failing`: how likely a read fails, which ends the run."""

    kind = KIND

    def __init__(self, world: World, scheduler: Scheduler, *, failing: float) -> None:
        self.bounded = world.bounded
        self.world = world
        self.scheduler = scheduler
        self.failing = failing

    def discover(self) -> list[Split]:
        return [self.split(part) for part in self.world.parts if part.appears_at <= self.scheduler.now]

    def split(self, part: Part) -> Split:
        return Split(part.id, len(part.ids) if self.bounded else None, self._fingerprint(part), part.in_turn)

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        part = next(part for part in self.world.parts if part.id == split.id)
        self.verify(split, self._fingerprint(part))
        assert remaining is not None, "partitions are opened together"
        return _FileReader(self, part, remaining)

    def open_all(self, assigned: Sequence[Assigned], mine: Callable[[SplitId], bool] | None = None) -> SplitReader:
        return super().open_all(assigned, mine) if self.bounded else _StreamReader(self, assigned, mine)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        if split.fingerprint != fingerprint:
            raise SourceChangedError(f"{split.id} changed: was {fingerprint}, is {split.fingerprint}")

    def meet_fate(self) -> None:
        """One read: others come first, and it may fail."""
        self.scheduler.pause()
        if self.scheduler.rng.random() < self.failing:
            self.scheduler.note(f"{self.scheduler.current.name}: the source fails")
            raise DataError("the source failed on purpose")

    def _fingerprint(self, part: Part) -> dict[str, Any]:
        return {"rows": len(part.ids)} if self.bounded else {"of": part.name}


class _FileReader(SplitReader):
    """The remaining rows of a file, some at a time."""

    def __init__(self, source: WorldSource, part: Part, remaining: IntervalSet) -> None:
        self._source = source
        self._part = part
        self._left = [row for start, stop in remaining for row in range(start, stop)]

    def read(self, timeout_s: float) -> RawBatch | None:
        self._source.meet_fate()
        if not self._left:
            raise EOFError
        if self._source.world.pace_s:
            self._source.scheduler.sleep(self._source.world.pace_s)
        count = self._source.scheduler.rng.randint(1, 12)
        rows, self._left = self._left[:count], self._left[count:]
        return _batch(self._part, rows, [Run(self._part.id, row, row + 1, 1, event_time=self._part.times[row]) for row in rows])

    def close(self) -> None:
        self._left = []


class _StreamReader(SplitReader):
    """What has arrived in partitions, one partition a read."""

    def __init__(self, source: WorldSource, assigned: Sequence[Assigned], mine: Callable[[SplitId], bool] | None) -> None:
        self._source = source
        self._mine = mine
        self._found: list[Split] = []
        self._known = {one.split.id for one in assigned}
        self._next: dict[SplitId, int] = {}
        self._at: dict[SplitId, int] = {}
        self._parts = {part.id: part for part in source.world.parts}
        for one in assigned:
            # Rows of a partition are trained in order, so what is done is always its beginning.
            assert len(one.done.intervals) <= 1, f"{one.split.id}: holes in {one.done}"
            self._begin(one.split.id, one.done.first_gap(0))

    def _begin(self, split: SplitId, position: int) -> None:
        self._at[split] = position
        self._next[split] = bisect.bisect_left(self._parts[split].positions, position)

    def read(self, timeout_s: float) -> RawBatch | None:
        scheduler = self._source.scheduler
        self._source.meet_fate()
        self._look()
        waiting = [split for split in self._next if not self.is_caught_up(split)]
        if not waiting:
            scheduler.sleep(max(timeout_s, 1e-3))
            return None
        split = waiting[int(scheduler.rng.random() * len(waiting))]
        part, first = self._parts[split], self._next[split]
        rows = list(range(first, min(part.arrived(scheduler.now), first + scheduler.rng.randint(1, 12))))
        runs: list[Run] = []
        for row in rows:
            start, position = self._at[split], part.positions[row]
            runs.append(Run(split, start, position + 1, 1, gap=position - start, event_time=part.times[row]))
            self._at[split] = position + 1
        self._next[split] = rows[-1] + 1
        return _batch(part, rows, runs)

    def close(self) -> None:
        self._next.clear()

    def found(self) -> list[Split]:
        found, self._found = self._found, []
        return found

    def is_caught_up(self, split: SplitId) -> bool:
        if split not in self._next:
            return True
        return self._next[split] >= self._parts[split].arrived(self._source.scheduler.now)

    def _look(self) -> None:
        for split in self._source.discover():
            if split.id not in self._known and self._mine is not None and self._mine(split.id):
                self._known.add(split.id)
                self._found.append(split)
                self._begin(split.id, 0)


def _batch(part: Part, rows: Sequence[int], runs: Sequence[Run]) -> RawBatch:
    table = pa.table({"id": [part.ids[row] for row in rows], "cost": [part.costs[row] for row in rows]})
    return RawBatch(table, join_runs(runs), np.array([part.times[row] for row in rows], np.float64))
