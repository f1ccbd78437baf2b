"""The development broker when things go wrong: kills, torn files, injected faults, senseless bytes, two brokers."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill.errors import TidemillError
from tidemill.testing.broker import DevelopmentBroker

TIMEOUT_S = 20.0
IMPATIENT = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 20, "log_level": 0}


def create_topic(broker: DevelopmentBroker, name: str, num_partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, **IMPATIENT})
    admin.create_topics([NewTopic(name, num_partitions, 1)])[name].result(TIMEOUT_S)


def open_producer(broker: DevelopmentBroker, **settings: object) -> Producer:
    renamed = {name.replace("_", "."): value for name, value in settings.items()}
    return Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 1, **IMPATIENT, **renamed})


def produce(broker: DevelopmentBroker, topic: str, values: list[str]) -> None:
    producer = open_producer(broker)
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(TIMEOUT_S) == 0


def read_all(broker: DevelopmentBroker, topic: str, partition: int = 0) -> list[str]:
    """Everything up to the high watermark."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "reader", **IMPATIENT})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), TIMEOUT_S)
        consumer.assign([TopicPartition(topic, partition, low)])
        values: list[str] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(values) < high - low and time.monotonic() < deadline:
            values += [m.value().decode() for m in consumer.consume(1000, 0.5) if m.error() is None]
        return values
    finally:
        consumer.close()


def test_an_idempotent_producer_outlives_three_kills(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events", 2)
        producer = open_producer(broker, enable_idempotence=True, message_timeout_ms=60_000)
        failed: list[object] = []
        sent = 0
        for cycle in range(4):
            until = time.monotonic() + 0.6
            while time.monotonic() < until:
                for _ in range(20):
                    producer.produce(
                        "events",
                        str(sent),
                        partition=sent % 2,
                        on_delivery=lambda error, _: failed.append(error) if error else None,
                    )
                    sent += 1
                producer.poll(0.002)
            if cycle < 3:
                broker.kill()
                producer.poll(0)
                broker.restart()
        assert producer.flush(TIMEOUT_S) == 0
        assert failed == []
        assert sent > 100
        for partition in (0, 1):
            assert read_all(broker, "events", partition) == [str(n) for n in range(partition, sent, 2)]


def test_a_lost_answer_does_not_double_what_an_idempotent_producer_sent(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        producer = open_producer(broker, enable_idempotence=True)
        broker.control("err produce -2 2")
        for value in ("a", "b", "c"):
            producer.produce("events", value)
        assert producer.flush(TIMEOUT_S) == 0
        assert read_all(broker, "events") == ["a", "b", "c"]
        assert json.loads(broker.control("stats"))["produce"] >= 1


def test_acknowledged_data_topics_and_offsets_are_there_after_a_kill(tmp_path):
    with DevelopmentBroker(tmp_path, fsync=True) as broker:
        create_topic(broker, "events")
        produce(broker, "events", ["a", "b"])
        settings = {"bootstrap.servers": broker.bootstrap, "group.id": "g", **IMPATIENT}
        consumer = Consumer(settings)
        consumer.commit(offsets=[TopicPartition("events", 0, 1)], asynchronous=False)
        consumer.close()
        bootstrap = broker.bootstrap
        broker.restart()
        assert broker.bootstrap == bootstrap
        consumer = Consumer(settings)
        assert consumer.committed([TopicPartition("events", 0)], TIMEOUT_S)[0].offset == 1
        consumer.close()
        produce(broker, "events", ["c"])
        assert read_all(broker, "events") == ["a", "b", "c"]


def test_a_torn_tail_is_cut_off_and_writing_goes_on(tmp_path):
    log = tmp_path / "topics" / "events" / "0.log"
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        produce(broker, "events", ["a"])
        whole = log.stat().st_size
        produce(broker, "events", ["torn"])
        broker.kill()
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size - 3)
        broker.restart()
        assert log.stat().st_size == whole
        assert "cut off" in broker.log_path.read_text()
        produce(broker, "events", ["b"])
        assert read_all(broker, "events") == ["a", "b"]


def test_injected_errors_and_dropped_requests_are_retried_by_the_client(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        broker.control("err 0 6 2")  # NOT_LEADER_FOR_PARTITION
        broker.control("err produce -1 1")
        broker.control("err fetch 6 1")
        produce(broker, "events", ["a"])
        assert read_all(broker, "events") == ["a"]
        assert json.loads(broker.control("stats"))["produce"] == 3  # two refused, one stored; the dropped one isn't counted


def test_round_trip_time_is_injected(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        producer = open_producer(broker)
        producer.produce("events", "warm")
        assert producer.flush(TIMEOUT_S) == 0
        broker.control("rtt 300")
        started = time.monotonic()
        producer.produce("events", "slow")
        assert producer.flush(TIMEOUT_S) == 0
        assert time.monotonic() - started >= 0.3


def test_a_broker_that_is_down_comes_up_with_its_data(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        broker.control("down")
        producer = open_producer(broker)
        producer.produce("events", "patient")
        assert producer.flush(0.5) == 1
        broker.control("up")
        assert producer.flush(TIMEOUT_S) == 0
        assert read_all(broker, "events") == ["patient"]


@pytest.mark.parametrize("restart", [False, True])
def test_offsets_without_a_message_are_passed_and_kept(tmp_path, restart):
    """What compaction and transactions leave: a consumer that reads to the end gets beyond them."""
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        produce(broker, "events", ["a"])
        broker.control("gap events 0 5")
        produce(broker, "events", ["b"])
        broker.control("marker events 0 commit")
        broker.control("marker events 0 abort")
        if restart:
            broker.restart()
        settings = {"group.id": "g", "enable.partition.eof": True, "check.crcs": True, **IMPATIENT}
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, **settings})
        try:
            consumer.assign([TopicPartition("events", 0, 0)])
            seen: list[tuple[int | None, str]] = []
            deadline = time.monotonic() + TIMEOUT_S
            while not seen or seen[-1][1] != "end":
                assert time.monotonic() < deadline
                seen += [(m.offset(), "end" if m.error() else m.value().decode()) for m in consumer.consume(10, 0.1)]
        finally:
            consumer.close()
        assert seen == [(0, "a"), (6, "b"), (9, "end")]


def topic_id(broker: DevelopmentBroker, name: str) -> str:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, **IMPATIENT})
    return str(admin.describe_topics(TopicCollection([name]))[name].result(TIMEOUT_S).topic_id)


