"""A cluster that is away, slow, restarted or full of errors: nothing lost, nothing twice, nobody taken for idle, one line each."""

import logging
import subprocess
import sys
import textwrap
import time
from contextlib import closing

import pytest

from tests.data.kafka_topics import COLUMNS, Run, count, eventually, new_topic, offsets, produce, row, source, split_of
from tidemill.config.data import KafkaConfig
from tidemill.config.messages import SchemaRegistryConfig
from tidemill.data.assignment import Assigned
from tidemill.data.loader import Loader
from tidemill.data.sources.kafka import KafkaSource
from tidemill.errors import DeadlineError
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.schema_registry import DevelopmentRegistry

FETCH, NOT_LEADER, CORRUPT = 1, 6, 2
IMPATIENT = {"log_level": 0, "fetch.wait.max.ms": 10, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}


@pytest.fixture
def own(tmp_path):
    with DevelopmentBroker(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    "fault", ["down", "err fetch -1 3", "err fetch -2 3", "err fetch 6 4", "err metadata -1 2", "rtt 300"], ids=str
)
def test_a_fault_that_passes_loses_and_doubles_nothing(broker, topic, fault):
    """DCL 9.4."""
    produce(broker, topic, [row(i) for i in range(10)])
    try:
        with Run(source(broker, topic, client=IMPATIENT)) as run:
            run.train(count(5))
            broker.control(fault)
            for _ in range(4):
                run.step()
            if fault == "down":
                broker.control("up")
            produce(broker, topic, [row(i) for i in range(10, 20)])
            assert run.train(count(20)) == list(range(20))
            assert run.done == {f"{topic}:0": offsets((0, 20))}
    finally:
        broker.control("clear")


def test_kills_of_the_broker_while_reading_lose_and_double_nothing(own):
    topic = new_topic(own, 2)
    for partition in range(2):
        produce(own, topic, [row(100 * partition + i) for i in range(50)], partition=partition)
    with Run(source(own, topic, client={**IMPATIENT, "queued.min.messages": 1, "max.partition.fetch.bytes": 200})) as run:
        for target in (20, 60, 100):
            run.train(count(target))
            own.restart()
    assert sorted(run.rows) == [100 * partition + i for partition in range(2) for i in range(50)]


@pytest.mark.parametrize("silent", [True, False])
def test_an_outage_that_lasts_ends_the_run_naming_the_cluster(own, silent):
    topic = new_topic(own)
    produce(own, topic, [row(0)])
    with Run(source(own, topic, outage_timeout_s=1.0, client=IMPATIENT), batch_size=1) as run:
        run.train(count(1))
        if silent:
            eventually(lambda: run.step() or run.feed.counts.read == 1)
        own.kill()
        with pytest.raises(DeadlineError, match=rf"kafka {own.bootstrap}: can't be reached for \d+ s \(.*\)"):
            run.train(count(2))


def test_a_stop_while_the_cluster_is_away_at_the_start_isnt_held_up(own):
    """Opening waits for a cluster for minutes here, but not once the run ends: `close` raises if a thread is still busy."""
    made = source(own, new_topic(own), connect_timeout_s=600.0, client=IMPATIENT)
    with closing(made):
        [split] = made.discover()
        own.kill()
        loader = Loader(made, [Assigned(split, None)], batch_size=1, transform=lambda table, size: table)
        assert loader.take(0.2) is None
        loader.close()


def test_a_stop_while_the_schema_registry_is_away_isnt_held_up():
    with DevelopmentRegistry() as registry:
        registry.fail_next(*[503] * 1000)
        settings = SchemaRegistryConfig(url=registry.url, timeout_s=600.0)
        made = KafkaSource(
            KafkaConfig(brokers="127.0.0.1:1", topic=("t",), message_format="avro", schema_registry=settings), COLUMNS
        )
        with closing(made):
            made.interrupt()
            with pytest.raises(DeadlineError, match="/schemas/ids/1: given up, since the run ends"):
                made.decoder().decode([b"\0\0\0\0\1x"])


def test_a_rank_without_partitions_outlives_silence_but_no_outage(own):
    """DCL 9.7."""
    topic = new_topic(own)
    made = source(own, topic, outage_timeout_s=0.5, discovery_interval_s=0.1, client=IMPATIENT)
    ranks = [Run(made, ranks=(2, rank)) for rank in range(2)]
    [spare] = [run for run in ranks if not run.feed.partition_times]
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert not spare.step()
        own.kill()
        with pytest.raises(DeadlineError, match="can't be reached"):
            spare.train(count(1))
    finally:
        for run in ranks:
            run.feed.close()
        made.close()


def test_a_partition_is_idle_once_it_was_read_to_its_end(broker):
    """One that never had a row too: with a quorum of 1.0 it doesn't hold back the others."""
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(i) for i in range(4)])
    with Run(source(broker, topic), idle_timeout_s=0.5) as run:
        run.train(count(4))
        assert run.feed.event_time([]) == (None, False)
        eventually(lambda: run.step() or run.feed.event_time([]) == (1003.0, False))
        assert run.feed.idle_partitions == [split_of(topic, 1)]
        eventually(lambda: run.step() or run.feed.event_time([]) == (1003.0, True))


