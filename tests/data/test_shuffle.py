"""Rows shuffled with a seed, read by several threads: each row once, and a resumed run sees the same batches (DCL 9.1, 9.2)."""

import itertools
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.data.assignment import Assigned, plan
from tidemill.data.blocks import stretches
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.progress import Progress
from tidemill.data.shuffle import Shuffle
from tidemill.data.split import Scatter, Split, SplitId
from tidemill.testing.scripted_source import Abort, Eof, Rows, ScriptedSource
from tidemill.testing.source_contract import numbered

FOREVER = 30.0


def ids(table, size):
    return [int(key[1:]) for key in table.column("event_id").to_pylist()]


def source_of(*files):
    """A file is a list of reads, each of so many rows; ids go on from file to file."""
    number = itertools.count()

    def rows(count):
        numbers = [next(number) for _ in range(count)]
        table = numbered(numbers[0], numbers[-1] + 1)
        return Rows(table, event_time=[float(at) for at in numbers])

    return ScriptedSource({f"file-{i}": [rows(count) for count in reads] for i, reads in enumerate(files)})


class Rank:
    """One rank's life: it reads from where all ranks' progress stands, and trains up to so many batches."""

    def __init__(self, source, progress, base, world, *, shuffle=None, readers=1, batch_size=3, in_order=True, batches=None):
        splits = source.discover()
        if shuffle:
            splits = shuffle.splits(splits)
        self.base, assigned = plan(splits, base, progress.done, *world)
        self.progress = progress.copy()
        self.deliveries = []
        reading = ReadPlan(readers, shuffle, in_order)
        with closing(Loader(source, assigned, batch_size=batch_size, transform=ids, reading=reading, threads=2)) as loader:
            while batches is None or len(self.deliveries) < batches:
                try:
                    delivery = loader.take(FOREVER)
                except EOFError:
                    break
                assert delivery is not None, "nothing came before the deadline"
                self.deliveries.append(delivery)
                self.progress.advance(delivery.provenance)

    @property
    def batches(self):
        return [delivery.payload for delivery in self.deliveries]

    @property
    def ids(self):
        return [row for batch in self.batches for row in batch]


def saved(source, parts):
    """Progress after a trip through the checkpoint's document."""
    return Progress.from_states(Progress.merge(parts).to_states(source.discover()))


def test_shuffled_rows_are_all_there_in_another_order_than_they_lie():
    source = source_of([40], [40], [20])
    shuffle = Shuffle(seed=1, pass_number=0, block_rows=20)
    one, again = (Rank(source, Progress(), None, (1, 0), shuffle=shuffle) for _ in range(2))
    assert one.batches == again.batches
    assert sorted(one.ids) == list(range(100))
    assert one.ids != list(range(100))
    assert [len(batch) for batch in one.batches] == [3] * 33 + [1]


def test_seed_and_pass_change_the_order_of_files_and_rows():
    source = source_of(*[[10]] * 6)
    orders = {
        tuple(Rank(source, Progress(), None, (1, 0), shuffle=Shuffle(seed, number, 12)).ids) for seed in (0, 1) for number in (0, 1)
    }
    assert len(orders) == 4
    splits = [[s.id.name for s in Shuffle(0, number, 12).splits(source.discover())] for number in range(4)]
    assert len({tuple(names) for names in splits}) > 1
    assert all(sorted(names) == sorted(splits[0]) for names in splits)


def test_rows_stay_within_their_block():
    source = source_of([60])
    rank = Rank(source, Progress(), None, (1, 0), shuffle=Shuffle(3, 0, 15), batch_size=15)
    assert [sorted(batch) for batch in rank.batches] == [list(range(start, start + 15)) for start in range(0, 60, 15)]


def test_order_is_the_same_forever():
    """A checkpoint of an earlier version must be resumed in the order that it was trained in."""
    scatter = Scatter((SplitId("parquet", "/a"), SplitId("parquet", "/b")), np.array([0, 0, 0, 1, 1], np.int32), np.arange(5))
    assert Shuffle(7, 2, 8).rows(scatter).tolist() == [2, 0, 1, 3, 4]


