"""The loader: batch boundaries, linger, errors, idleness, the boundary rule."""

import itertools
import json
import threading
import time
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.clock import ManualClock
from tidemill.data.assignment import AssignmentBase, plan
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.progress import Progress
from tidemill.data.split import SplitId
from tidemill.errors import DeadlineError
from tidemill.testing.scripted_source import Abort, Eof, Idle, Rows, ScriptedSource
from tidemill.testing.source_contract import numbered

FOREVER = 20.0


def rows(start, stop, **times):
    return Rows(numbered(start, stop), **times)


def ids(table, size):
    return [int(key[1:]) for key in table.column("event_id").to_pylist()]


@contextmanager
def loading(source, *, progress=None, **options):
    options = {"batch_size": 4, "transform": ids, **options}
    splits = source.discover()
    _, assigned = plan(splits, None, (progress or Progress()).done, 1, 0)
    with closing(Loader(source, assigned, **options)) as loader:
        yield loader


def drain(loader):
    taken = []
    while True:
        try:
            delivery = loader.take(FOREVER)
        except EOFError:
            return taken
        assert delivery is not None, "nothing came before the deadline"
        taken.append(delivery)


def test_batches_are_full_across_splits_and_reads_and_the_last_is_short():
    source = ScriptedSource({"a": [rows(0, 3), rows(3, 5)], "b": [rows(5, 11)]})
    with loading(source) as loader:
        assert [d.payload for d in drain(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_end_stays_the_end():
    with loading(ScriptedSource({"a": [rows(0, 1)]})) as loader:
        drain(loader)
        with pytest.raises(EOFError):
            loader.take(0)


def test_bounded_source_never_cuts_early_however_slow():
    clock = ManualClock()
    source = ScriptedSource({"a": [rows(0, 3), Idle(1000), rows(3, 6)]}, clock=clock)
    with loading(source, max_wait_s=1, clock=clock) as loader:
        assert [d.payload for d in drain(loader)] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("cut", range(4))
def test_resumed_run_sees_the_same_batches(cut):
    source = ScriptedSource({"a": [rows(0, 6)], "b": [rows(6, 7)], "c": [rows(7, 14)]})
    with loading(source) as loader:
        whole = [d.payload for d in drain(loader)]
    progress = Progress()
    with loading(source) as loader:
        for _ in range(cut):
            progress.advance(loader.take(FOREVER).provenance)
    with loading(source, progress=progress) as loader:
        assert [d.payload for d in drain(loader)] == whole[cut:]


LIVES = st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 4), min_size=3, max_size=3)), max_size=4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4), st.integers(1, 6), LIVES)
def test_any_kills_and_worlds_train_every_row_once(reads, batch_size, lives):
    """DCL 9.1. Each life: how many ranks, and after how many batches each of them is killed; the last one runs to the end."""
    number = itertools.count()
    scripts = {f"s{i}": [rows(start := next(number) * 10, start + size) for size in sizes] for i, sizes in enumerate(reads)}
    source, progress, base, trained = ScriptedSource(scripts), Progress(), None, []
    for world_size, killed_after in [*lives, (2, [None] * 2)]:
        parts = [progress]
        for rank in range(world_size):
            own, deliveries = live(source, progress, base, (world_size, rank), batch_size, killed_after[rank])
            parts.append(own)
            trained += [key for delivery in deliveries for key in delivery.payload]
        base, _ = plan(source.discover(), base, progress.done, world_size, 0)
        progress = Progress.from_states(Progress.merge(parts).to_states(source.discover()))
    assert sorted(trained) == sorted(key for script in scripts.values() for event in script for key in ids(event.table, 0))


def live(source, progress, base, rank, batch_size, killed_after):
    """One rank's life: what it trained, on top of what was trained before."""
    own = progress.copy()
    _, assigned = plan(source.discover(), base, progress.done, *rank)
    deliveries = []
    with closing(Loader(source, assigned, batch_size=batch_size, transform=ids)) as loader:
        while killed_after is None or len(deliveries) < killed_after:
            try:
                deliveries.append(loader.take(FOREVER))
            except EOFError:
                break
            own.advance(deliveries[-1].provenance)
    return own, deliveries


@pytest.mark.parametrize("cuts", [(1, 1), (0, 2), (2, 0), (3, 1)])
def test_ranks_resume_with_their_own_rows_in_the_same_batches(cuts):
    source = ScriptedSource({"a": [rows(0, 13)], "b": [rows(13, 29)], "c": [rows(29, 31)]})
    whole = [[d.payload for d in live(source, Progress(), None, (2, rank), 4, None)[1]] for rank in range(2)]
    base, _ = plan(source.discover(), None, {}, 2, 0)
    base = AssignmentBase.from_json(json.loads(json.dumps(base.to_json())))
    progress = Progress.merge([live(source, Progress(), None, (2, rank), 4, cuts[rank])[0] for rank in range(2)])
    rest = [[d.payload for d in live(source, progress, base, (2, rank), 4, None)[1]] for rank in range(2)]
    assert rest == [batches[cut:] for batches, cut in zip(whole, cuts, strict=True)]


