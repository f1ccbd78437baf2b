"""Rows as messages of a topic: all of a rank's, or, where the cluster has transactions, none."""

from __future__ import annotations

import io
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, Literal

import polars as pl
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from pydantic import Field

from tidemill.config.base import Positive
from tidemill.config.kafka_uri import split_kafka_uri
from tidemill.contracts.output import OutputManifest
from tidemill.data.sources.kafka_client import client_log, without_secrets
from tidemill.data.writers.output import Columns, Json, Output, OutputConfig
from tidemill.errors import ConfigError, DataError, DeadlineError, SchemaError, StorageError
from tidemill.logs import log

# Of a million messages only those that fail are worth a call into Python.
_OURS = {"enable.idempotence": True, "acks": "all", "delivery.report.only.error": True}
# The most that brokers allow by default: all ranks' rows have to be delivered within it.
_TRANSACTION_MS = 900_000
_LARGEST_MESSAGE = 900_000
# Nothing is called back while all goes well, so a wait for room in the queue is never woken early.
_POLL_S = 0.01
_POLL_EVERY = 1000
_OF_TRANSACTIONS = ("transactional.id", "transaction.timeout.ms")
_NO_TRANSACTIONS = {
    KafkaError._UNSUPPORTED_FEATURE,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_CONNECT_TIMEOUT_S = 30.0


class KafkaOutputConfig(OutputConfig):
    """A topic: `kafka://host:port[,host:port]/topic?message.format=json&k=v`; other options go to librdkafka untouched."""

    rows_per_message: Positive = 1000
    """Rows in an Arrow message, or fewer if it would become too large. A JSON message holds one row."""
    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Longest wait for a message to be acknowledged, and for a transaction to end."""


class KafkaOutput(Output):
    """Each rank's rows become messages, Arrow streams as the source reads them by default, or one JSON object a row.

    Until all ranks have all rows they wait on this machine's disk, so a run that fails before that leaves nothing. Then a rank
    sends its rows in one transaction, which it commits once all ranks have delivered theirs: readers of committed messages see
    all rows of a rank or none. A cluster without transactions shows messages as they come; a failure in between is an error that
    says how many are there. A message is never there twice. A topic only grows: nothing is overwritten.
    """

    kind = "kafka"
    Config = KafkaOutputConfig
    replaces = False

    def __init__(self, config: KafkaOutputConfig) -> None:
        self._config = config
        self._brokers, self._topic, self._client, message_format = _parse(config.path)
        self.place = f"kafka://{self._brokers}/{self._topic}"
        self._encode = _json_messages if message_format == "json" else self._arrow_messages
        self._message_format = message_format
        self._columns = Columns(self.kind)
        self._messages = _MessageFile()
        self._rows = 0
        self._transaction: Producer | None = None
        self._outcome = _Outcome()

    def check(self, schema: pa.Schema | None) -> None:
        if self._config.overwrite:
            raise ConfigError(f"{self.place}: a topic can't be overwritten; leave --overwrite out, or name a new topic")
        for field in schema or ():
            if self._message_format == "json" and not _has_json(field.type):
                raise SchemaError(f"{self.place}: column {field.name!r} is {field.type}, which JSON can't hold; use Arrow messages")
        admin = AdminClient({**self._client, "bootstrap.servers": self._brokers}, logger=client_log)
        try:
            topics = admin.list_topics(timeout=min(_CONNECT_TIMEOUT_S, self._config.timeout_s)).topics
        except KafkaException as error:
            raise DeadlineError(f"{self.place}: no broker answers: {self._shown(error)}") from None
        if self._topic not in topics:
            raise DataError(f"{self.place}: there is no such topic; create it with as many partitions as its readers need")

    def write(self, table: pa.Table) -> None:
        for message in self._encode(self._columns.conform(table)):
            if len(message) > _LARGEST_MESSAGE:
                raise DataError(f"{self.place}: a row makes a message of {len(message)} bytes; {_LARGEST_MESSAGE} is the most")
            self._messages.add(message)
        self._rows += table.num_rows

    def deliver(self, begun: Json, rank: int) -> Json:
        if self._rows:
            self._transaction = self._begin_transaction()
        if self._transaction is not None:
            self._send(self._transaction)
        return {"rows": self._rows}

    def commit(self, begun: Json, receipts: Sequence[Json]) -> OutputManifest:
        return OutputManifest(rows=sum(int(receipt["rows"]) for receipt in receipts), files=[])

    def settle(self) -> None:
        """Commit this rank's transaction; without transactions, send its messages."""
        if self._transaction is not None:
            self._commit_transaction(self._transaction)
            self._transaction = None
        elif self._rows:
            settings = {key: value for key, value in self._settings().items() if key not in _OF_TRANSACTIONS}
            self._send(Producer(settings, logger=client_log))
        self._rows = 0

    def abort(self) -> None:
        self._messages.close()
        if self._transaction is None:
            return
        producer, self._transaction = self._transaction, None
        try:
            producer.abort_transaction(self._config.timeout_s)
        except KafkaException as error:
            # The broker ends it by itself in time.
            log.warning("%s: its transaction wasn't aborted: %s", self.place, self._shown(error))

    def _settings(self) -> dict[str, Any]:
        return {
            **self._client,
            **_OURS,
            "bootstrap.servers": self._brokers,
            "delivery.timeout.ms": int(self._config.timeout_s * 1000),
            "on_delivery": self._outcome.take,
        }

    def _begin_transaction(self) -> Producer | None:
        """A producer in a transaction; None if the cluster has none for us."""
        prefix = self._client.get("transactional.id", "tidemill")
        settings = {
            "transaction.timeout.ms": _TRANSACTION_MS,
            **self._settings(),
            # A name of its own for each run and rank: two runs into one topic don't throw each other out.
            "transactional.id": f"{prefix}-{time.time_ns():x}-{id(self):x}",
        }
        producer = Producer(settings, logger=client_log)
        try:
            producer.init_transactions(min(_CONNECT_TIMEOUT_S, self._config.timeout_s))
            producer.begin_transaction()
        except KafkaException as error:
            if error.args[0].code() not in _NO_TRANSACTIONS:
                raise StorageError(f"{self.place}: no transaction: {self._shown(error)}") from None
            log.warning("%s: no transactions (%s); rows become visible as they are sent", self.place, self._shown(error))
            return None
        return producer

    def _send(self, producer: Producer) -> None:
        """Send all messages, and wait until each is acknowledged. Raises StorageError for the first that isn't."""
        outcome = self._outcome
        sent = 0
        for sent, message in enumerate(self._messages.read(), start=1):
            while not self._produce(producer, message):
                producer.poll(_POLL_S)
            if sent % _POLL_EVERY == 0:
                producer.poll(0)
            if outcome.failure:
                break
        # Each message has its own deadline; this one is only for a client that is stuck.
        left = producer.flush(self._config.timeout_s + _CONNECT_TIMEOUT_S)
        if outcome.failure or left:
            why = without_secrets(self._client, outcome.failure or "no answer in time")
            raise StorageError(f"{self.place}: {outcome.failures + left} of {sent} messages weren't delivered: {why}")

    def _produce(self, producer: Producer, message: bytes) -> bool:
        """Hand a message to the client; False while its queue is full, which it is at most until messages time out."""
        try:
            producer.produce(self._topic, message)
        except BufferError:
            return False
        except KafkaException as error:
            self._outcome.take(error.args[0], None)
        return True

    def _commit_transaction(self, producer: Producer) -> None:
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            try:
                # The same call again settles what a time-out left open.
                producer.commit_transaction(max(1.0, deadline - time.monotonic()))
                return
            except KafkaException as error:
                cause = error.args[0]
                if cause.retriable() and time.monotonic() < deadline:
                    continue
                what = (
                    "whether this rank's rows are in the topic isn't known"
                    if cause.retriable()
                    else "this rank's rows aren't there"
                )
                raise StorageError(f"{self.place}: committing the transaction: {self._shown(error)}; {what}") from None

    def _arrow_messages(self, table: pa.Table) -> Iterator[bytes]:
        size = self._config.rows_per_message
        for start in range(0, table.num_rows, size):
            yield from _arrow_messages(table.slice(start, size))

    def _shown(self, error: KafkaException) -> str:
        return without_secrets(self._client, error.args[0].str())


class _Outcome:
    """Messages that couldn't be delivered: how many, and why the first. Called back by the thread that polls."""

    def __init__(self) -> None:
        self.failures = 0
        self.failure = ""

    def take(self, error: KafkaError | None, message: Message | None) -> None:
        if error is not None:
            self.failures += 1
            self.failure = self.failure or error.str()


class _MessageFile:
    """Messages in a temporary file, each behind its length, which is gone with the process."""

    _LENGTH = struct.Struct("<I")

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def add(self, message: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="tidemill-output-")  # noqa: SIM115 - closed by `close`
        self._file.write(self._LENGTH.pack(len(message)))
        self._file.write(message)

    def read(self) -> Iterator[bytes]:
        """All messages, from the first."""
        if self._file is None:
            return
        self._file.seek(0)
        while length := self._file.read(self._LENGTH.size):
            yield self._file.read(self._LENGTH.unpack(length)[0])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def _parse(address: str) -> tuple[str, str, dict[str, str], Literal["json", "arrow"]]:
    """Brokers, topic, librdkafka's settings and the messages' format. Raises ConfigError; it repeats no values of settings."""
    place = address.partition("?")[0]
    try:
        brokers, topic, options = split_kafka_uri(address)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    message_format = options.pop("message.format", "arrow")
    if message_format not in ("json", "arrow"):
        raise ConfigError(f"{place}: message.format is json or arrow")
    if "," in topic:
        raise ConfigError(f"{place}: name one topic to write to")
    mine = sorted(options.keys() & {*_OURS, "bootstrap.servers", "delivery.timeout.ms", "group.id", "start.timestamp.ms"})
    if mine:
        raise ConfigError(f"{place}: {mine[0]} can't be set for an output")
    try:
        Producer({**options, **_OURS}, logger=client_log)
    except KafkaException as error:
        raise ConfigError(f"{place}: {without_secrets(options, error.args[0].str())}") from None
    return brokers, topic, options, "json" if message_format == "json" else "arrow"


def _json_messages(table: pa.Table) -> Iterator[bytes]:
    """One object a row; NaN and infinities become null, which is all that JSON has."""
    lines = io.BytesIO()
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    frame.write_ndjson(lines)
    return iter(lines.getvalue().splitlines())


def _arrow_messages(table: pa.Table) -> Iterator[bytes]:
    """One stream, or several of fewer rows if it would be too large."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    if sink.tell() <= _LARGEST_MESSAGE or table.num_rows <= 1:
        yield sink.getvalue()
        return
    half = table.num_rows // 2
    yield from _arrow_messages(table.slice(0, half))
    yield from _arrow_messages(table.slice(half))


def _has_json(kind: Any) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        return _has_json(kind.value_type)
    return not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_map(kind) or types.is_struct(kind))
