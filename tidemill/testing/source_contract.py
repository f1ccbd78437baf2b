"""What every source must hold to: exact positions, whatever is killed, resumed or dealt to other ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from tidemill.contracts.progress import SplitState
from tidemill.data.assignment import Assigned, AssignmentBase, plan
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.progress import Progress
from tidemill.data.shuffle import Shuffle
from tidemill.data.source import Source
from tidemill.data.split import Delivery, Provenance, Split
from tidemill.errors import SourceChangedError

T = TypeVar("T")

_DEADLINE_S = 30.0


class SourceContract(ABC):
    """Derive a test class `Test<Name>` from it and say how to make the source."""

    key = "event_id"
    """A column whose values tell rows apart."""

    time: str | None = "event_time"
    """The column that holds event time; None: the source has none."""
    batch_size = 7
    """About a tenth of the rows or less."""

    @abstractmethod
    def make(self, directory: Path) -> Source:
        """A source of at least two splits and few rows. Called again with the same folder, it gives a new source of the
        same data, as another process would see it."""

    @abstractmethod
    def num_rows(self) -> int:
        """How many rows all splits hold."""

    def change(self, directory: Path) -> bool:
        """Turn the data of a folder into other data under the same names; False: such a source can't change."""
        return False

    def test_covers_every_row_once(self, tmp_path: Path) -> None:
        rows = [key for delivery in self._read(tmp_path, Progress(), self.batch_size) for key in delivery.payload]
        assert len(rows) == self.num_rows()
        assert len(set(rows)) == len(rows)

    def test_discovers_the_same_splits_every_time(self, tmp_path: Path) -> None:
        first, second = self.make(tmp_path).discover(), self.make(tmp_path).discover()
        # A fingerprint may name what is made anew each time, such as a read session.
        assert [(split.id, split.num_rows) for split in first] == [(split.id, split.num_rows) for split in second]
        assert len(first) >= 2

    def test_counts_what_it_covers(self, tmp_path: Path) -> None:
        progress = Progress()
        for delivery in self._read(tmp_path, progress, self.batch_size):
            assert sum(run.rows for run in delivery.provenance.runs) == len(delivery.payload) == delivery.provenance.num_rows
        splits = self.make(tmp_path).discover()
        for split in splits:
            assert split.num_rows is None or progress.done.get(split.id, IntervalSet()) == IntervalSet.of([(0, split.num_rows)])

    def test_resumes_at_any_cut(self, tmp_path: Path) -> None:
        whole = self._by_split([*self._read(tmp_path, Progress(), self.batch_size)])
        for cut in range(0, self.num_rows() // self.batch_size + 1, 3):
            progress = Progress()
            head = self._read(tmp_path, progress, self.batch_size, batches=cut)
            tail = self._read(tmp_path, self._saved(tmp_path, progress), self.batch_size)
            assert self._by_split([*head, *tail]) == whole, f"after {cut} batches"

    def test_resumes_inside_what_was_read_at_once(self, tmp_path: Path) -> None:
        whole = sorted(key for delivery in self._read(tmp_path, Progress(), self.batch_size) for key in delivery.payload)
        progress, rows = Progress(), list[str]()
        while len(rows) < self.num_rows():
            deliveries = self._read(tmp_path, self._saved(tmp_path, progress), self.batch_size // 2, batches=4, into=progress)
            assert deliveries
            rows.extend(key for delivery in deliveries for key in delivery.payload)
        assert sorted(rows) == whole

    def test_changes_the_number_of_ranks(self, tmp_path: Path) -> None:
        """1 -> 2 -> 3 ranks, killed in between; the first rank of two delivers nothing."""
        whole = sorted(key for delivery in self._read(tmp_path, Progress(), self.batch_size) for key in delivery.payload)
        progress, rows, base = Progress(), list[str](), None
        for world_size, batches in ((1, [2]), (2, [0, 3]), (2, [1, 1]), (3, [None, None, None])):
            ranks = []
            for rank, limit in enumerate(batches):
                own = progress.copy()
                ranks.append(own)
                deliveries = self._read(tmp_path, own, self.batch_size - 2, batches=limit, rank=(world_size, rank), base=base)
                rows.extend(key for delivery in deliveries for key in delivery.payload)
            base, _ = plan(self.make(tmp_path).discover(), base, progress.done, world_size, 0)
            progress = Progress.merge([progress, *ranks])
            if None in batches:
                break
        assert sorted(rows) == whole

    def test_shuffles_with_several_readers_over_a_kill(self, tmp_path: Path) -> None:
        """Each row once, in an order of its own, and the resumed run sees the batches that the uninterrupted one would have."""
        with closing(self.make(tmp_path)) as source:
            if not source.bounded:
                return
        plain = [key for delivery in self._read(tmp_path, Progress(), self.batch_size) for key in delivery.payload]
        reading = ReadPlan(2, Shuffle(seed=1, pass_number=0, block_rows=2 * self.batch_size))
        whole = self._read(tmp_path, Progress(), self.batch_size, reading=reading)
        rows = [key for delivery in whole for key in delivery.payload]
        assert sorted(rows) == sorted(plain)
        assert rows != plain
        with closing(self.make(tmp_path)) as source:
            base, _ = plan(source.discover(), None, {}, 1, 0)
        progress = Progress()
        head = self._read(tmp_path, progress, self.batch_size, batches=2, reading=reading)
        tail = self._read(tmp_path, self._saved(tmp_path, progress), self.batch_size, base=base, reading=reading)
        assert [d.payload for d in (*head, *tail)] == [d.payload for d in whole]

    def test_drops_rows_before_the_boundary_and_covers_them(self, tmp_path: Path) -> None:
        if self.time is None:
            return
        source = self.make(tmp_path)
        with closing(source):
            splits = source.discover()
            tables = self._tables(source, splits, None, self.num_rows())
            times = np.concatenate([table.column(self.time).to_numpy() for table, _ in tables])
            keys = [key for table, _ in tables for key in table.column(self.key).to_pylist()]
            boundary = float(np.median(times))
            kept = self._tables(source, splits, boundary, int(np.count_nonzero(times >= boundary)))
        wanted = [key for key, time in zip(keys, times.tolist(), strict=True) if time >= boundary]
        assert 0 < len(wanted) < self.num_rows()
        assert sorted(key for table, _ in kept for key in table.column(self.key).to_pylist()) == sorted(wanted)
        progress = Progress()
        for _, provenance in kept:
            progress.advance(provenance)
        for split in splits:
            assert split.num_rows is None or progress.done.get(split.id, IntervalSet()) == IntervalSet.of([(0, split.num_rows)])

    def test_refuses_what_has_changed(self, tmp_path: Path) -> None:
        source = self.make(tmp_path)
        splits = source.discover()
        states = Progress().to_states(splits)
        source.close()
        source = self.make(tmp_path)
        source.resume(states)
        source.close()
        if not self.change(tmp_path):
            return
        changed = self.make(tmp_path)
        with closing(changed):
            refusal = _refusal(changed, states)
        assert any(split.id.name in refusal for split in splits), refusal or "other data under the same names was accepted"

    def _read(
        self,
        directory: Path,
        progress: Progress,
        batch_size: int,
        *,
        batches: int | None = None,
        rank: tuple[int, int] = (1, 0),
        base: AssignmentBase | None = None,
        into: Progress | None = None,
        reading: ReadPlan | None = None,
    ) -> list[Delivery[list[str]]]:
        """Train (that is: note) up to so many batches from where `progress` stands, as one rank of a new process."""
        source = self.make(directory)
        with closing(source):
            described = [state for state in progress.to_states([]) if state.fingerprint]
            splits = source.resume(described)
            _, assigned = plan(splits, base, progress.done, *rank)
            wanted = None if source.bounded else self._left(directory, splits, assigned, progress)
            loader = Loader(
                source,
                assigned,
                batch_size=batch_size,
                transform=lambda table, size: table.column(self.key).to_pylist(),
                max_wait_s=0.05,
                reading=reading,
            )
            with closing(loader):
                deliveries = []
                for delivery in _take(loader, batches, wanted):
                    (into or progress).advance(delivery.provenance)
                    deliveries.append(delivery)
                trained = into or progress
                parts = ((part.split, trained.done.get(part.split.id, NOTHING)) for part in assigned)
                trained.describe(loader.describe(split, done) for split, done in parts)
                return deliveries

    def _tables(
        self, source: Source, splits: Sequence[Split], boundary: float | None, rows: int
    ) -> list[tuple[pa.Table, Provenance]]:
        """All rows at or after the boundary, read by one rank."""
        _, assigned = plan(splits, None, {}, 1, 0)
        loader = Loader(
            source,
            assigned,
            batch_size=self.batch_size,
            transform=lambda table, size: table,
            max_wait_s=0.05,
            drop_before=boundary,
        )
        with closing(loader):
            return [(d.payload, d.provenance) for d in _take(loader, None, None if source.bounded else rows)]

    def _left(self, directory: Path, splits: Sequence[Split], assigned: Sequence[Assigned], progress: Progress) -> int:
        """How many rows an unbounded source will still give to this rank."""
        raise NotImplementedError("a contract for an unbounded source says how many rows are left")

    def _saved(self, directory: Path, progress: Progress) -> Progress:
        """The progress after a trip through its document."""
        source = self.make(directory)
        with closing(source):
            described = [state for state in progress.to_states([]) if state.fingerprint]
            splits = source.resume(described)
            states = progress.to_states(splits)
        return Progress.from_states(states)

    def _by_split(self, deliveries: Sequence[Delivery[list[str]]]) -> dict[str, list[str]]:
        """Each split's rows in the order they came; a stream's partitions may interleave differently each time."""
        rows: dict[str, list[str]] = {}
        for delivery in deliveries:
            keys = iter(delivery.payload)
            for run in delivery.provenance.runs:
                rows.setdefault(str(run.split), []).extend(next(keys) for _ in range(run.rows))
        return rows


def _refusal(source: Source, states: Sequence[SplitState]) -> str:
    try:
        source.resume(states)
    except SourceChangedError as error:
        return str(error)
    return ""


def _take(loader: Loader[T], batches: int | None, rows: int | None) -> Iterator[Delivery[T]]:
    """Batches until so many batches or rows were given, or all."""
    until = time.monotonic() + _DEADLINE_S
    while (batches is None or batches > 0) and (rows is None or rows > 0):
        assert time.monotonic() < until, f"{rows} rows still missing after {_DEADLINE_S:.0f} s"
        try:
            delivery = loader.take(1.0)
        except EOFError:
            return
        if delivery is not None:
            batches = None if batches is None else batches - 1
            rows = None if rows is None else rows - delivery.provenance.num_rows
            yield delivery


def numbered(start: int, stop: int) -> pa.Table:
    """Rows for a contract: `event_id` e<start> .. e<stop - 1>, `event_time` and `value` the same numbers."""
    numbers = pa.array(range(start, stop), pa.int64())
    event_ids = pa.array([f"e{number}" for number in range(start, stop)], pa.string())
    return pa.table({"event_id": event_ids, "event_time": numbers.cast(pa.float64()), "value": numbers})
