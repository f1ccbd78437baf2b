"""What fills a batch: rows, cost, remainders (DCL 9.10, 9.11)."""

import itertools
import logging
import math
from contextlib import closing

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cadence import NO_BATCH, RankReport, StopReason, agree
from tidemill.data.assignment import assign, plan
from tidemill.data.blocks import shuffled
from tidemill.data.loader import Loader
from tidemill.data.rebatch import BatchRule, Rebatcher
from tidemill.data.shuffle import Shuffle
from tidemill.data.split import RawBatch, Run, Split, SplitId
from tidemill.errors import DataError, SchemaError
from tidemill.testing.scripted_source import Idle, Rows, ScriptedSource

FILE = SplitId("scripted", "a")
LIMIT = 9


def cost_of(row):
    """Some rows alone cost more than a batch may."""
    return 20 if row % 11 == 5 else row * 7 % 5


def table(rows):
    return pa.table({"row": pa.array(rows, pa.int64()), "cost": pa.array([cost_of(row) for row in rows], pa.int64())})


def raw(start, stop):
    return RawBatch(table(range(start, stop)), (Run(FILE, start, stop, stop - start),))


def batches_of(rows, rule, reads):
    """What a rank delivers of a contiguous stretch that is read so many rows at once."""
    rebatcher, batches = Rebatcher(rule), []
    for start in range(rows.start, rows.stop, reads):
        rebatcher.add(raw(start, min(start + reads, rows.stop)), at=0.0)
        batches += [rebatcher.cut(size) for size in rebatcher.full_sizes(is_end=False)]
    return batches + [rebatcher.cut(size) for size in rebatcher.full_sizes(is_end=True)]


def steps_of(ranks):
    """How many steps each rank takes with those batches: in lockstep, as the loop agrees on them."""
    at, steps, number = [0] * len(ranks), 0, 0
    while True:
        left = [batches[index:] for batches, index in zip(ranks, at, strict=True)]
        reports = [
            RankReport(
                event_time=None,
                abstains=True,
                stop=StopReason.NONE if batches else StopReason.EXHAUSTED,
                writer_ready=True,
                weights=(float(batches[0]) if batches else NO_BATCH,),
            )
            for batches in left
        ]
        point = agree(reports, number=number, first_step=steps, share=1.0, watermark=None, max_steps=1)
        if point.stop is StopReason.EXHAUSTED:
            return steps
        steps, number = point.last_step, number + 1
        at = [index + bool(batches) for index, batches in zip(at, left, strict=True)]


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_all_ranks_take_the_same_number_of_steps(world_size, by_cost, drop_remainder):
    """DCL 9.10: every number of rows up to 40 and batch size up to 7. No batch is empty, none is lost."""
    for num_rows, size in itertools.product(range(41), range(1, 8)):
        rule = BatchRule(size, "cost" if by_cost else "", LIMIT if by_cost else math.inf, drop_remainder)
        split = Split(FILE, num_rows)
        shares = [[pair for part in assign([split], {}, world_size, rank) for pair in part.remaining] for rank in range(world_size)]
        ranks = [batches_of(range(*share[0]), rule, reads=5) if share else [] for share in shares]
        sizes = [[provenance.num_rows for _, provenance in batches] for batches in ranks]
        assert all(0 < count <= size for counts in sizes for count in counts)
        assert steps_of(sizes) == max(map(len, sizes))
        for share, batches in zip(shares, ranks, strict=True):
            rows = [row for rows, _ in batches for row in rows.column("row").to_pylist()]
            whole = list(range(*share[0])) if share else []
            assert rows == (whole[: len(rows)] if drop_remainder else whole)
            assert len(whole) - len(rows) < size
            for rows_of_batch, _ in batches if by_cost else []:
                costs = rows_of_batch.column("cost").to_pylist()
                assert sum(costs) <= LIMIT or len(costs) == 1


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 12), st.integers(1, 12), st.booleans(), st.booleans(), st.data())
def test_batches_end_where_the_rows_say_however_they_were_read(rows, size, reads, others, by_cost, drop, data):
    """So a resumed run, which reads other pieces, sees the same batches."""
    rule = BatchRule(size, "cost" if by_cost else "", LIMIT if by_cost else math.inf, drop)
    whole = [rows.column("row").to_pylist() for rows, _ in batches_of(range(rows), rule, reads)]
    assert [rows.column("row").to_pylist() for rows, _ in batches_of(range(rows), rule, others)] == whole
    cut = data.draw(st.integers(0, len(whole)))
    start = sum(map(len, whole[:cut]))
    assert [rows.column("row").to_pylist() for rows, _ in batches_of(range(start, rows), rule, others)] == whole[cut:]