SHUFFLES = st.one_of(st.none(), st.integers(0, 9))
FILES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(FILES, st.integers(1, 5), st.integers(1, 3), SHUFFLES, st.integers(1, 4), st.data())
def test_resumed_run_sees_the_same_batches_bitwise(files, batch_size, readers, seed, blocks, data):
    """DCL 9.1, 9.2: any number of kills, as many ranks each time."""
    source, world_size = source_of(*files), data.draw(st.integers(1, 3))
    options = {
        "shuffle": None if seed is None else Shuffle(seed, 0, blocks * batch_size),
        "readers": readers,
        "batch_size": batch_size,
    }
    whole = [Rank(source, Progress(), None, (world_size, rank), **options).batches for rank in range(world_size)]
    seen, progress, base = [[] for _ in range(world_size)], Progress(), None
    for life in range(3):
        cuts = [None if life == 2 else data.draw(st.integers(0, 3)) for _ in range(world_size)]
        ranks = [Rank(source, progress, base, (world_size, rank), batches=cuts[rank], **options) for rank in range(world_size)]
        seen = [old + rank.batches for old, rank in zip(seen, ranks, strict=True)]
        progress, base = saved(source, [rank.progress for rank in ranks]), ranks[0].base
    assert seen == whole


LIVES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, 4), min_size=3, max_size=3)), max_size=4)


@settings(max_examples=25, deadline=None)
@given(FILES, st.integers(1, 5), LIVES, SHUFFLES, st.booleans())
def test_any_kills_worlds_readers_and_orders_train_every_row_once(files, batch_size, lives, seed, in_order):
    """DCL 9.1, 9.2: other numbers of ranks and of readers after each kill, ranks that delivered nothing, any order."""
    source, progress, base, trained = source_of(*files), Progress(), None, []
    for world_size, readers, cuts in [*lives, (2, 2, [None] * 2)]:
        options = {
            "shuffle": None if seed is None else Shuffle(seed, 0, 2 * batch_size),
            "readers": readers,
            "batch_size": batch_size,
            "in_order": in_order,
        }
        ranks = [Rank(source, progress, base, (world_size, rank), batches=cuts[rank], **options) for rank in range(world_size)]
        trained += [row for rank in ranks for row in rank.ids]
        progress, base = saved(source, [rank.progress for rank in ranks]), ranks[0].base
    total = sum(sum(reads) for reads in files)
    assert sorted(trained) == list(range(total))
    assert {split.id: IntervalSet.of([(0, split.num_rows)]) for split in source.discover()} == progress.done


class Slow(ScriptedSource):
    """The reader of one split waits until another one has been read to its end."""

    def __init__(self, scripts, slow):
        super().__init__(scripts)
        self.slow, self.others = slow, threading.Event()

    def open(self, split, remaining, done):
        if split.id.name == self.slow:
            assert self.others.wait(FOREVER)
        return super().open(split, remaining, done)


def test_slow_reader_holds_nothing_back_without_order():
    """DCL 9.2: in_order off, one reader slowed, a shuffle buffer of 5 batches; each row once over a kill."""
    plain = source_of([30], [30])
    scripts = {split.name: script for split, script in plain._scripts.items()}
    source = Slow(scripts, "file-0")
    shuffle = Shuffle(5, 0, 15)
    done = []

    def release(table, size):
        done.extend(ids(table, size))
        if len(done) >= 24:
            source.others.set()
        return ids(table, size)

    _, assigned = plan(source.discover(), None, {}, 1, 0)
    reading = ReadPlan(2, shuffle, in_order=False)
    progress, first = Progress(), []
    with closing(Loader(source, assigned, batch_size=3, transform=release, reading=reading, threads=3)) as loader:
        for _ in range(14):
            delivery = loader.take(FOREVER)
            first += delivery.payload
            progress.advance(delivery.provenance)
    assert all(row >= 30 for row in first[:24])
    rest = Rank(plain, saved(plain, [progress]), None, (1, 0), shuffle=shuffle, readers=2)
    assert sorted(first + rest.ids) == list(range(60))


def test_readers_read_different_stretches_at_the_same_time():
    meeting = threading.Barrier(3, timeout=FOREVER)

    class Meeting(ScriptedSource):
        def open(self, split, remaining, done):
            meeting.wait()
            return super().open(split, remaining, done)

    plain = source_of([9], [9], [9])
    source = Meeting({split.name: script for split, script in plain._scripts.items()})
    rank = Rank(source, Progress(), None, (1, 0), readers=3)
    assert rank.batches[:4] == [[0, 1, 2], [9, 10, 11], [18, 19, 20], [3, 4, 5]]


