"""Rows as messages: on the development broker, which has no transactions, and on an independent one, which has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tests.data.kafka_messages import committed_messages
from tests.data.kafka_topics import new_topic
from tests.data.noida import NOT_INSTALLED, PROGRAM, Noida
from tidemill.data.writers.kafka import KafkaOutput, KafkaOutputConfig
from tidemill.errors import ConfigError, DataError, DeadlineError, SchemaError, StorageError
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.output_contract import OutputContract, rows

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def transactional(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An independent implementation with transactions; its address."""
    if PROGRAM is None:
        pytest.skip(NOT_INSTALLED)
    running = Noida(tmp_path_factory.mktemp("noida") / "data")
    try:
        yield running.bootstrap
    finally:
        running.stop()


def make_topic(brokers: str, name: str, partitions: int = 1) -> str:
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    try:
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(DEADLINE_S)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
    return name


class KafkaContract(OutputContract):
    message_format = "arrow"

    def brokers(self) -> str:
        raise NotImplementedError

    def topic(self, directory: Path) -> str:
        return make_topic(self.brokers(), f"{directory.name}-{self.message_format}"[-100:])

    def make(self, directory: Path, *, overwrite: bool = False) -> KafkaOutput:
        address = f"kafka://{self.brokers()}/{self.topic(directory)}?message.format={self.message_format}"
        return KafkaOutput(KafkaOutputConfig(path=address, overwrite=overwrite, rows_per_message=7))

    def read(self, directory: Path) -> pa.Table | None:
        found = committed_messages(self.brokers(), self.topic(directory))
        if not found:
            return None
        if self.message_format == "json":
            return pa.Table.from_pylist([json.loads(message) for message in found], schema=rows(0, 0).schema)
        return pa.concat_tables([pa.ipc.open_stream(message).read_all() for message in found])


class TestKafka(KafkaContract):
    @pytest.fixture(autouse=True)
    def _start(self, broker: DevelopmentBroker) -> None:
        self._broker = broker

    def brokers(self) -> str:
        return self._broker.bootstrap


class TestTransactionalKafka(KafkaContract):
    message_format = "json"

    @pytest.fixture(autouse=True)
    def _start(self, transactional: str) -> None:
        self._brokers = transactional

    def brokers(self) -> str:
        return self._brokers


def output(brokers: str, topic: str, options: str = "", **settings: Any) -> KafkaOutput:
    return KafkaOutput(KafkaOutputConfig(path=f"kafka://{brokers}/{topic}{options}", **settings))


def test_rows_that_were_delivered_but_not_committed_are_never_seen(transactional: str) -> None:
    topic = make_topic(transactional, "aborted")
    made = output(transactional, topic)
    made.write(rows(0, 50))
    made.deliver({}, 0)
    assert committed_messages(transactional, topic) == []
    made.abort()
    assert committed_messages(transactional, topic) == []


@pytest.mark.parametrize("options", ["", "&transactional.id=scores"])
def test_without_transactions_it_says_so_and_nothing_shows_before_all_ranks_have_all_rows(
    broker: DevelopmentBroker, caplog: pytest.LogCaptureFixture, options: str
) -> None:
    topic = new_topic(broker)
    made = output(broker.bootstrap, topic, f"?message.format=json{options}")
    made.write(rows(0, 5))
    made.deliver({}, 0)
    assert committed_messages(broker.bootstrap, topic) == []
    assert "no transactions" in caplog.text
    made.settle()
    made.abort()
    assert [json.loads(message)["n"] for message in committed_messages(broker.bootstrap, topic)] == list(range(5))


def test_a_broker_that_goes_away_is_an_error_in_time(tmp_path: Path) -> None:
    with DevelopmentBroker(tmp_path) as broker:
        topic = new_topic(broker)
        made = output(broker.bootstrap, topic, timeout_s=1.5)
        made.check(rows(0, 1).schema)
        made.write(rows(0, 5))
        made.deliver({}, 0)
    with pytest.raises(StorageError, match=r"1 of 1 messages weren't delivered"):
        made.settle()
    made.abort()
    with pytest.raises(DeadlineError, match="no broker answers"):
        output(broker.bootstrap, topic, timeout_s=0.5).check(None)


def test_what_cant_be_written_is_refused_before_anything_is_computed(broker: DevelopmentBroker) -> None:
    topic = new_topic(broker)
    with pytest.raises(DataError, match="no such topic; create it"):
        output(broker.bootstrap, "nowhere").check(None)
    with pytest.raises(SchemaError, match=r"'raw' is binary.*Arrow"):
        output(broker.bootstrap, topic, "?message.format=json").check(pa.schema([("raw", pa.binary())]))
    output(broker.bootstrap, topic).check(pa.schema([("raw", pa.binary())]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("?message.format=xml", "message.format is json or arrow"),
        ("?group.id=g", "group.id can't be set"),
        ("?acks=1", "acks can't be set"),
        ("?no.such.setting=secret-value", "No such configuration property"),
    ],
)
def test_an_address_that_means_nothing_is_refused(options: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as refusal:
        output("h:1", "t", options)
    assert "secret-value" not in str(refusal.value)


def test_passwords_are_nowhere_to_be_seen() -> None:
    made = output("h:1", "t", "?sasl.mechanism=PLAIN&security.protocol=SASL_SSL&sasl.username=u&sasl.password=hush")
    assert "hush" not in made.place


def test_large_rows_make_smaller_arrow_messages_and_too_large_ones_an_error(broker: DevelopmentBroker) -> None:
    topic = new_topic(broker)
    made = output(broker.bootstrap, topic)
    made.write(pa.table({"text": ["x" * 100_000] * 30}))
    made.deliver({}, 0)
    made.settle()
    sizes = [pa.ipc.open_stream(message).read_all().num_rows for message in committed_messages(broker.bootstrap, topic)]
    assert sum(sizes) == 30
    assert len(sizes) > 3
    with pytest.raises(DataError, match="is the most"):
        made.write(pa.table({"text": ["x" * 1_000_000]}))
    made.abort()