def test_partial_batch_of_a_stream_goes_out_after_its_wait():
    """DCL 9.7."""
    clock = ManualClock()
    started = clock.monotonic()
    source = ScriptedSource({"a": [rows(0, 5), Idle(0.5), rows(5, 6), Idle(3), rows(6, 7), Eof()]}, bounded=False, clock=clock)
    with loading(source, max_wait_s=1, clock=clock) as loader:
        assert [d.payload for d in drain(loader)] == [[0, 1, 2, 3], [4, 5], [6]]
    assert clock.monotonic() - started == pytest.approx(3.5, abs=0.1)


def test_full_batch_of_a_stream_doesnt_wait():
    with loading(ScriptedSource({"a": [rows(0, 4)]}, bounded=False), max_wait_s=FOREVER) as loader:
        assert loader.take(FOREVER).payload == [0, 1, 2, 3]


def test_backlog_gives_full_batches_though_the_trainer_is_slow():
    """While the queue is full the partial batch grows old; what fills it is there to be read."""
    clock = ManualClock()
    source = ScriptedSource({"a": [rows(i, i + 6) for i in range(0, 60, 6)] + [Eof()]}, bounded=False)
    with loading(source, depth=1, max_wait_s=1, clock=clock) as loader:
        sizes = []
        for delivery in iter(lambda: loader.take(FOREVER), None):
            sizes.append(len(delivery.payload))
            clock.advance(10)
            if sum(sizes) == 60:
                break
    assert sizes == [4] * 15


def test_silence_gives_none_and_no_partitions_give_none():
    with loading(ScriptedSource({"a": []}, bounded=False)) as loader:
        assert loader.take(0.01) is None
    with closing(Loader(ScriptedSource({}, bounded=False), [], batch_size=4, transform=ids)) as loader:
        assert loader.take(0.01) is None


def test_partitions_take_turns():
    source = ScriptedSource({"a": [rows(i, i + 2) for i in range(0, 20, 2)], "b": [rows(100, 102)]}, bounded=False)
    with loading(source) as loader:
        assert loader.take(FOREVER).payload == [0, 1, 100, 101]


def test_reading_error_comes_after_the_batches_before_it_and_stays():
    source = ScriptedSource({"a": [rows(0, 9), Abort(OSError("disk")), rows(9, 12)]})
    progress = Progress()
    with loading(source) as loader:
        for expected in ([0, 1, 2, 3], [4, 5, 6, 7]):
            delivery = loader.take(FOREVER)
            assert delivery.payload == expected
            progress.advance(delivery.provenance)
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                loader.take(FOREVER)
    with loading(source, progress=progress) as loader:
        assert [d.payload for d in drain(loader)] == [[8, 9, 10, 11]]


def test_transform_error_comes_in_its_place():
    def picky(table, size):
        if "e5" in table.column("event_id").to_pylist():
            raise ValueError("row 5")
        return ids(table, size)

    with loading(ScriptedSource({"a": [rows(0, 12)]}), transform=picky, threads=3) as loader:
        assert loader.take(FOREVER).payload == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="row 5"):
            loader.take(FOREVER)


def test_order_holds_with_many_transforming_threads():
    release = threading.Event()

    def first_is_slow(table, size):
        if table.column("event_id")[0].as_py() == "e0":
            release.wait(FOREVER)
        else:
            release.set()
        return ids(table, size)

    with loading(ScriptedSource({"a": [rows(0, 40)]}), transform=first_is_slow, threads=3) as loader:
        assert [d.payload[0] for d in drain(loader)] == list(range(0, 40, 4))


