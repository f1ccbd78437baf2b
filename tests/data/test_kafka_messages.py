"""Formats, schema changes and dead letters from a broker: exact positions, what is kept of what, and restarts (DCL 9.8, 9.9)."""

import base64
import gzip
import io
import json
import re
import time

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tests.data.kafka_topics import COLUMNS, DEADLINE_S, MESSAGE, count, new_topic, produce, row, split_of
from tests.data.messages.test_protobuf import Field, maker, row_file
from tests.data.test_dead_letters import Kept
from tidemill.config.data import KafkaConfig
from tidemill.config.messages import SchemaRegistryConfig
from tidemill.data.assignment import plan
from tidemill.data.dead_letters import DeadLetter, DeadLetterFile, DeadLetters
from tidemill.data.loader import Loader
from tidemill.data.progress import Progress
from tidemill.data.sources.kafka import KafkaSource
from tidemill.data.sources.kafka_dead_letters import DeadLetterTopic
from tidemill.errors import ConfigError, DataError, DeadlineError, SchemaError
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.schema_registry import DevelopmentRegistry

AVRO = {
    "type": "record",
    "name": "Row",
    "fields": [{"name": "event_id", "type": "string"}, {"name": "event_time", "type": "double"}],
}


def source(broker, topic, *, letters=None, **config):
    client = {"log_level": 0, "fetch.wait.max.ms": 10}
    return KafkaSource(
        KafkaConfig(brokers=broker.bootstrap, topic=(topic,), client=client, **config), COLUMNS, dead_letters=letters
    )


def stream(*tables):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def table(*numbers):
    return pa.Table.from_pylist([row(number) for number in numbers])


