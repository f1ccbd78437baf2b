"""Dealing rows to ranks: everything once, nearly equal, and stable when a run resumes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.data.assignment import AssignmentBase, assign, plan
from tidemill.data.intervals import IntervalSet
from tidemill.data.split import Split, SplitId


def files(sizes):
    return [Split(SplitId("parquet", f"part-{i}"), rows) for i, rows in enumerate(sizes)]


def partitions(count):
    return [Split(SplitId("kafka", f"clicks:{i}"), None) for i in range(count)]


def rows_of(assigned):
    return [(part.split.id.name, row) for part in assigned for start, stop in part.remaining for row in range(start, stop)]


sizes = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@given(sizes, st.integers(1, 7), st.data())
def test_every_row_left_is_dealt_once_and_evenly(sizes, world_size, data):
    splits = files(sizes)
    done = {
        s.id: IntervalSet.of(data.draw(st.lists(st.tuples(st.just(0), st.integers(0, s.num_rows)), max_size=1))) for s in splits
    }
    shares = [rows_of(assign(splits, done, world_size, rank)) for rank in range(world_size)]
    left = [(s.id.name, row) for s in splits for row in range(s.num_rows) if row not in done[s.id]]
    assert [row for share in shares for row in share] == left
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(sizes, st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=5, max_size=5)), max_size=6))
@settings(max_examples=200)
def test_any_sequence_of_kills_and_worlds_trains_every_row_once(sizes, runs):
    splits, progress, trained, base = files(sizes), {}, [], None
    for world_size, delivered in [*runs, (2, [10**6] * 5)]:
        plans = [plan(splits, base, progress, world_size, rank) for rank in range(world_size)]
        assert len({json.dumps(made.to_json()) for made, _ in plans}) == 1
        base = AssignmentBase.from_json(json.loads(json.dumps(plans[0][0].to_json())))
        for rank, (_, assigned) in enumerate(plans):
            for name, row in rows_of(assigned)[: delivered[rank]]:
                trained.append((name, row))
                split = SplitId("parquet", name)
                progress[split] = progress.get(split, IntervalSet()) | IntervalSet.of([(row, row + 1)])
    assert sorted(trained) == sorted((s.id.name, row) for s in splits for row in range(s.num_rows))


def test_same_number_of_ranks_keeps_each_ranks_own_rows():
    splits = files([10, 10])
    base, _ = plan(splits, None, {}, 2, 0)
    progress = {splits[0].id: IntervalSet.of([(0, 4)]), splits[1].id: IntervalSet.of([(0, 1)])}
    assert rows_of(plan(splits, base, progress, 2, 0)[1]) == [("part-0", row) for row in range(4, 10)]
    assert rows_of(plan(splits, base, progress, 2, 1)[1]) == [("part-1", row) for row in range(1, 10)]


def test_another_number_of_ranks_deals_anew():
    splits = files([10])
    base, _ = plan(splits, None, {}, 2, 0)
    new, assigned = plan(splits, base, {splits[0].id: IntervalSet.of([(0, 2)])}, 1, 0)
    assert new != base
    assert rows_of(assigned) == [("part-0", row) for row in range(2, 10)]


def test_added_file_adds_only_its_rows():
    base, _ = plan(files([4]), None, {}, 1, 0)
    grown = files([4, 3])
    _, assigned = plan(grown, base, {grown[0].id: IntervalSet.of([(0, 4)])}, 1, 0)
    assert rows_of(assigned) == [("part-1", row) for row in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_partitions_belong_to_one_rank_each_and_stay(world_size):
    def owners(count):
        return {a.split.id.name: rank for rank in range(world_size) for a in assign(partitions(count), {}, world_size, rank)}

    before, after = owners(4), owners(12)
    assert set(before) == {f"clicks:{i}" for i in range(4)}
    assert all(after[name] == rank for name, rank in before.items())


topics = st.dictionaries(st.text("abcdef.-", min_size=1, max_size=8), st.integers(1, 9), min_size=1, max_size=4)


@given(topics, topics, st.integers(1, 5))
def test_added_partitions_and_topics_move_no_other(before, more, world_size):
    """Also topics that sort before those that are there; and each topic is spread evenly."""
    after = {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}

    def owners(topics):
        splits = [Split(SplitId("kafka", f"{name}:{i}"), None) for name, count in topics.items() for i in range(count)]
        dealt = [(a.split.id, rank) for rank in range(world_size) for a in assign(splits, {}, world_size, rank)]
        assert sorted(split for split, _ in dealt) == sorted(split.id for split in splits)
        return dict(dealt)

    old, new = owners(before), owners(after)
    assert {split: new[split] for split in old} == old
    for name, count in after.items():
        loads = [sum(new[SplitId("kafka", f"{name}:{i}")] == rank for i in range(count)) for rank in range(world_size)]
        assert max(loads) - min(loads) <= 1


def test_partition_carries_what_is_done():
    split = partitions(1)[0]
    _, [assigned] = plan([split], None, {split.id: IntervalSet.of([(0, 5)])}, 1, 0)
    assert assigned.remaining is None
    assert assigned.done == IntervalSet.of([(0, 5)])
