"""Bounded replay of a topic: it ends by position, whatever is at its end, and a run that goes on ends at the same place."""

import json
import time
from contextlib import closing

import pytest

from tests.data.kafka_topics import (
    Run,
    add_partitions,
    count,
    delete_before,
    eventually,
    merged,
    new_topic,
    offsets,
    produce,
    row,
    source,
)
from tidemill import logs
from tidemill.data.sources import kafka_reader
from tidemill.errors import ConfigError, SourceChangedError


def ends(topic, *numbers):
    return {f"{topic}:{partition}": offset for partition, offset in enumerate(numbers)}


def test_ends_before_the_offsets_given(broker):
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(i) for i in range(6)])
    produce(broker, topic, [row(10 + i) for i in range(3)], partition=1)
    with Run(source(broker, topic, end_offsets=ends(topic, 4, 3))) as run:
        assert sorted(run.train_all()) == [0, 1, 2, 3, 10, 11, 12]
        assert run.done == {f"{topic}:0": offsets((0, 4)), f"{topic}:1": offsets((0, 3))}


def test_ends_before_the_first_message_at_or_after_a_time(broker, topic):
    produce(broker, topic, [row(i) for i in range(6)])
    with Run(source(broker, topic, start_timestamp_ms=1_001_000, end_timestamp_ms=1_004_000)) as run:
        assert run.train_all() == [1, 2, 3]


def test_an_end_time_behind_the_last_message_is_the_end_of_what_is_there(broker, topic):
    produce(broker, topic, [row(i) for i in range(3)])
    with Run(source(broker, topic, end_timestamp_ms=int(time.time() * 1000))) as run:
        produce(broker, topic, [row(3)])
        assert run.train_all() == [0, 1, 2]


@pytest.mark.parametrize(
    "tail", [["gap {} 0 7"], ["marker {} 0 commit"], ["marker {} 0 commit", "gap {} 0 2", "marker {} 0 abort"]], ids=" ".join
)
@pytest.mark.parametrize("more", [False, True])
def test_ends_at_offsets_that_no_message_has(broker, topic, tail, more):
    """Compacted gaps and transactions' markers at the end, with and without a message behind them."""
    produce(broker, topic, [row(0), row(1)])
    for command in tail:
        broker.control(command.format(topic))
    with closing(source(broker, topic, end_timestamp_ms=int(time.time() * 1000))) as made:
        [split] = made.discover()
    end = split.fingerprint["end"]
    if more:
        produce(broker, topic, [row(2)])
    with Run(source(broker, topic, end_offsets=ends(topic, end))) as run:
        assert run.train_all() == [0, 1]
        assert run.done == {f"{topic}:0": offsets((0, end))}


def test_only_offsets_without_messages(broker, topic):
    broker.control(f"marker {topic} 0 abort")
    with Run(source(broker, topic, end_offsets=ends(topic, 1))) as run:
        assert run.train_all() == []
        assert run.done == {f"{topic}:0": offsets((0, 1))}


def test_an_empty_partition_and_a_rank_without_partitions_end_at_once(broker):
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(i) for i in range(3)])
    runs = [Run(source(broker, topic, end_offsets=ends(topic, 3, 0)), ranks=(3, rank)) for rank in range(3)]
    for run in runs:
        with run:
            run.train_all()
    assert sorted(row for run in runs for row in run.rows) == [0, 1, 2]


@pytest.mark.parametrize("config", ["end_offsets", "end_timestamp_ms"])
def test_goes_on_to_the_same_end_and_then_reads_nothing(broker, topic, config):
    produce(broker, topic, [[row(3 * m + k) for k in range(3)] for m in range(4)])
    end = {"end_offsets": ends(topic, 4)} if config == "end_offsets" else {"end_timestamp_ms": 1_004_000}
    with Run(source(broker, topic, **end), batch_size=2) as first:
        assert first.train(count(4)) == [0, 1, 2, 3]
        saved = first.states
    produce(broker, topic, [row(99)], first_ms=2_000_000)
    with Run(source(broker, topic, **end), saved, batch_size=2) as second:
        assert second.train_all() == list(range(4, 12))
        saved = second.states
    with Run(source(broker, topic, **end), saved) as third:
        assert third.train_all() == []


