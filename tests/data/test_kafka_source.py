"""The Kafka source against the development broker."""

import time
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from tests.data.kafka_topics import (
    COLUMNS,
    DEADLINE_S,
    MESSAGE,
    KafkaContract,
    Run,
    count,
    delete_before,
    new_topic,
    offsets,
    produce,
    row,
    source,
    split_of,
)
from tidemill import logs
from tidemill.config.data import KafkaConfig
from tidemill.data.assignment import plan
from tidemill.data.progress import Progress, verify_splits
from tidemill.data.sources.kafka import KafkaSource
from tidemill.data.sources.kafka_runs import message_runs
from tidemill.data.split import SplitId, positions
from tidemill.errors import ConfigError, DataError, DeadlineError, SourceChangedError
from tidemill.testing.broker import DevelopmentBroker


class TestContract(KafkaContract):
    pass


def test_message_of_ten_rows_resumes_inside(broker, topic):
    """DCL 9.3."""
    produce(broker, topic, [[row(10 * m + k) for k in range(10)] for m in range(3)])
    with Run(source(broker, topic)) as first:
        assert first.train(count(4)) == [0, 1, 2, 3]
    assert first.done[f"{topic}:0"] == ((0, 4),)
    with Run(source(broker, topic), first.states) as second:
        assert second.train(count(26)) == list(range(4, 30))
    assert second.done[f"{topic}:0"] == offsets((0, 3))


def test_rows_in_hand_arent_lost_when_what_follows_them_is_dropped(broker, topic):
    """What was dropped is done with at once, but the row before it isn't trained yet when the checkpoint is saved."""
    made = source(broker, topic, event_time_column="event_time")
    produce(broker, topic, [row(100)])
    with Run(made, batch_size=1, drop_before=1050.0) as first:
        deadline = time.monotonic() + DEADLINE_S
        while first.feed.take(0.1) is None:
            assert time.monotonic() < deadline
        produce(broker, topic, [row(1), row(2)])
        while first.feed.counts.dropped < 2:
            assert time.monotonic() < deadline
            first.feed.take(0.05)
        first.feed.take(0.2)
        states = first.states
    with Run(source(broker, topic), states, batch_size=1) as second:
        assert second.train(count(1))[0] == 100


def test_one_row_messages_at_consecutive_offsets_are_one_run(broker, topic):
    produce(broker, topic, [row(i) for i in range(8)])
    with Run(source(broker, topic), batch_size=8) as run:
        run.train(count(8))
    [run_of_rows] = run.deliveries[0].provenance.runs
    assert (run_of_rows.start, run_of_rows.stop, run_of_rows.rows, run_of_rows.stride) == (0, 8 * MESSAGE, 8, MESSAGE)
    assert run_of_rows.event_time == 1007.0
    assert run.deliveries[0].provenance.newest_arrival == 1007.0