def test_readers_error_comes_in_its_place_and_stays():
    plain = source_of([6], [3, 3], [6])
    scripts = {split.name: script for split, script in plain._scripts.items()}
    source = ScriptedSource({**scripts, "file-1": [scripts["file-1"][0], Abort(OSError("disk")), scripts["file-1"][1]]})
    _, assigned = plan(source.discover(), None, {}, 1, 0)
    with closing(Loader(source, assigned, batch_size=2, transform=ids, reading=ReadPlan(3))) as loader:
        assert [loader.take(FOREVER).payload for _ in range(3)] == [[0, 1], [6, 7], [12, 13]]
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                loader.take(FOREVER)


class Broken(ScriptedSource):
    """Fails where it is told to."""

    def __init__(self, where, scripts):
        super().__init__(scripts)
        self.where = where

    def open(self, split, remaining, done):
        if self.where == "open":
            raise OSError("broken")
        reader = super().open(split, remaining, done)
        if self.where == "exit":
            reader.read = self.leave
        if self.where == "close":
            reader.close = self.fail
        return reader

    def fail(self):
        raise OSError("broken")

    def leave(self, timeout_s):
        raise SystemExit("broken")


def take_all(loader):
    while True:
        assert loader.take(FOREVER) is not None, "nothing came before the deadline"


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("shuffle", [None, Shuffle(0, 0, 4)])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("where", ["open", "exit", "close", "transform"])
def test_no_error_leaves_the_loader_hanging(where, in_order, shuffle, readers):
    """Whatever breaks, in whatever thread: take raises it, again and again, and close returns."""
    plain = source_of([6], [6], [6])
    source = Broken(where, {split.name: script for split, script in plain._scripts.items()})

    def transform(table, size):
        if where == "transform":
            raise SystemExit("broken")
        return ids(table, size)

    _, assigned = plan(source.discover(), None, {}, 1, 0)
    loader = Loader(
        source, assigned, batch_size=2, transform=transform, reading=ReadPlan(readers, shuffle, in_order), threads=2, depth=3
    )
    with closing(loader):
        for _ in range(2):
            with pytest.raises((OSError, SystemExit), match="broken"):
                take_all(loader)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def test_a_stream_keeps_its_order_whatever_the_plan_says():
    release = threading.Event()

    def first_is_slow(table, size):
        if ids(table, size)[0] == 0:
            assert release.wait(FOREVER)
        else:
            release.set()
        return ids(table, size)

    plain = source_of([6])
    source = ScriptedSource({split.name: [*script, Eof()] for split, script in plain._scripts.items()}, bounded=False)
    _, assigned = plan(source.discover(), None, {}, 1, 0)
    reading = ReadPlan(4, Shuffle(0, 0, 4), in_order=False)
    with closing(Loader(source, assigned, batch_size=2, transform=first_is_slow, reading=reading, threads=2)) as loader:
        assert loader.keeps_order
        assert [loader.take(FOREVER).payload for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_provenance_of_a_shuffled_batch_tells_rows_times_and_places():
    source = source_of([10], [10])
    rank = Rank(source, Progress(), None, (1, 0), shuffle=Shuffle(2, 0, 20), batch_size=8)
    first_of = {f"file-{i}": 10 * i for i in range(2)}
    for delivery in rank.deliveries:
        provenance = delivery.provenance
        for row, number in enumerate(delivery.payload):
            split, position = provenance.locate(row)
            assert first_of[split.name] + position == number
        with pytest.raises(IndexError):
            provenance.locate(len(delivery.payload))
        parts = list(provenance.parts())
        assert sum(count for _, count, _ in parts) == len(delivery.payload)
        assert max(time for _, _, time in parts) == max(delivery.payload)
        assert provenance.event_time.tolist() == delivery.payload


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 20))
def test_stretches_share_out_the_whole_share_whatever_is_left(sizes, count, trained):
    splits = [Split(SplitId("t", str(i)), size) for i, size in enumerate(sizes)]
    shares = [IntervalSet.of([(0, size)]) for size in sizes]
    assigned = [
        Assigned(split, share - share.slice(0, trained), NOTHING, share)
        for split, share in zip(splits, shares, strict=True)
        if share
    ]
    parts = stretches(assigned, count)
    counts = [sum(part.whole.count() for part in stretch) for stretch in parts]
    assert len(parts) == count
    assert max(counts) - min(counts) <= 1
    for split, share in zip(splits, shares, strict=True):
        dealt = [part for stretch in parts for part in stretch if part.split == split]
        assert IntervalSet.of(pair for part in dealt for pair in part.whole) == share
        assert sum(part.whole.count() for part in dealt) == share.count()
        assert IntervalSet.of(pair for part in dealt for pair in part.remaining) == share - share.slice(0, trained)