def source_of(*reads, costs=None, bounded=True, clock=None):
    counter, events = itertools.count(), []
    for count in reads:
        if isinstance(count, Idle):
            events.append(count)
            continue
        rows = [next(counter) for _ in range(count)]
        values = pa.array([costs[row] for row in rows]) if costs else table(rows).column("cost")
        events.append(Rows(pa.table({"row": rows, "cost": values})))
    return ScriptedSource({"a": events}, bounded=bounded, clock=clock)


def load(source, rule, **options):
    _, assigned = plan(source.discover(), None, {}, 1, 0)
    return Loader(
        source, assigned, batch_size=rule.size, transform=lambda rows, size: rows.column("row").to_pylist(), rule=rule, **options
    )


def drain(loader):
    deliveries = []
    while True:
        try:
            deliveries.append(loader.take(20.0))
        except EOFError:
            return deliveries
        assert deliveries[-1] is not None


def test_an_oversized_row_is_a_batch_of_its_own_with_a_warning(caplog):
    """DCL 9.11."""
    caplog.set_level(logging.WARNING)
    source = source_of(5, costs=[1, 50, 2, 3, 60])
    with closing(load(source, BatchRule(4, "cost", 9))) as loader:
        assert [d.payload for d in drain(loader)] == [[0], [1], [2, 3], [4]]
        assert loader.counts.oversized == 2
    assert caplog.text.count("scripted a: a row costs more than batch_cost_size") == 1


@pytest.mark.parametrize(
    ("costs", "error", "text"),
    [
        ([1.0, None], DataError, "scripted a, row 1: cost 'cost' is None"),
        ([1.0, math.nan], DataError, "row 1: cost 'cost' is nan"),
        ([1, -2], DataError, "row 1: cost 'cost' is -2"),
        (["1", "2"], SchemaError, "cost column 'cost' is of type string"),
    ],
)
def test_a_cost_that_is_none_names_its_row(costs, error, text):
    with closing(load(source_of(2, costs=costs), BatchRule(4, "cost", 9))) as loader, pytest.raises(error, match=text):
        loader.take(20.0)


def test_a_missing_cost_column_is_named():
    with closing(load(source_of(2), BatchRule(4, "price", 9))) as loader, pytest.raises(SchemaError, match="no column 'price'"):
        loader.take(20.0)


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize("drop", [False, True])
def test_the_last_batch_says_so_and_rows_left_out_are_counted(rows, drop):
    with closing(load(source_of(*[1] * rows), BatchRule(4, drop_remainder=drop))) as loader:
        deliveries = drain(loader)
        left = rows % 4 if drop else 0
        assert loader.counts.remainder == left
    assert [d.is_last for d in deliveries] == [False] * (len(deliveries) - 1) + [True] * bool(deliveries)
    assert sum(len(d.payload) for d in deliveries) == rows - left


def test_a_stream_is_cut_by_cost_too():
    source = source_of(6, costs=[4, 4, 4, 1, 8, 2], bounded=False)
    with closing(load(source, BatchRule(10, "cost", 9), max_wait_s=0.01)) as loader:
        assert [loader.take(20.0).payload for _ in range(3)] == [[0, 1], [2, 3], [4]]
        assert loader.take(20.0).payload == [5]


def test_costs_follow_shuffled_rows():
    rebatcher = Rebatcher(BatchRule(10, "cost", 9))
    rebatcher.add(shuffled([raw(0, 25)], Shuffle(1, 0, 30)), at=0.0)
    for size in rebatcher.full_sizes(is_end=True):
        rows, provenance = rebatcher.cut(size)
        costs = [cost_of(row) for row in rows.column("row").to_pylist()]
        assert sum(costs) <= 9 or len(costs) == 1
        assert [provenance.locate(at)[1] for at in range(size)] == rows.column("row").to_pylist()