def test_arrow_messages(broker, topic):
    table = pa.table({"event_id": [f"e{i}" for i in range(5)], "event_time": [5.0 + i for i in range(5)]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    produce(broker, topic, [sink.getvalue().to_pybytes()])
    with Run(source(broker, topic, message_format="arrow", event_time_column="event_time"), batch_size=5) as run:
        assert run.train(count(5)) == [0, 1, 2, 3, 4]
    assert run.deliveries[0].provenance.runs[0].event_time == 9.0


def test_poison_is_skipped_covered_and_not_met_again(broker, topic):
    produce(broker, topic, [row(0), b"garbage", row(1), None, row(2)])
    with Run(source(broker, topic), batch_size=3) as run:
        assert run.train(count(3)) == [0, 1, 2]
    assert run.done[f"{topic}:0"] == offsets((0, 5))


def test_too_much_poison_fails_naming_the_message(broker, topic):
    produce(broker, topic, [row(0), b"garbage", row(1), b"rubbish", row(2)])
    with (
        Run(source(broker, topic, max_poison=1)) as run,
        pytest.raises(DataError, match=rf"max_poison allows 1.*topic {topic}, partition 0, offset 3"),
    ):
        run.train(count(3))


def test_wrong_type_is_poison_and_missing_column_is_null(broker, topic):
    produce(broker, topic, [{"event_id": "e0"}, {"event_id": "e1", "event_time": "late"}, row(2)])
    with Run(source(broker, topic, event_time_column="event_time"), batch_size=2) as run:
        assert run.train(count(2)) == [0, 2]
    assert run.deliveries[0].provenance.runs[-1].event_time == 1002.0


@pytest.mark.parametrize(
    ("config", "start_at", "expected"),
    [
        ({}, None, [0, 1, 2, 3, 4, 5]),
        ({"start_timestamp_ms": 1_002_000}, None, [2, 3, 4, 5]),
        ({"start_timestamp_ms": 1_002_000}, 1004.0, [2, 3, 4, 5]),
        ({}, 1004.0, [4, 5]),
        ({}, -600.0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_where_an_untouched_partition_starts(broker, topic, config, start_at, expected):
    produce(broker, topic, [row(i) for i in range(6)])
    with Run(source(broker, topic, start_at=start_at, **config)) as run:
        assert run.train(count(len(expected))) == expected


def test_own_progress_goes_before_the_start_time(broker, topic):
    produce(broker, topic, [row(i) for i in range(6)])
    with Run(source(broker, topic, start_timestamp_ms=1_001_000), batch_size=2) as first:
        first.train(count(2))
    assert first.done[f"{topic}:0"] == offsets((1, 3))
    with Run(source(broker, topic, start_timestamp_ms=1_004_000), first.states) as second:
        assert second.train(count(3)) == [3, 4, 5]


def test_start_time_past_the_head_starts_at_the_end(broker, topic):
    """DCL 9.5."""
    produce(broker, topic, [row(0), row(1)])
    with Run(source(broker, topic, start_timestamp_ms=9_000_000_000_000)) as run:
        assert not run.step(0.5)
        produce(broker, topic, [row(2)])
        assert run.train(count(1)) == [2]


def test_boundary_drops_rows_that_belong_to_the_table(broker, topic):
    produce(broker, topic, [row(i) for i in (3, 0, 4, 1, 5)], first_ms=2_000_000)
    made = source(broker, topic, start_at=403.0, event_time_column="event_time")
    with Run(made, batch_size=3, drop_before=1003.0) as run:
        assert run.train(count(3)) == [3, 4, 5]
        assert run.feed.counts.dropped == 2
    assert run.done[f"{topic}:0"] == offsets((0, 5))


def test_expired_offsets_fail_or_go_on(broker, topic, tmp_path):
    """DCL 9.6."""
    produce(broker, topic, [row(i) for i in range(10)])
    with Run(source(broker, topic)) as first:
        first.train(count(4))
    delete_before(broker, topic, 7)
    made = source(broker, topic)
    with (
        closing(made),
        Run(made, first.states) as run,
        pytest.raises(SourceChangedError, match=rf"{topic}:0: messages 4 to 6 \(3\)"),
    ):
        run.train(count(1))
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        with Run(source(broker, topic, on_data_loss="earliest"), first.states) as second:
            assert second.train(count(3)) == [7, 8, 9]
    finally:
        logs.send_events_to(None)
        sink.close()
    assert f'"source.data_loss","split":"{topic}:0","first":4,"lost":3' in (tmp_path / "events.jsonl").read_text()
    assert second.done[f"{topic}:0"] == offsets((0, 10))


ONE_BY_ONE = {"log_level": 0, "fetch.wait.max.ms": 10, "queued.min.messages": 1, "max.partition.fetch.bytes": 1}


@pytest.mark.parametrize("policy", ["fail", "earliest"])
def test_retention_that_overtakes_a_reader_obeys_the_same_policy(broker, topic, policy):
    """DCL 9.6 while running."""
    for number in range(12):
        produce(broker, topic, [row(number)])
    made = source(broker, topic, on_data_loss=policy, client=ONE_BY_ONE)
    with closing(made), closing(made.open_all(plan(made.discover(), None, {}, 1, 0)[1])) as reader:
        raws = [first_rows(reader, 0.0)]
        delete_before(broker, topic, 10)
        if policy == "fail":
            with pytest.raises(SourceChangedError, match=rf"{topic}:0: messages \d to 9 \(\d\) expired"):
                raws.extend(first_rows(reader) for _ in range(12))
        while policy == "earliest" and raws[-1].runs[-1].stop < 12 * MESSAGE:
            raws.append(first_rows(reader))
        ids = [int(key[1:]) for raw in raws if raw.num_rows for key in raw.table.column("event_id").to_pylist()]
        before = [number for number in ids if number < 10]
        assert before == list(range(len(before)))
        assert len(before) < 10
        assert ids == (before if policy == "fail" else [*before, 10, 11])
        runs = [run for raw in raws for run in raw.runs]
        assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]


def test_what_comes_with_an_expired_offset_of_another_partition_comes_again(broker):
    """Rows and the end of one partition, in the same read in which the other turns out to have expired."""
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(i) for i in range(5)])
    produce(broker, topic, [row(10 + i) for i in range(3)], partition=1)
    made = source(broker, topic, on_data_loss="earliest")
    with closing(made), closing(made.open_all(plan(made.discover(), None, {}, 1, 0)[1])) as reader:
        delete_before(broker, topic, 3)
        reader._consumer.assign([TopicPartition(topic, 0, 1), TopicPartition(topic, 1, 0)])
        time.sleep(0.5)
        raws = [first_rows(reader)]
        while sum(raw.num_rows for raw in raws) < 5:
            raws.append(first_rows(reader))
        ids = [key for raw in raws if raw.num_rows for key in raw.table.column("event_id").to_pylist()]
        assert sorted(ids) == ["e10", "e11", "e12", "e3", "e4"]
        for partition in range(2):
            runs = [run for raw in raws for run in raw.runs if run.split == split_of(topic, partition)]
            assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]


def first_rows(reader, timeout_s=0.1):
    deadline = time.monotonic() + DEADLINE_S
    while (raw := reader.read(timeout_s)) is None:
        assert time.monotonic() < deadline
    return raw


FETCH, NOT_LEADER, NOT_AUTHORIZED = 1, 6, 29


def test_error_that_passes_is_waited_for(broker, topic):
    produce(broker, topic, [row(i) for i in range(4)])
    broker.control(f"err {FETCH} {NOT_LEADER} 2")
    with Run(source(broker, topic)) as run:
        assert run.train(count(4)) == [0, 1, 2, 3]


def test_error_that_stays_ends_the_run(broker, topic):
    produce(broker, topic, [row(i) for i in range(4)])
    broker.control(f"err {FETCH} {NOT_AUTHORIZED} 1")
    with Run(source(broker, topic)) as run, pytest.raises(DataError, match=rf"{topic}:0: .*[Aa]uthorization"):
        run.train(count(4))


def test_two_topics_are_read_as_one(broker):
    names = [new_topic(broker), new_topic(broker)]
    for index, name in enumerate(names):
        produce(broker, name, [row(10 * index + i) for i in range(3)])
    with Run(source(broker, ",".join(names)), batch_size=6) as run:
        assert sorted(run.train(count(6))) == [0, 1, 2, 10, 11, 12]
    assert set(run.done) == {f"{name}:0" for name in names}


def test_a_partial_batch_goes_out_after_its_wait_though_another_partition_is_silent(broker):
    """Linger: not before the wait is over, and not only once the batch is full."""
    topic = new_topic(broker, 2)
    with Run(source(broker, topic), batch_size=1000, max_wait_s=1.0) as run:
        run.step()
        produce(broker, topic, [row(0)])
        started = time.monotonic()
        assert run.train(count(1)) == [0]
        assert time.monotonic() - started >= 0.9
        produce(broker, topic, [row(1)], partition=1)
        assert run.train(count(2)) == [0, 1]


def test_idle_partition_is_told_from_a_busy_one(broker):
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(i) for i in range(4)])
    with Run(source(broker, topic), idle_timeout_s=0.3) as run:
        run.train(count(4))
        run.train(lambda run: split_of(topic, 1) in run.feed.idle_partitions)
        produce(broker, topic, [row(4)], partition=1)
        run.train(lambda run: split_of(topic, 1) not in run.feed.idle_partitions)


