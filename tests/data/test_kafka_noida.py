"""The Kafka source against another implementation of the protocol (noida-db), at small volume; transactions above all."""

import itertools
import json
from contextlib import closing

import pytest
from confluent_kafka import Producer

from tests.data.kafka_topics import (
    DEADLINE_S,
    KafkaContract,
    Run,
    add_partitions,
    count,
    eventually,
    new_topic,
    offsets,
    produce,
    row,
    source,
    split_of,
)
from tests.data.noida import NOT_INSTALLED, PROGRAM, Noida

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=NOT_INSTALLED)

_numbers = itertools.count()
COMMITTED = {"isolation.level": "read_committed", "log_level": 0, "fetch.wait.max.ms": 10}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    running = Noida(tmp_path_factory.mktemp("noida") / "data")
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def topic(broker):
    return new_topic(broker)


class TestContract(KafkaContract):
    pass


def transactions(broker, topic, *outcomes, first=0, size=3):
    """One transaction of `size` rows each: "commit", "abort", or "open", whose producer is returned.

    Each by a producer of its own: a reader that starts behind an aborted transaction is told of it by this server, though not
    by Kafka, and takes what the same producer wrote later for aborted too.
    """
    producer = None
    numbers = itertools.count(first)
    for outcome in outcomes:
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": f"tx-{next(_numbers)}", "log_level": 0})
        producer.init_transactions(DEADLINE_S)
        producer.begin_transaction()
        for number in itertools.islice(numbers, size):
            producer.produce(topic, json.dumps(row(number)), partition=0)
        assert producer.flush(DEADLINE_S) == 0
        if outcome != "open":
            (producer.commit_transaction if outcome == "commit" else producer.abort_transaction)(DEADLINE_S)
    return producer


def test_aborted_transactions_are_invisible_and_their_records_are_gaps(broker, topic):
    transactions(broker, topic, "commit", "abort", "commit", "abort")
    with Run(source(broker, topic, client=COMMITTED), idle_timeout_s=0.3) as run:
        assert run.train(count(6)) == [0, 1, 2, 6, 7, 8]
        # Four transactions of three rows and a marker; the last one was aborted, so no row follows it.
        eventually(lambda: run.step() or run.done == {f"{topic}:0": offsets((0, 16))})
        eventually(lambda: run.step() or run.feed.idle_partitions == [split_of(topic)])
        assert run.rows == [0, 1, 2, 6, 7, 8]


def test_only_what_was_committed_is_read_unless_the_config_says_otherwise(broker, topic):
    transactions(broker, topic, "abort", "commit")
    with Run(source(broker, topic)) as run:
        assert run.train(count(3)) == [3, 4, 5]
    with Run(source(broker, topic, client={**COMMITTED, "isolation.level": "read_uncommitted"})) as run:
        assert run.train(count(6)) == [0, 1, 2, 3, 4, 5]


def test_resumes_exactly_at_any_cut_through_transactions(broker, topic):
    transactions(broker, topic, "abort", "commit", "commit", "abort", "commit", "abort")
    expected = [3, 4, 5, 6, 7, 8, 12, 13, 14]
    end = {"end_offsets": {f"{topic}:0": 24}, "client": COMMITTED}
    for cut in range(1, len(expected)):
        with Run(source(broker, topic, **end), batch_size=1) as first:
            first.train(count(cut))
            saved = first.states
        with Run(source(broker, topic, **end), saved) as second:
            assert first.rows + second.train_all() == expected
            assert second.done == {f"{topic}:0": offsets((0, 24))}


def test_an_open_transaction_is_waited_for(broker, topic):
    """What lies behind it isn't read before it has ended, and the partition is read to its end for as long."""
    transactions(broker, topic, "commit")
    producer = transactions(broker, topic, "open", first=100)
    produce(broker, topic, [row(50)])
    with Run(source(broker, topic, client=COMMITTED)) as run:
        assert run.train(count(3)) == [0, 1, 2]
        assert not run.step(0.5)
        producer.commit_transaction(DEADLINE_S)
        assert run.train(count(7)) == [0, 1, 2, 100, 101, 102, 50]


def test_a_start_time_past_the_head_and_new_partitions(broker, topic):
    produce(broker, topic, [row(0)])
    with Run(source(broker, topic, start_timestamp_ms=9_000_000_000_000, discovery_interval_s=0.0)) as run:
        assert not run.step(0.3)
        produce(broker, topic, [row(1)])
        assert run.train(count(1)) == [1]
        add_partitions(broker, topic, 2)
        produce(broker, topic, [row(2)], partition=1)
        assert run.train(count(2)) == [1, 2]


def test_goes_on_after_a_restart(tmp_path):
    own = Noida(tmp_path / "data")
    try:
        topic = new_topic(own)
        produce(own, topic, [row(i) for i in range(5)])
        client = {"log_level": 0, "fetch.wait.max.ms": 10, "reconnect.backoff.max.ms": 100}
        with Run(source(own, topic, client=client)) as run:
            run.train(count(5))
            own.stop()
            own.start()
            produce(own, topic, [row(i) for i in range(5, 9)])
            assert run.train(count(9)) == list(range(9))
            saved = run.states
        with closing(source(own, topic)) as made:
            made.resume(saved)
    finally:
        own.stop()