def test_a_topic_made_anew_has_another_id_and_keeps_it(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        create_topic(broker, "events")
        first = topic_id(broker, "events")
        broker.restart()
        assert topic_id(broker, "events") == first
        admin = AdminClient({"bootstrap.servers": broker.bootstrap, **IMPATIENT})
        admin.delete_topics(["events"])["events"].result(TIMEOUT_S)
        create_topic(broker, "events")
        assert topic_id(broker, "events") != first


def test_a_wrong_control_command_says_what_there_is(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        for command in ("explode", "rtt", "rtt fast", "err nothing 1 1", "err 0 1", "gap events 9 1", "marker events 0 maybe"):
            with pytest.raises(TidemillError, match="commands: rtt MS"):
                broker.control(command)
        assert broker.control("rtt 0") == "ok"


def test_senseless_bytes_end_their_own_connection_only(tmp_path):
    generator = random.Random(7)
    with DevelopmentBroker(tmp_path, max_request_bytes=100_000) as broker:
        create_topic(broker, "events")
        for number in range(300):
            api = number % 40
            body = struct.pack(">hhi", api, generator.randrange(-1, 8), number) + generator.randbytes(number)
            send(broker, struct.pack(">i", len(body)) + body)
        send(broker, b"GET / HTTP/1.1\r\n\r\n")
        send(broker, struct.pack(">i", 4) + b"\0\0")  # ends inside a request
        produce(broker, "events", ["a"])
        assert read_all(broker, "events") == ["a"]


@pytest.mark.parametrize("length", [100_001, 2**31 - 1, -1])
def test_a_request_of_impossible_length_closes_the_connection(tmp_path, length):
    with (
        DevelopmentBroker(tmp_path, max_request_bytes=100_000) as broker,
        socket.create_connection(("127.0.0.1", broker.port), timeout=TIMEOUT_S) as connection,
    ):
        connection.sendall(struct.pack(">i", length))
        assert connection.recv(1) == b""
        assert f"a request of {length} bytes; the limit is 100000" in broker.log_path.read_text()


def send(broker: DevelopmentBroker, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", broker.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(data)


def test_a_second_broker_on_the_folder_is_refused(tmp_path):
    with DevelopmentBroker(tmp_path) as broker:
        with pytest.raises(TidemillError, match=rf"in use by another development broker \(process {broker.pid}\)"):
            DevelopmentBroker(tmp_path)
        create_topic(broker, "still-alive")


def test_a_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TidemillError, match=f"can't listen on 127.0.0.1:{port}"):
            DevelopmentBroker(tmp_path, port=port)


def test_stopping_is_clean_and_can_be_repeated(tmp_path):
    broker = DevelopmentBroker(tmp_path)
    try:
        assert broker.pid is not None
        broker.stop()
        broker.stop()
        assert broker.pid is None
        assert not (tmp_path / "broker.json").exists()
        assert "Traceback" not in broker.log_path.read_text()
    finally:
        broker.kill()


def test_the_broker_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import sys, time; from tidemill.testing.broker import DevelopmentBroker; "
        "print(DevelopmentBroker(sys.argv[1]).port, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert listens(port)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    deadline = time.monotonic() + TIMEOUT_S
    while listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionError:
        return False
    return True
