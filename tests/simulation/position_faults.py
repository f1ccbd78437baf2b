"""Faults in what a position is taken for, put into the product on purpose: the simulation must find each of them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from tests.simulation.faults import within
from tidemill.data import assignment
from tidemill.data.intervals import IntervalSet
from tidemill.data.progress import Progress
from tidemill.data.rebatch import Rebatcher
from tidemill.data.watermark import Watermark


@within(60)
def a_cursor_moves_past_unread_rows():
    """Rows in hand are trained, the gap before them isn't read yet: "all up to here" says that it was."""
    advance = Progress.advance

    def as_a_cursor(self, provenance):
        advance(self, provenance)
        for split in {split for split, _, _ in provenance.parts()}:
            self._done[split] = IntervalSet.of([(0, self.done[split].intervals[-1][1])])

    return patch.object(Progress, "advance", as_a_cursor)


@within(150)
def a_resumed_reader_skips_the_gap_before_what_is_done():
    """The positions are right, and the reader goes on behind the last of them."""
    plan = assignment.plan

    def behind(*args):
        base, assigned = plan(*args)
        return base, [replace(part, remaining=_behind(part)) for part in assigned]

    return patch("tidemill.jobs.feed.plan", behind)


def _behind(part):
    mine = part.remaining and part.whole and part.whole & part.done
    return part.remaining - IntervalSet.of([(0, mine.intervals[-1][1])]) if mine else part.remaining


@within(60)
def single_unread_rows_are_joined_over():
    of = IntervalSet.of
    return patch.object(IntervalSet, "of", classmethod(lambda cls, intervals: _joined(of(intervals))))


def _joined(rows):
    joined: list[tuple[int, int]] = []
    for start, stop in rows:
        if joined and start == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return IntervalSet(tuple(joined))


@within(60)
def what_is_done_is_dealt_again_to_another_number_of_ranks():
    plan = assignment.plan

    def forgetful(splits, base, progress, world_size, rank):
        is_dealt_anew = base is not None and base.world_size != world_size
        return plan(splits, base, {} if is_dealt_anew else progress, world_size, rank)

    return patch("tidemill.jobs.feed.plan", forgetful)


@within(60)
def a_partition_is_read_by_two_ranks():
    owner = assignment.owner
    return patch.object(assignment, "owner", lambda split, size: 0 if size == 3 and owner(split, 3) == 1 else owner(split, size))


@within(60)
def the_leftover_of_a_batch_is_forgotten():
    """What was read together with a batch's last row, and lies behind it, counts as done with the batch, and isn't trained."""
    cut = Rebatcher.cut

    def forgetful(self, size):
        table, provenance = cut(self, size)
        rest = self._pieces.popleft()[0] if self._pieces and size < self._rule.size + self.num_rows else None
        if rest is None or rest.scatter is not None:
            return table, provenance
        self.num_rows -= rest.num_rows
        self._costs = self._costs[rest.num_rows :]
        return table, replace(
            provenance, runs=(*provenance.runs, *(replace(run, rows=0, gap=run.stop - run.start) for run in rest.runs))
        )

    return patch.object(Rebatcher, "cut", forgetful)


@within(120)
def the_rest_at_the_end_is_left_out():
    """As if drop_remainder had been asked for, and the rows count as done."""
    full_sizes = Rebatcher.full_sizes

    def lossy(self, *, is_end):
        sizes = full_sizes(self, is_end=is_end)
        return sizes[:-1] if is_end and sizes and sizes[-1] < self._rule.size else sizes

    return patch.object(Rebatcher, "full_sizes", lossy)


@within(60)
def the_watermark_is_ahead_of_a_silent_partition():
    return patch("tidemill.data.loader.Loader.idle", lambda self, split: True)


@within(120)
def the_watermark_leaves_out_partitions_without_a_row():
    report = Watermark.report

    def ahead(self, pending, idle):
        return report(self, pending, lambda split: idle(split) or self._reached[split] != self._reached[split])

    return patch.object(Watermark, "report", ahead)