def test_progress_beyond_the_end_is_refused(broker, topic):
    produce(broker, topic, [row(0)])
    with closing(source(broker, topic)) as made:
        [state] = Progress().to_states(made.discover())
    saved = [state.model_copy(update={"intervals": list(offsets((0, 5)))})]
    with Run(source(broker, topic), saved) as run, pytest.raises(SourceChangedError, match=r"offset 5, but it ends at 1"):
        run.train(count(1))


def test_another_cluster_is_refused(broker, topic):
    made = source(broker, topic)
    with closing(made):
        splits = made.discover()
        [state] = Progress().to_states(splits)
        verify_splits(made, splits, [state])
        for key, value in (("cluster", "elsewhere"), ("earliest", 1)):
            other = state.model_copy(update={"fingerprint": {**state.fingerprint, key: value}})
            with pytest.raises(SourceChangedError, match=rf"{topic}:0.*{key}.* was {value}"):
                verify_splits(made, splits, [other])


def test_topic_that_isnt_there_is_named(broker):
    made = source(broker, "nowhere")
    with closing(made), pytest.raises(DataError, match="topic 'nowhere'"):
        made.discover()


def test_no_broker_is_an_error_after_the_deadline():
    config = KafkaConfig(brokers="127.0.0.1:1", topic=("clicks",), connect_timeout_s=0.5, client={"log_level": 0})
    made = KafkaSource(config, COLUMNS)
    with closing(made), pytest.raises(DeadlineError, match=r"127\.0\.0\.1:1: topic 'clicks': no answer within 0\.5 s"):
        made.discover()