def test_a_stream_is_in_order_whatever_is_asked_for():
    """What is trained of a partition is all up to some position: there a resumed run begins."""
    gate = threading.Event()

    def first_waits(table, size):
        if ids(table, size)[0] == 0:
            assert gate.wait(FOREVER)
        return ids(table, size)

    source = ScriptedSource({"a": [rows(0, 8), Eof()]}, bounded=False)
    with loading(source, transform=first_waits, threads=2, reading=ReadPlan(in_order=False)) as loader:
        assert loader.take(0.2) is None
        gate.set()
        assert [d.payload for d in drain(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_reads_no_further_ahead_than_depth():
    cut = []

    def noting(table, size):
        cut.append(1)
        return ids(table, size)

    with loading(ScriptedSource({"a": [rows(i, i + 4) for i in range(0, 400, 4)]}), depth=2, transform=noting) as loader:
        loader.take(FOREVER)
        loader.take(FOREVER)
        assert len(cut) <= 4


def test_rows_before_the_boundary_are_dropped_counted_and_covered():
    times = [10.0, 99.0, 100.0, 101.0, 50.0, 102.0, float("nan"), 3.0]
    source = ScriptedSource({"a": [rows(0, 8, event_time=times)]})
    with loading(source, drop_before=100.0) as loader:
        [delivery] = drain(loader)
        assert loader.counts.dropped == 4
        assert loader.counts.read == 8
    assert delivery.payload == [2, 3, 5, 6]
    progress = Progress()
    progress.advance(delivery.provenance)
    assert progress.done[SplitId("scripted", "a")].intervals == ((0, 8),)
    assert max(run.event_time for run in delivery.provenance.runs if run.event_time == run.event_time) == 102.0


def test_future_times_leave_their_rows_but_dont_hide_the_others():
    clock = ManualClock(time=1_000.0)
    source = ScriptedSource({"a": [rows(0, 3, event_time=[900.0, 5_000.0, 950.0])]}, clock=clock)
    with loading(source, max_future_s=60, clock=clock) as loader:
        [delivery] = drain(loader)
        assert loader.counts.refused_times == 1
    assert delivery.payload == [0, 1, 2]
    assert [run.event_time for run in delivery.provenance.runs] == [950.0]


def test_newest_arrival_is_that_of_the_batch():
    source = ScriptedSource({"a": [rows(0, 6, arrived_at=[1.0, 5.0, 2.0, 3.0, 9.0, 8.0])]})
    with loading(source) as loader:
        assert [d.provenance.newest_arrival for d in drain(loader)] == [5.0, 9.0]


def test_partition_is_idle_after_silence_but_not_with_rows_in_the_queue():
    clock = ManualClock()
    a, b = SplitId("scripted", "a"), SplitId("scripted", "b")
    source = ScriptedSource({"a": [rows(0, 4)], "b": []}, bounded=False, clock=ManualClock())
    with loading(source, idle_timeout_s=10, clock=clock) as loader:
        assert not loader.idle(b)
        while not loader.in_hand:
            pass
        clock.advance(11)
        assert (loader.idle(a), loader.idle(b)) == (False, True)
        loader.take(FOREVER)
        assert loader.idle(a)


def test_waiting_for_the_trainer_doesnt_make_a_partition_idle():
    clock = ManualClock()
    a = SplitId("scripted", "a")
    source = ScriptedSource({"a": [rows(0, 4)], "b": [rows(i, i + 4) for i in range(4, 40, 4)]}, bounded=False)
    with loading(source, idle_timeout_s=10, depth=1, clock=clock) as loader:
        assert loader.take(FOREVER).payload == [0, 1, 2, 3]
        while not (loader.in_hand and loader.counts.read >= 12):
            pass
        # The reader holds one batch more than the queue takes, so its time stands still.
        clock.advance(1000)
        assert not loader.idle(a)


def test_rows_dropped_in_a_silent_stream_are_covered_without_a_batch():
    """What lies before the boundary isn't read again by every run that resumes, though no later row is ever trained."""
    times = [float(number) for number in range(10)]
    source = ScriptedSource({"a": [rows(0, 10, event_time=times)], "b": []}, bounded=False)
    with loading(source, drop_before=100.0) as loader:
        progress = Progress()
        deadline = time.monotonic() + FOREVER
        while not progress.done:
            assert loader.take(0.01) is None
            assert time.monotonic() < deadline
            progress.advance(loader.take_covered())
        assert progress.done[SplitId("scripted", "a")].intervals == ((0, 10),)
        assert loader.take_covered().runs == ()
        assert loader.counts.dropped == 10


def test_dropped_rows_at_the_end_of_a_stream_that_ends_are_covered():
    source = ScriptedSource({"a": [rows(0, 4, event_time=[100.0] * 4), rows(4, 6, event_time=[0.0, 0.0]), Eof()]}, bounded=False)
    with loading(source, drop_before=50.0) as loader:
        progress = Progress()
        for delivery in drain(loader):
            progress.advance(delivery.provenance)
        progress.advance(loader.take_covered())
        assert progress.done[SplitId("scripted", "a")].intervals == ((0, 6),)


def test_bounded_split_is_never_idle():
    clock = ManualClock()
    with loading(ScriptedSource({"a": [rows(0, 4)]}, clock=clock), clock=clock) as loader:
        drain(loader)
        clock.advance(1e6)
        assert not loader.idle(SplitId("scripted", "a"))


def test_close_names_a_thread_that_doesnt_stop():
    started, release = threading.Event(), threading.Event()

    def stuck(table, size):
        started.set()
        release.wait(FOREVER)

    source = ScriptedSource({"a": [rows(0, 4)]})
    _, assigned = plan(source.discover(), None, {}, 1, 0)
    loader = Loader(source, assigned, batch_size=4, transform=stuck)
    try:
        assert started.wait(FOREVER)
        with pytest.raises(DeadlineError, match="loader-transform-0"):
            loader.close(deadline_s=0.05)
    finally:
        release.set()
        loader.close()


def test_close_ends_a_loader_that_waits_for_the_trainer():
    with loading(ScriptedSource({"a": [rows(0, 400)]}), depth=1) as loader:
        loader.take(FOREVER)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]
