"""What a feed counts as done: the batches that were trained, and what lies before and between them."""

import time
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.data.dead_letters import DeadLetters
from tidemill.data.loader import Loader
from tidemill.data.progress import Progress
from tidemill.data.rebatch import BatchRule
from tidemill.data.split import SplitId
from tidemill.errors import DataError
from tidemill.jobs.feed import DataFeed
from tidemill.testing.scripted_source import Eof, Rows, ScriptedSource
from tidemill.testing.source_contract import numbered

A = SplitId("scripted", "a")
READS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["kept", "dropped", "bad"])), min_size=1, max_size=8)


def numbers(bad):
    def transform(table, size):
        values = table.column("value").to_pylist()
        for row, value in enumerate(values):
            if value in bad:
                raise DataError(f"row {row}: bad")
        return values

    return transform


def feed_of(reads, batch_size):
    """A stream of reads of so many rows each; what becomes of them."""
    script, bad, start = [], set(), 0
    for count, kind in reads:
        script.append(Rows(numbered(start, start + count), event_time=[1.0 if kind == "dropped" else 100.0] * count))
        bad |= set(range(start, start + count)) if kind == "bad" else set()
        start += count
    source = ScriptedSource({"a": [*script, Eof()]}, bounded=False)

    def open_loader(assigned):
        letters = DeadLetters(max_poison=100, window=100)
        return Loader(
            source, assigned, batch_size=batch_size, transform=numbers(bad), drop_before=50.0, dead_letters=letters, depth=8
        )

    return DataFeed(source.discover(), open_loader, rank=0, world_size=1, progress=Progress()), start


@settings(max_examples=60, deadline=None)
@given(READS, st.integers(1, 5), st.integers(0, 4))
def test_what_is_done_of_a_stream_is_all_up_to_some_position(reads, batch_size, in_hand):
    """However many batches are taken ahead of those that are trained: a checkpoint in between loses none of their rows."""
    feed, size = feed_of(reads, batch_size)
    waiting, trained, until = [], [], time.monotonic() + 20
    with closing(feed):
        while True:
            assert time.monotonic() < until
            try:
                delivery = feed.take(1.0)
            except EOFError:
                break
            waiting += [delivery] if delivery else []
            feed.event_time([each.provenance for each in waiting])
            if len(waiting) > in_hand:
                oldest = waiting.pop(0)
                trained += oldest.payload
                feed.trained(oldest.provenance)
            done = feed.progress.done.get(A)
            ends = [stop for _, stop in done.intervals] if done else []
            assert not done or (done.intervals[0][0] == 0 and len(ends) == 1)
            assert not waiting or not ends or ends[0] <= waiting[0].payload[0]
        for delivery in waiting:
            trained += delivery.payload
            feed.trained(delivery.provenance)
        assert feed.progress.done[A].intervals == ((0, size),)
    kinds = [kind for count, kind in reads for _ in range(count)]
    assert trained == [number for number, kind in enumerate(kinds) if kind == "kept"]


def test_behind_its_last_pass_a_run_opens_nothing():
    source, opened = ScriptedSource({"a": [Rows(numbered(0, 3))]}), []

    def open_loader(assigned):
        opened.extend(assigned)
        return Loader(source, assigned, batch_size=2, transform=numbers(set()))

    feed = DataFeed(source.discover(), open_loader, rank=0, world_size=1, progress=Progress(passes=1), num_passes=1)
    with closing(feed):
        assert (opened, feed.rows_left) == ([], 0)


def test_passes_over_nothing_count_as_made():
    """Issue 4, "drop_remainder": rows too few for a batch stay left out, also from a later run with smaller batches."""
    source = ScriptedSource({"a": [Rows(numbered(0, 3))]})
    told = []

    def open_loader(assigned):
        rule = BatchRule(4, drop_remainder=True)
        return Loader(source, assigned, batch_size=4, transform=numbers(()), rule=rule)

    progress = Progress()
    splits = source.discover()
    made = DataFeed(
        splits, open_loader, rank=0, world_size=1, progress=progress, num_passes=5, on_pass=lambda: told.append(progress.passes)
    )
    with closing(made) as feed:
        with pytest.raises(EOFError):
            feed.take(20.0)
        assert feed.next_pass()
        feed.end_passes()
        assert feed.is_complete
        assert told == [1, 2, 3, 4, 5]
    again = DataFeed(splits, open_loader, rank=0, world_size=1, progress=progress, num_passes=5)
    with closing(again) as feed, pytest.raises(EOFError):
        feed.take(20.0)