def test_broker_restart_loses_and_doubles_nothing(tmp_path):
    with DevelopmentBroker(tmp_path) as own:
        topic = new_topic(own)
        produce(own, topic, [row(i) for i in range(20)])
        with Run(source(own, topic, client={"log_level": 0, "reconnect.backoff.max.ms": 100})) as run:
            run.train(count(20))
            own.restart()
            produce(own, topic, [row(i) for i in range(20, 40)])
            assert run.train(count(40)) == list(range(40))


def test_json_needs_columns():
    with pytest.raises(ConfigError, match="columns"):
        KafkaSource(KafkaConfig(brokers="127.0.0.1:1", topic=("t",)))
    with pytest.raises(ConfigError, match="'ts' isn't among"):
        KafkaSource(KafkaConfig(brokers="127.0.0.1:1", topic=("t",)), COLUMNS, event_time_column="ts")


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 1, 1, 2, 5])), min_size=1, max_size=12), st.integers(0, 1))
def test_runs_cover_everything_and_place_every_row(messages, behind):
    """(distance from the offset before, rows) of each message."""
    offsets = np.cumsum([step for step, _ in messages])
    rows = np.array([size for _, size in messages])
    start = (int(offsets[0]) - behind) * MESSAGE
    times = np.arange(rows.sum(), dtype=np.float64)
    runs = message_runs(SplitId("kafka", "t:0"), start, offsets, rows, times)
    expected = [int(offset) * MESSAGE + k for offset, size in zip(offsets, rows, strict=True) for k in range(size)]
    assert [p for run in runs for p in positions(run).tolist()] == expected
    assert [run.start for run in runs] == [start, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == (int(offsets[-1]) + 1) * MESSAGE
    ends = np.cumsum([run.rows for run in runs])
    assert all(run.event_time == end - 1 for run, end in zip(runs, ends, strict=True) if run.rows)