def test_a_partition_behind_offsets_without_messages_is_idle_too(broker, topic):
    produce(broker, topic, [row(0)])
    broker.control(f"gap {topic} 0 4")
    with Run(source(broker, topic), idle_timeout_s=0.5) as run:
        run.train(count(1))
        eventually(lambda: run.step() or run.feed.idle_partitions == [split_of(topic)])


def test_a_partition_with_a_backlog_isnt_idle_however_silent(broker):
    """Fetches of it fail for longer than the idle timeout; the watermark waits for its rows."""
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(i) for i in range(4)])
    produce(broker, topic, [row(500)], partition=1)
    broker.control(f"err fetch {NOT_LEADER} 1000")
    try:
        with Run(source(broker, topic, client={**IMPATIENT, "retry.backoff.ms": 50}), idle_timeout_s=0.2) as run:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                assert not run.step()
                assert run.feed.idle_partitions == []
                assert run.feed.event_time([]) == (None, False)
            broker.control("clear")
            run.train(count(5))
    finally:
        broker.control("clear")


def test_nothing_is_idle_for_long_while_the_cluster_is_away(own, monkeypatch):
    monkeypatch.setattr("tidemill.data.sources.kafka_watch._FRESH_S", 1.5)
    topic = new_topic(own)
    produce(own, topic, [row(0)])
    with Run(source(own, topic, client=IMPATIENT), idle_timeout_s=0.3) as run:
        run.train(count(1))
        eventually(lambda: run.step() or run.feed.idle_partitions != [])
        own.kill()
        eventually(lambda: run.step() or run.feed.idle_partitions == [])
        own.start()
        eventually(lambda: run.step() or run.feed.idle_partitions != [])


def test_a_pause_longer_than_any_group_would_allow_costs_nothing(broker, topic):
    """DCL 9.4: a checkpoint or an evaluation takes long, with enough read ahead that nothing is polled meanwhile."""
    produce(broker, topic, [row(i) for i in range(40)])
    client = {**IMPATIENT, "session.timeout.ms": 1000, "heartbeat.interval.ms": 300, "max.poll.interval.ms": 1000}
    with Run(source(broker, topic, group_id="paused", client=client), depth=2) as run:
        run.train(count(8))
        time.sleep(2.5)
        assert run.train(count(40)) == list(range(40))
        assert run.done == {f"{topic}:0": offsets((0, 40))}


def test_an_outage_is_told_once_and_its_end_too(own, caplog):
    topic = new_topic(own)
    produce(own, topic, [row(0)])
    client = {"fetch.wait.max.ms": 10, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
    with caplog.at_level(logging.INFO, logger="tidemill"), Run(source(own, topic, client=client)) as run:
        run.train(count(1))
        own.kill()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            run.step()
        own.start()
        produce(own, topic, [row(1)])
        run.train(count(2))
        eventually(lambda: run.step() or "it has passed" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("tidemill")]
    assert [line.partition(": ")[2].split("; ")[-1] for line in lines] == ["waiting for it to pass", "it has passed"], lines


CHILD = """
import logging, sys, time
from tests.data.kafka_topics import Run, count, source
from tidemill import logs
from tidemill.testing.broker import DevelopmentBroker
logs.set_up()
class Broker:
    bootstrap = sys.argv[1]
with Run(source(Broker, sys.argv[2], group_id="g", client={"reconnect.backoff.max.ms": 100})) as run:
    run.train(count(1))
    run.feed.saving()
    run.feed.committed()
    print("reading", flush=True)
    sys.stdin.readline()
    for _ in range(10):
        run.step()
    run.feed.committed()
    started = time.monotonic()
print(f"closed {time.monotonic() - started:.1f}")
"""


def test_the_client_says_nothing_of_its_own_on_stderr_and_closing_has_a_deadline(own):
    """Committing, reading and closing with the broker gone."""
    topic = new_topic(own)
    produce(own, topic, [row(0)])
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), own.bootstrap, topic],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "reading\n"
        own.kill()
        out, err = child.communicate("go\n", timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, err
    assert float(out.split()[-1]) < 15
    lines = err.splitlines()
    assert not [line for line in lines if "rdkafka" in line or line.startswith("%")], err
    assert len(lines) <= 3, err


def test_lag_behind_a_pause_is_read_from_where_it_was(broker, topic):
    """Many small messages, more than fit into the queue of what is read ahead."""
    produce(broker, topic, [row(i) for i in range(3000)])
    with Run(source(broker, topic, client=IMPATIENT), batch_size=500, depth=1) as run:
        assert run.train(count(3000)) == list(range(3000))
    with closing(source(broker, topic)) as made:
        assert made.discover()[0].id == split_of(topic)