class Life:
    """One process: what it trained, and where each row lay."""

    def __init__(self, source, progress=None, *, letters=None, transform=None, batch_size=4):
        self.source, self.progress = source, progress or Progress()
        self.rows, self.places = [], []
        _, assigned = plan(source.discover(), None, self.progress.done, 1, 0)
        self.loader = Loader(
            source,
            assigned,
            batch_size=batch_size,
            transform=transform or (lambda table, size: [int(key[1:]) for key in table.column("event_id").to_pylist()]),
            max_wait_s=0.1,
            dead_letters=letters,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loader.close()
        self.source.close()

    def train(self, until):
        deadline = time.monotonic() + DEADLINE_S
        while not until(self):
            assert time.monotonic() < deadline, f"only {self.rows} came"
            delivery = self.loader.take(0.2)
            if delivery is not None:
                self.rows.extend(delivery.payload)
                at = [self.source.place_of(*delivery.provenance.locate(number)) for number in range(len(delivery.payload))]
                self.places.extend((place["offset"], place["row"]) for place in at)
                self.progress.advance(delivery.provenance)
        return self.rows


def test_every_format_keeps_rows_with_their_offsets(broker, tmp_path):
    """One row a message, embedded line breaks, several rows a message, none at all."""
    avro = tmp_path / "row.avsc"
    avro.write_text(json.dumps(AVRO))

    def encoded(number):
        data = io.BytesIO()
        fastavro.schemaless_writer(data, AVRO, row(number))
        return data.getvalue()

    proto = row_file(("event_id", Field.TYPE_STRING), ("event_time", Field.TYPE_DOUBLE))
    descriptors = tmp_path / "row.desc"
    descriptors.write_bytes(FileDescriptorSet(file=[proto]).SerializeToString())
    ones = [(offset, 0) for offset in range(5)]
    several = [(0, 0), (0, 1), (2, 0), (3, 0), (3, 1)]
    cases = {
        "json": ([[row(0), row(1)], [], json.dumps(row(2), indent=1).encode(), [row(3), row(4)]], several, {}),
        "arrow": (
            [stream(table(0), table(1)), stream(table(0).slice(0, 0)), stream(table(2)), stream(table(3, 4))],
            several,
            {},
        ),
        "avro": ([encoded(number) for number in range(5)], ones, {"schema_file": str(avro)}),
        "protobuf": (
            [maker(proto)(**row(number)).SerializeToString() for number in range(5)],
            ones,
            {"schema_file": str(descriptors)},
        ),
    }
    for name, (messages, places, more) in cases.items():
        topic = new_topic(broker)
        produce(broker, topic, messages)
        with Life(source(broker, topic, message_format=name, **more), batch_size=2) as life:
            assert life.train(count(5)) == [0, 1, 2, 3, 4]
            assert life.places == places, name
            assert life.progress.done[split_of(topic)].intervals == ((0, len(messages) * MESSAGE),)


def test_avro_and_protobuf_by_a_registry(broker):
    """DCL 9.8: a column comes and a type widens while the stream runs."""
    old = row_file(("event_id", Field.TYPE_STRING), ("event_time", Field.TYPE_FLOAT))
    new = row_file(("event_id", Field.TYPE_STRING), ("event_time", Field.TYPE_DOUBLE), ("more", Field.TYPE_INT32))
    wide = {**AVRO, "fields": [{"name": "more", "type": ["null", "string"]}, *AVRO["fields"]]}
    with DevelopmentRegistry() as registry:
        settings = SchemaRegistryConfig(url=registry.url)

        def avro(schema, number):
            data = io.BytesIO()
            fastavro.schemaless_writer(data, schema, {"more": None, **row(number)})
            return registry.header(registry.register("avro", schema)) + data.getvalue()

        def protobuf(file, number):
            text = registry.protobuf_text(file.SerializeToString())
            return (
                registry.header(registry.register("proto", text, "PROTOBUF"), [0]) + maker(file)(**row(number)).SerializeToString()
            )

        for name, encode, first, second in (("avro", avro, AVRO, wide), ("protobuf", protobuf, old, new)):
            topic = new_topic(broker)
            produce(broker, topic, [encode(first, 0), encode(second, 1), encode(first, 2), encode(second, 3)])
            with Life(source(broker, topic, message_format=name, schema_registry=settings)) as life:
                assert life.train(count(4)) == [0, 1, 2, 3]
                assert life.places == [(offset, 0) for offset in range(4)]


def test_a_registry_that_is_down_is_no_poison(broker, topic):
    with DevelopmentRegistry() as registry:
        settings = SchemaRegistryConfig(url=registry.url, timeout_s=0.2)
    produce(broker, topic, [b"\0\0\0\0\1x"])
    letters = DeadLetters(max_poison=0, window=10)
    with (
        Life(source(broker, topic, message_format="avro", schema_registry=settings, letters=letters)) as life,
        pytest.raises(DeadlineError, match="schema registry"),
    ):
        life.train(count(1))
    assert letters.count == 0
    assert not life.progress.done


def test_a_schema_that_lost_a_column_names_topic_partition_offset_and_column(broker, topic):
    """DCL 9.8."""
    produce(broker, topic, [stream(table(0, 1, 2, 3)), stream(table(4).select(["event_time"])), stream(table(5))])
    with Life(source(broker, topic, message_format="arrow")) as life:
        with pytest.raises(SchemaError, match=rf"kafka {topic}:0, offset 1: column 'event_id' isn't in the message"):
            life.train(count(5))
        # Whoever starts again meets it again: it is for a person to decide.
        assert not life.progress.done
    with Life(source(broker, topic, message_format="arrow", on_schema_error="skip")) as life:
        assert life.train(count(5)) == [0, 1, 2, 3, 5]


WRONG = {
    "arrow in json": ("json", stream(table(0)), "an Arrow stream: kafka.message_format is json; set it to arrow"),
    "json in arrow": ("arrow", json.dumps(row(0)).encode(), "JSON: kafka.message_format is arrow; set it to json"),
    "json array in arrow": ("arrow", json.dumps([row(0)]).encode(), "JSON: kafka.message_format is arrow; set it to json"),
    "registry in json": ("json", b"\0\0\0\0\7" + json.dumps(row(0)).encode(), "began with a schema registry's header"),
    "avro file in json": ("json", b"Obj\1" + bytes(30), "an Avro file"),
    "gzip in json": ("json", gzip.compress(json.dumps(row(0)).encode()), "gzip"),
}


@pytest.mark.parametrize(("name", "message", "hint"), WRONG.values(), ids=WRONG)
def test_another_format_than_the_configured_one_is_told_as_such(broker, topic, name, message, hint):
    """In the error, and in the dead letter."""
    produce(broker, topic, [message])
    kept = Kept()
    letters = DeadLetters(max_poison=0, window=10, sink=kept)
    life = Life(source(broker, topic, message_format=name, letters=letters), letters=letters)
    with life, pytest.raises(DataError, match=f"it looks .*{re.escape(hint)}"):
        life.train(count(1))
    assert hint in kept.letters[0].reason


def test_garbage_looks_like_nothing_else(broker, topic):
    produce(broker, topic, [b"garbage", b"{", b"[1]"])
    kept = Kept()
    letters = DeadLetters(max_poison=2, window=10, sink=kept)
    with Life(source(broker, topic, letters=letters), letters=letters) as life, pytest.raises(DataError):
        life.train(count(1))
    assert not [letter for letter in kept.letters if "looks" in letter.reason]


def bad_labels(rows, size):
    """As the transform of a training job: rows that can't be examples."""
    numbers = [int(key[1:]) for key in rows.column("event_id").to_pylist()]
    for place, number in enumerate(numbers):
        if number % 10 == 7:
            raise DataError(f"label column 'label', row {place}: value 7 isn't in 0..1")
    return numbers


def test_messages_and_rows_are_kept_and_skipped_and_a_restart_goes_on_behind_them(broker, topic, tmp_path):
    """DCL 9.9: garbage, a tombstone, a wrong shape, and a row that can't become an example."""
    produce(
        broker, topic, [row(0), b"garbage", None, [row(6), row(7), row(8)], b"[1]", {"event_id": "e9", "event_time": "x"}, row(1)]
    )

    def live(number, progress=None):
        path = tmp_path / f"{number}.jsonl"
        letters = DeadLetters(max_poison=5, window=100, sink=DeadLetterFile(path, max_bytes=10**6, max_payload_bytes=10**6))
        return Life(source(broker, topic, letters=letters), progress, letters=letters, transform=bad_labels), letters, path

    first, letters, path = live(1)
    with first:
        assert first.train(count(4)) == [0, 6, 8, 1]
        assert first.places == [(0, 0), (3, 0), (3, 2), (6, 0)]
        assert first.progress.done[split_of(topic)].intervals == ((0, 7 * MESSAGE),)
        assert first.loader.counts.poison == letters.count == 5
    lines = sorted((json.loads(line) for line in path.read_bytes().splitlines()), key=lambda line: line["offset"])
    assert all(line["topic"] == topic and line["partition"] == 0 for line in lines)
    assert [(line["offset"], line["row"], line["column"]) for line in lines] == [
        (1, None, None),
        (2, None, None),
        (3, 1, None),
        (4, None, None),
        (5, None, "event_time"),
    ]
    assert base64.b64decode(lines[0]["payload_base64"]) == b"garbage"
    assert "tombstone" in lines[1]["reason"]
    assert lines[2]["values"] == row(7)
    assert lines[2]["reason"] == "label column 'label': value 7 isn't in 0..1"
    produce(broker, topic, [b"more", row(2)])
    second, letters, path = live(2, first.progress)
    with second:
        assert second.train(count(1)) == [2]
        assert letters.count == 1
    assert [json.loads(line)["offset"] for line in path.read_bytes().splitlines()] == [7]


def test_over_budget_names_the_first_offsets(broker, topic):
    """DCL 9.9: a clean failure; messages and rows count together."""
    produce(broker, topic, [row(0), b"garbage", row(7), b"[1]", row(1)])
    letters = DeadLetters(max_poison=2, window=100)
    with Life(source(broker, topic, letters=letters), letters=letters, transform=bad_labels) as life:
        with pytest.raises(DataError) as caught:
            life.train(count(2))
        for offset in (1, 3):
            assert f"topic {topic}, partition 0, offset {offset}" in str(caught.value)
        assert "max_poison allows 2" in str(caught.value)


def test_dead_letter_topic(broker, topic):
    """The message as it came, or the row as JSON; headers say where and why."""
    dead = new_topic(broker)
    produce(broker, topic, [b"garbage", None, [row(6), row(7)], row(1)])
    reading = source(broker, topic)
    letters = DeadLetters(max_poison=5, window=100, sink=DeadLetterTopic(reading.config, dead))
    with Life(source(broker, topic, letters=letters), letters=letters, transform=bad_labels) as life:
        assert life.train(count(2)) == [6, 1]
    reading.close()
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "test", "log_level": 0})
    consumer.assign([TopicPartition(dead, 0, 0)])
    try:
        messages = consumer.consume(3, DEADLINE_S)
    finally:
        consumer.close()
    assert [message.key().decode() for message in messages] == [f"{topic}:0:0:", f"{topic}:0:1:", f"{topic}:0:2:1"]
    assert [message.value() for message in messages[:2]] == [b"garbage", None]
    assert json.loads(messages[2].value()) == row(7)
    headers = {name: value.decode() for name, value in messages[2].headers()}
    reason = "label column 'label': value 7 isn't in 0..1"
    assert headers == {"topic": topic, "partition": "0", "offset": "2", "row": "1", "reason": reason}


def test_dead_letters_that_cannot_be_kept_stop_the_run(tmp_path):
    """Else their messages would be behind the next checkpoint, and nowhere."""
    with DevelopmentBroker(tmp_path) as broker:
        dead = new_topic(broker)
        config = KafkaConfig(brokers=broker.bootstrap, topic=("x",), outage_timeout_s=1.0, client={"log_level": 0})
        with pytest.raises(ConfigError, match=r"nowhere.*create it"):
            DeadLetterTopic(config, "nowhere")
        patient = DeadLetterTopic(config.model_copy(update={"outage_timeout_s": 600.0}), dead)
        letters = DeadLetters(max_poison=5, window=100, sink=DeadLetterTopic(config, dead))
    letter = DeadLetter({"topic": "x", "partition": 0, "offset": 1, "row": None}, "garbage")
    with pytest.raises(DeadlineError, match=rf"dead letters can't be kept in topic '{dead}'.* within 1 s"):
        letters.add([letter])
    assert letters.count == 0
    patient.close()
    with pytest.raises(DeadlineError, match="the run ends"):
        patient.keep([letter])