def test_an_end_time_is_made_an_offset_once(broker, topic):
    """What comes between two runs may have an old time; it is no part of the backfill. Another time is another end."""
    produce(broker, topic, [row(i) for i in range(4)])
    end = {"end_timestamp_ms": 1_009_000}
    with Run(source(broker, topic, **end), batch_size=2) as first:
        first.train(count(2))
        saved = first.states
    produce(broker, topic, [row(4)], first_ms=1_005_000)
    with Run(source(broker, topic, **end), saved) as second:
        assert second.train_all() == [2, 3]
    with Run(source(broker, topic, end_timestamp_ms=1_009_001), saved) as third:
        assert third.train_all() == [2, 3, 4]


def test_backfill_resumes_on_another_number_of_ranks(broker):
    topic = new_topic(broker, 3)
    for partition in range(3):
        produce(broker, topic, [row(10 * partition + i) for i in range(8)], partition=partition)
    end = {"end_offsets": ends(topic, 8, 8, 8)}
    with Run(source(broker, topic, **end), batch_size=3) as first:
        first.train(count(9))
        saved = first.states
    runs = [Run(source(broker, topic, **end), saved, ranks=(2, rank)) for rank in range(2)]
    rows = list(first.rows)
    for run in runs:
        with run:
            rows += run.train_all()
    assert sorted(rows) == sorted(10 * partition + i for partition in range(3) for i in range(8))
    assert {tuple(state.intervals) for state in merged(runs)} == {offsets((0, 8))}


def test_expired_up_to_the_end(broker, topic):
    produce(broker, topic, [row(i) for i in range(6)])
    with Run(source(broker, topic), batch_size=2) as first:
        first.train(count(2))
        saved = first.states
    delete_before(broker, topic, 5)
    with Run(source(broker, topic, end_offsets=ends(topic, 4)), saved) as run, pytest.raises(SourceChangedError, match="expired"):
        run.train_all()
    with Run(source(broker, topic, end_offsets=ends(topic, 4), on_data_loss="earliest"), saved) as run:
        assert run.train_all() == []


def test_partitions_added_later_are_no_part_of_it(broker, topic):
    produce(broker, topic, [row(0)])
    made = source(broker, topic, end_offsets=ends(topic, 2), discovery_interval_s=0.0)
    with Run(made) as run:
        run.train(count(1))
        add_partitions(broker, topic, 2)
        produce(broker, topic, [row(5)], partition=1)
        produce(broker, topic, [row(1)])
        assert run.train_all() == [0, 1]
        assert len(run.states) == 1


def test_an_end_that_messages_havent_reached_is_waited_for_and_told(broker, topic, caplog, monkeypatch, tmp_path):
    """What it waits for and for how long, at once and again: never a silent stall; what comes still ends it."""
    monkeypatch.setattr(kafka_reader, "_TELL_EVERY_S", 0.3)
    produce(broker, topic, [row(0), row(1)])
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        with Run(source(broker, topic, end_offsets=ends(topic, 4))) as run:
            run.train(count(2))
            eventually(lambda: run.step() or caplog.text.count("reading is to end at offset 4, but messages end at 2 so far") >= 2)
            produce(broker, topic, [row(2), row(3)])
            assert run.train_all() == [0, 1, 2, 3]
    finally:
        logs.send_events_to(None)
        sink.close()
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    waits = [event for event in told if event["event"] == "source.waiting_for_end"]
    assert {(event["split"], event["end"], event["reached"]) for event in waits} == {(f"{topic}:0", 4, 2)}
    assert waits[-1]["waited_s"] > waits[0]["waited_s"] == 0


def test_a_backfill_that_moves_on_says_nothing_of_waiting(broker, topic, caplog):
    produce(broker, topic, [row(i) for i in range(6)])
    with Run(source(broker, topic, end_offsets=ends(topic, 4))) as run:
        assert run.train_all() == [0, 1, 2, 3]
    assert "reading is to end" not in caplog.text


def test_every_partition_needs_an_end(broker):
    topic = new_topic(broker, 2)
    with closing(source(broker, topic, end_offsets=ends(topic, 4))) as made, pytest.raises(ConfigError, match=rf"{topic}:1"):
        made.discover()


def test_one_end_and_not_in_the_future(broker):
    with pytest.raises(ConfigError, match="future"):
        source(broker, "t", end_timestamp_ms=int(time.time() * 1000) + 3_600_000)
    with pytest.raises(ConfigError, match="two ends"):
        source(broker, "t", end_timestamp_ms=1, end_offsets={"t:0": 1})
