"""Offsets of committed checkpoints in the consumer group: for dashboards, never waited for."""

import time
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.data.kafka_topics import Run, count, eventually, new_topic, produce, row, source


def committed(broker, topic, group, partition=0):
    with closing(Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0})) as reader:
        return reader.committed([TopicPartition(topic, partition)], timeout=10.0)[0].offset


def test_commits_the_first_offset_that_isnt_wholly_done_as_of_the_checkpoint(broker, topic):
    produce(broker, topic, [[row(10 * m + k) for k in range(10)] for m in range(3)])
    with Run(source(broker, topic, group_id=topic)) as run:
        run.train(count(12))
        run.feed.saving()
        run.train(count(24))
        run.feed.committed()
        eventually(lambda: committed(broker, topic, topic) == 1)


def test_each_rank_commits_its_own_partitions(broker):
    topic = new_topic(broker, 2)
    for partition in range(2):
        produce(broker, topic, [row(i) for i in range(partition + 1)], partition=partition)
    runs = [Run(source(broker, topic, group_id=topic), ranks=(2, rank)) for rank in range(2)]
    for run in runs:
        with run:
            [split] = run.feed.partition_times
            run.train(count(int(split.name[-1]) + 1))
            run.feed.saving()
            run.feed.committed()
    assert [committed(broker, topic, topic, partition) for partition in range(2)] == [1, 2]


def test_what_a_group_says_is_never_read_back(broker, topic):
    """DCL 9.4: neither where an untouched partition starts, nor where a run goes on."""

    def commit(offset):
        with closing(Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topic, "log_level": 0})) as other:
            other.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)

    produce(broker, topic, [row(i) for i in range(6)])
    commit(4)
    with Run(source(broker, topic, group_id=topic), batch_size=2) as first:
        assert first.train(count(2)) == [0, 1]
        saved = first.states
    commit(5)
    with Run(source(broker, topic, group_id=topic), saved, batch_size=4) as second:
        assert second.train(count(4)) == [2, 3, 4, 5]


def test_nothing_is_committed_without_a_group(broker, topic):
    produce(broker, topic, [row(0)])
    with Run(source(broker, topic)) as run:
        run.train(count(1))
        run.feed.saving()
        run.feed.committed()
    assert committed(broker, topic, "tidemill") < 0


def test_a_commit_that_fails_is_told_and_made_good_by_the_next(broker, topic, caplog):
    produce(broker, topic, [row(i) for i in range(4)])
    with Run(source(broker, topic, group_id=topic), batch_size=1) as run:
        run.train(count(1))
        run.feed.saving()
        broker.control("err offset_commit 30 1")
        run.feed.committed()
        eventually(lambda: f"offsets of group {topic} weren't committed" in caplog.text)
        run.train(count(2))
        run.feed.saving()

        def settled():
            run.feed.committed()
            return committed(broker, topic, topic) == 2

        eventually(settled)


@pytest.mark.parametrize("fault", ["down", "rtt 20000"])
def test_committing_and_closing_never_wait_for_a_cluster_that_is_away(broker, topic, fault):
    produce(broker, topic, [row(0)])
    run = Run(source(broker, topic, group_id=topic))
    try:
        run.train(count(1))
        run.feed.saving()
        broker.control(fault)
        started = time.monotonic()
        for _ in range(5):
            run.feed.committed()
        assert time.monotonic() - started < 1.0
    finally:
        started = time.monotonic()
        run.feed.close()
        run.source.close()
        broker.control("clear")
    assert time.monotonic() - started < 15.0
