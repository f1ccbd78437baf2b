"""A run's data: source, assignment, loader, progress and watermark behind the one seam that the training loop knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.contracts.progress import SplitState
from tidemill.data.assignment import Assigned, AssignmentBase, Done, plan
from tidemill.data.intervals import NOTHING
from tidemill.data.loader import Loader, RowCounts
from tidemill.data.progress import Progress
from tidemill.data.split import Delivery, Provenance, Split, SplitId
from tidemill.data.watermark import Watermark

if TYPE_CHECKING:
    from tidemill.features.batch import Batch


class DataFeed:
    """Batches pass by pass, and what has been trained of them (`training.loop.Feed`). Belongs to the training thread."""

    def __init__(
        self,
        splits: Sequence[Split],
        open_loader: Callable[[list[Assigned]], Loader[Batch]],
        *,
        rank: int,
        world_size: int,
        progress: Progress,
        base: AssignmentBase | None = None,
        watermark: float | None = None,
        num_passes: int | None = 1,
        on_pass: Callable[[], None] = lambda: None,
        order: Callable[[Sequence[Split], int], Sequence[Split]] = lambda splits, number: splits,
        commit: Callable[[Done], None] = lambda done: None,
        renew: Callable[[Sequence[Split]], list[Split]] = list,
        patience_s: float = 15.0,
    ) -> None:
        """`progress`: of all ranks, as restored. `num_passes` None: as many as it takes. `on_pass`: called after each. `order`:
        (splits, passes before this one) -> the splits in the order in which this pass deals them out. `commit` (`Source.commit`)
        is told what was done of this rank's splits at each committed checkpoint. `renew`: the splits for one more pass; all ranks
        call it.

        `patience_s`: how long each batch of a bounded source is waited for. Which ranks' batches meet in a step would otherwise
        depend on which reader was faster, and a resumed run would not repeat an uninterrupted one. All of a round together must
        stay well below the collectives' timeout.
        """
        self._splits = list(splits)
        self._order = order
        self._commit = commit
        self._renew = renew
        self._saved: Done = {}
        self._num_taken = self._num_trained = 0
        # Positions without rows, each behind so many of the batches that were taken.
        self._covered: deque[tuple[int, Provenance]] = deque()
        self._counted = False
        self._earlier_counts = RowCounts()
        self._open_loader = open_loader
        self._rank = rank
        self._world_size = world_size
        self._num_passes = num_passes
        self._on_pass = on_pass
        self._bounded = all(split.num_rows is not None for split in splits)
        self._patience_s = patience_s if self._bounded else 0.0
        self.progress = progress
        self._watermark_value = watermark
        self._newest_arrival: float | None = None
        self._open(base)

    @property
    def base(self) -> AssignmentBase:
        """What the assignment was computed from; belongs in every checkpoint."""
        return self._base

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run has made all passes."""
        return self._num_passes is not None and self.progress.passes >= self._num_passes

    @property
    def counts(self) -> RowCounts:
        """Rows read by this rank so far, in all passes."""
        return self._earlier_counts + self._loader.counts

    @property
    def batches_in_hand(self) -> int:
        """How many batches are ready to be trained; 0 time after time: the trainer waits for data."""
        return self._loader.in_hand

    @property
    def partition_times(self) -> dict[SplitId, float | None]:
        """The largest event time trained of each of this rank's partitions, which rows should no longer lie below; none of a
        bounded source, whose files are many and end."""
        if self._bounded:
            return {}
        return {split: self.progress.max_event_time.get(split) for split in self._partitions}

    @property
    def idle_partitions(self) -> list[SplitId]:
        """This rank's partitions that have been silent for so long that they don't hold back the watermark."""
        return [split for split in self._partitions if self._loader.idle(split)]

    def take(self, timeout_s: float) -> Delivery[Batch] | None:
        if self.is_complete:
            raise EOFError
        try:
            delivery = self._loader.take(max(timeout_s, self._patience_s))
            self._num_taken += delivery is not None
            return delivery
        finally:
            self._learn()

    def trained(self, provenance: Provenance) -> None:
        self._num_trained += 1
        self.progress.advance(provenance)
        self._cover()
        self._watermark.advance(provenance)
        arrival = provenance.newest_arrival
        if arrival is not None and (self._newest_arrival is None or arrival > self._newest_arrival):
            self._newest_arrival = arrival

    def take_newest_arrival(self) -> float | None:
        """When the newest of the rows trained since the last call had arrived at the broker; None if no row says."""
        newest, self._newest_arrival = self._newest_arrival, None
        return newest

    def event_time(self, pending: Sequence[Provenance]) -> tuple[float | None, bool]:
        self._learn()
        value, abstains = self._watermark.report(pending, self._loader.idle)
        self._watermark_value = value
        return value, abstains

    @property
    def rows_left(self) -> int | None:
        """Rows of this rank's share of the pass as it began; None for a stream."""
        return self._rows_left

    @property
    def trained_event_time(self) -> float | None:
        """The least, over this rank's partitions, of the largest event time trained; None while one of them has none."""
        times = [self.progress.max_event_time.get(split) for split in self._partitions]
        known = [time for time in times if time is not None]
        return min(known) if known and len(known) == len(times) else None

    def end_pass(self) -> None:
        """Called on all ranks once they have trained the last batches of the pass: what is saved from here on counts it."""
        if self._bounded and not self._counted and not self.is_complete:
            self._counted = True
            self.progress.complete_pass()
            self._base = AssignmentBase(self._world_size, (), {})
            self._on_pass()

    def end_passes(self) -> None:
        """Called on all ranks when a pass had nothing to train: nor would those that are left, so all count as made. Otherwise the
        job would not be over, and a later run with other batches would train what this one had left out."""
        self.end_pass()
        while self._bounded and self._num_passes is not None and not self.is_complete:
            self.progress.complete_pass()
            self._on_pass()

    def next_pass(self) -> bool:
        """Called on all ranks when everything was read; all of them get the same answer."""
        self.end_pass()
        if not self._bounded or self.is_complete:
            return False
        self._earlier_counts = self.counts
        self._loader.close()
        self._splits = self._renew(self._splits)
        self._open(None)
        return True

    def states(self) -> list[SplitState]:
        """Progress of every split as this rank knows it, and what the next run needs to know of it."""
        done = self.progress.done
        return self.progress.to_states([self._loader.describe(split, done.get(split.id, NOTHING)) for split in self._splits])

    def positions(self) -> list[SplitState]:
        """Progress of every split as this rank knows it, and no more."""
        return self.progress.to_states([replace(split, fingerprint={}) for split in self._splits])

    def saving(self) -> None:
        """A checkpoint of what is done now begins."""
        self._saved = {split: self.progress.done[split] for split in self._partitions if split in self.progress.done}

    def committed(self) -> None:
        """The checkpoint that began last is committed."""
        self._commit(self._saved)

    def close(self) -> None:
        self._loader.close()

    def _learn(self) -> None:
        """Take what the loader knows besides batches: new partitions, and positions that no batch will come for."""
        for split in self._loader.take_found():
            self._splits.append(split)
            self._partitions.append(split.id)
            self._watermark.add(split.id)
        if not self._bounded:
            self._covered.append((self._num_taken, self._loader.take_covered()))
            self._cover()

    def _cover(self) -> None:
        """Advance by the positions without rows whose batches before them are all trained."""
        while self._covered and self._covered[0][0] <= self._num_trained:
            self.progress.advance(self._covered.popleft()[1])

    def _open(self, base: AssignmentBase | None) -> None:
        splits = self._order(self._splits, self.progress.passes)
        self._counted = False
        self._base, assigned = plan(splits, base, self.progress.done, self._world_size, self._rank)
        # After its last pass a run reads nothing more, not even ahead.
        assigned = [] if self.is_complete else assigned
        self._partitions = [part.split.id for part in assigned if not part.is_finished]
        left = [part.remaining.count() for part in assigned if part.remaining is not None]
        self._rows_left = sum(left) if self._bounded else None
        self._loader = self._open_loader(assigned)
        self._watermark = Watermark(
            self._partitions,
            reached=self.progress.max_event_time,
            value=self._watermark_value,
            left={part.split.id: part.remaining.count() for part in assigned if part.remaining is not None},
            in_order=self._loader.keeps_order,
        )
