"""Partitions that come, start and go: new ones while running, where each starts."""

from contextlib import ExitStack, closing

import pytest

from tests.data.kafka_topics import (
    Run,
    add_partitions,
    count,
    eventually,
    merged,
    new_topic,
    offsets,
    produce,
    row,
    source,
    split_of,
)
from tidemill import logs
from tidemill.data.assignment import owner
from tidemill.errors import DataError, DeadlineError

LIST_OFFSETS, NOT_LEADER, NOT_AUTHORIZED = 2, 6, 29


def watched(broker, topic, **config):
    return source(broker, topic, discovery_interval_s=0.0, **config)


def test_new_partitions_are_read_from_their_beginning_while_running(broker, topic):
    """Also with a start time that lies behind their messages: they are new, so all of them is."""
    produce(broker, topic, [row(i) for i in range(3)])
    with Run(watched(broker, topic, start_timestamp_ms=1_001_000), batch_size=2) as run:
        assert run.train(count(2)) == [1, 2]
        add_partitions(broker, topic, 3)
        produce(broker, topic, [row(10), row(11)], partition=1, first_ms=5_000)
        assert sorted(run.train(count(4))) == [1, 2, 10, 11]
        eventually(lambda: run.step() or len(run.states) == 3)
        assert [state.split for state in run.states] == [f"{topic}:{partition}" for partition in range(3)]
        assert run.feed.partition_times[split_of(topic, 1)] == 6.0
        saved = run.states
    produce(broker, topic, [row(12)], partition=1, first_ms=5_000)
    produce(broker, topic, [row(20)], partition=2, first_ms=5_000)
    with Run(watched(broker, topic, start_timestamp_ms=1_001_000), saved) as second:
        assert sorted(second.train(count(2))) == [12, 20]


def test_new_partitions_are_told(broker, topic, tmp_path):
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        with Run(watched(broker, topic)) as run:
            run.step()
            add_partitions(broker, topic, 2)
            eventually(lambda: run.step() or len(run.states) == 2)
    finally:
        logs.send_events_to(None)
        sink.close()
    assert f'"source.partition_found","split":"{topic}:1","first":0' in (tmp_path / "events.jsonl").read_text()


def test_each_rank_takes_its_own_new_partitions(broker):
    """Ranks that had none of the topic's partitions look too."""
    topic = new_topic(broker, 1)
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(watched(broker, topic), ranks=(3, rank))) for rank in range(3)]
        for run in runs:
            run.step()
        add_partitions(broker, topic, 7)
        for partition in range(7):
            produce(broker, topic, [row(partition)], partition=partition)
        eventually(lambda: [run.step(0.05) for run in runs] and sum(len(run.rows) for run in runs) == 7)
        for rank, run in enumerate(runs):
            assert sorted(run.rows) == [p for p in range(7) if owner(split_of(topic, p), 3) == rank]
        states = merged(runs)
    assert [(state.split, tuple(state.intervals)) for state in states] == [(f"{topic}:{p}", offsets((0, 1))) for p in range(7)]


def test_a_partition_found_by_the_next_run_starts_at_its_beginning(broker, topic):
    produce(broker, topic, [row(i) for i in range(3)])
    with Run(source(broker, topic, start_timestamp_ms=1_001_000)) as first:
        first.train(count(2))
        saved = first.states
    add_partitions(broker, topic, 2)
    produce(broker, topic, [row(10)], partition=1, first_ms=5_000)
    with Run(source(broker, topic, start_timestamp_ms=1_001_000), saved) as second:
        assert second.train(count(1)) == [10]


def test_where_an_untouched_partition_starts_is_decided_once(broker, topic):
    """DCL 9.4.

    A start time past the head is the end at that moment, also for the run that goes on from a checkpoint without a row of it.
    """
    produce(broker, topic, [row(0), row(1)])
    with Run(source(broker, topic, start_timestamp_ms=9_000_000_000_000)) as first:
        assert not first.step(0.2)
        saved = first.states
    assert (saved[0].intervals, saved[0].fingerprint["start"]) == ([], 2)
    produce(broker, topic, [row(2), row(3)])
    with Run(source(broker, topic, start_timestamp_ms=9_000_000_000_000), saved) as second:
        assert second.train(count(2)) == [2, 3]


def test_rows_dropped_before_the_boundary_are_done_though_nothing_follows(broker, topic):
    produce(broker, topic, [row(i) for i in range(5)])
    broker.control(f"marker {topic} 0 commit")
    made = source(broker, topic, event_time_column="event_time")
    with Run(made, drop_before=2000.0) as run:
        eventually(lambda: run.step(0.05) or run.done == {f"{topic}:0": offsets((0, 6))})
        assert run.rows == []


@pytest.mark.parametrize("count_of_errors", [1, 2])
def test_a_start_time_lookup_that_fails_for_a_while_is_asked_again(broker, topic, count_of_errors):
    """DCL 9.5."""
    produce(broker, topic, [row(i) for i in range(4)])
    with closing(source(broker, topic, start_timestamp_ms=1_002_000)) as made:
        made.discover()
        broker.control(f"err {LIST_OFFSETS} {NOT_LEADER} {count_of_errors}")
        [split] = made.discover()
        assert split.fingerprint["start"] == 2


def test_a_start_time_lookup_that_fails_for_good_is_an_error(broker, topic):
    """DCL 9.5."""
    with closing(source(broker, topic, start_timestamp_ms=1_002_000)) as made:
        broker.control(f"err {LIST_OFFSETS} {NOT_AUTHORIZED} 1")
        with pytest.raises(DataError, match=rf"offsets of {topic}:0: .*[Aa]uthoriz"):
            made.discover()
    with closing(source(broker, topic, start_timestamp_ms=1_002_000, connect_timeout_s=0.5)) as made:
        broker.control(f"err {LIST_OFFSETS} -1 40")
        with pytest.raises(DeadlineError, match=rf"offsets of {topic}:0: no answer within 0\.5 s"):
            made.discover()
    broker.control("clear")
