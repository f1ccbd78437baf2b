"""Rows from Kafka topics. One split a partition, read by manual assignment: no group membership, so nothing ever rebalances.

A position is `offset << 20 | row within the message`. One-row messages at consecutive offsets make one run of stride 2**20;
a message of several rows makes a run of stride 1. Positions that no message has (compacted, transaction markers) and messages
that can't be read are gaps, done with once a later row, or a run without rows, is trained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from confluent_kafka import (
    OFFSET_END,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from tidemill.config.data import KafkaConfig
from tidemill.data.assignment import Assigned
from tidemill.data.event_times import column_times
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.messages import ArrowDecoder, Decoded, Decoder, JsonDecoder
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import RawBatch, Run, Split, SplitId, keep_rows, largest, positions
from tidemill.errors import ConfigError, DataError, DeadlineError, SchemaError, SourceChangedError
from tidemill.logs import event, log

T = TypeVar("T")

ROW_BITS = 20
_MESSAGE = 1 << ROW_BITS
# What one read asks for: many small messages, or as many large ones as make a few batches. A read waits until it has them all
# or its time is over, and holds them all in memory.
_MAX_MESSAGES = 5000
_ROWS_PER_READ = 20_000
_FIRST_READ = 100
_CALL_TIMEOUT_S = 5.0
_TIMES_PER_CALL = 32
# Silence after an error is probed this often, to tell a topic without news from a cluster that can't be reached.
_PROBE_S = 1.0

# What clients make of a cluster that knows no identities: nothing, or 16 zero bytes in base 64.
_NO_TOPIC_ID = ("None", "A" * 22)

_OURS = {"enable.auto.commit": "false", "enable.auto.offset.store": "false", "auto.offset.reset": "error"}
_DEFAULTS = {
    "fetch.wait.max.ms": 50,
    "max.partition.fetch.bytes": 4 << 20,
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 16 << 10,
    "enable.metrics.push": False,
}
_TRANSIENT = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
}


class KafkaSource(Source):
    """Partitions of topics. `columns`: name and type of what to read (for JSON necessary; the event time's column has to be
    among them). `event_time_column`: a timestamp, or a number of Unix seconds; None: the messages' timestamps are meant.
    `start_at`: where partitions without progress start, at the first message that the broker has had since then (Unix seconds);
    None: at their earliest. The config's start_timestamp_ms goes before it."""

    kind = "kafka"
    bounded = False
    Config = KafkaConfig

    def __init__(
        self,
        config: KafkaConfig,
        columns: Mapping[str, pa.DataType] | None = None,
        *,
        event_time_column: str | None = None,
        start_at: float | None = None,
    ) -> None:
        _check(config, columns, event_time_column)
        self.config = config
        self.event_time_column = event_time_column
        self._start_at = start_at
        self._columns = columns
        self._call_timeout_s = min(_CALL_TIMEOUT_S, config.connect_timeout_s)
        self._client: Consumer | None = None

    def discover(self) -> list[Split]:
        """All partitions. Raises DataError for a topic that can't be read, DeadlineError if no broker answers."""
        splits: list[Split] = []
        for topic in self.config.topic:
            metadata = self.patiently(partial(self._consumer().list_topics, topic, self._call_timeout_s), f"topic {topic!r}")
            found = metadata.topics[topic]
            if found.error is not None or not found.partitions:
                raise DataError(f"kafka {self.config.brokers}: topic {topic!r}: {found.error or 'it has no partitions'}")
            topic_id = self._topic_id(topic)
            for partition in sorted(found.partitions):
                low, _ = self.bounds(topic, partition)
                fingerprint = {"cluster": metadata.cluster_id, "topic_id": topic_id, "earliest": low}
                splits.append(Split(SplitId(self.kind, f"{topic}:{partition}"), None, fingerprint))
        return splits

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        return self.open_all([Assigned(split, remaining, done)])

    def open_all(self, assigned: Sequence[Assigned]) -> SplitReader:
        """One consumer of all the rank's partitions. Raises SourceChangedError naming a partition whose progress doesn't fit it."""
        untouched = [part.split.id for part in assigned if not part.done]
        starts = self._starts(untouched)
        partitions: list[_Partition] = []
        for part in assigned:
            split = part.split.id
            topic, number = _topic_partition(split)
            position = part.done.first_gap(part.done.intervals[0][0]) if part.done else starts[split] << ROW_BITS
            offset = self.fit(split, position >> ROW_BITS)
            # What is read again of a message that was trained in part is left out by the rows that are done.
            partitions.append(_Partition(split, topic, number, offset, position >> ROW_BITS << ROW_BITS, part.done))
        return _PartitionsReader(self, partitions)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        for key in ("cluster", "topic_id"):
            was, found = fingerprint.get(key), split.fingerprint.get(key)
            if was is not None and found is not None and was != found:
                raise SourceChangedError(f"{split.id}: {key} was {was}, is {found}: this is another topic; its positions don't fit")
        was, found = fingerprint.get("earliest"), split.fingerprint.get("earliest")
        if was is not None and found is not None and found < was:
            raise SourceChangedError(f"{split.id}: the earliest offset was {was}, is {found}: the topic was made anew")

    def commit(self, done: Mapping[SplitId, IntervalSet]) -> None:
        """Show the group's dashboards how far a checkpoint has come: the first offset of each partition that isn't wholly done.
        Best effort: nothing reads it back, and failing is only logged."""
        if not self.config.group_id:
            return
        offsets = []
        for split, intervals in done.items():
            if split.kind == self.kind and intervals:
                topic, partition = _topic_partition(split)
                offsets.append(TopicPartition(topic, partition, intervals.first_gap(intervals.intervals[0][0]) >> ROW_BITS))
        try:
            if offsets:
                self._consumer().commit(offsets=offsets, asynchronous=True)
                # Nothing else polls this client, and what it logs waits for that.
                self._consumer().poll(0)
        except KafkaException as error:
            log.warning("kafka %s: offsets of group %s weren't committed: %s", self.config.brokers, self.config.group_id, error)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def decoder(self) -> Decoder:
        """A new decoder of the topics' messages."""
        if self._columns is None or self.config.message_format == "arrow":
            return ArrowDecoder(self._columns)
        return JsonDecoder(self._columns)

    def consumer(self, on_error: Callable[[KafkaError], None]) -> Consumer:
        """A new client of the cluster. `on_error` is called for what concerns no single partition, by the thread that polls."""
        settings = {
            **_DEFAULTS,
            **self.config.client,
            **_OURS,
            "bootstrap.servers": self.config.brokers,
            # The client wants one even where nothing is committed; manual assignment never joins it.
            "group.id": self.config.group_id or "tidemill",
            "error_cb": on_error,
        }
        try:
            return Consumer(settings, logger=_client_log)
        except KafkaException as error:
            raise ConfigError(f"kafka.client: {error.args[0].str()}") from None

    def patiently(self, call: Callable[[], T], what: str) -> T:
        """The call's result; errors that pass are tried again until `connect_timeout_s` is over (DeadlineError)."""
        until = time.monotonic() + self.config.connect_timeout_s
        pause = 0.1
        while True:
            try:
                return call()
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                if not _passes(error):
                    raise DataError(f"kafka {self.config.brokers}: {what}: {error.str()}") from None
                if time.monotonic() + pause > until:
                    waited = f"no answer within {self.config.connect_timeout_s:g} s"
                    raise DeadlineError(f"kafka {self.config.brokers}: {what}: {waited} ({error.str()})") from None
                time.sleep(pause)
                pause = min(2 * pause, 2.0)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """(earliest offset, the offset that the next message will have)."""
        where = TopicPartition(topic, partition)
        ask = partial(self._consumer().get_watermark_offsets, where, timeout=self._call_timeout_s)
        return self.patiently(ask, f"offsets of {topic}:{partition}")

    def fit(self, split: SplitId, offset: int) -> int:
        """Where reading can go on if it should at `offset`. Raises SourceChangedError for one beyond the end, and for expired
        messages if the config says so."""
        low, high = self.bounds(*_topic_partition(split))
        if offset > high:
            raise SourceChangedError(
                f"{split}: to go on at offset {offset}, but it ends at {high}: the topic was truncated or made anew"
            )
        if offset >= low:
            return offset
        lost = f"{split}: messages {offset} to {low - 1} ({low - offset}) expired before they were read"
        if self.config.on_data_loss == "fail":
            raise SourceChangedError(f"{lost}; set kafka.on_data_loss to earliest to go on without them")
        log.warning("%s; going on at %d", lost, low)
        event("source.data_loss", split=split.name, first=offset, lost=low - offset)
        return low

    def _starts(self, splits: Sequence[SplitId]) -> dict[SplitId, int]:
        """The first offset to read of partitions without progress."""
        start_ms = self._start_ms()
        starts: dict[SplitId, int] = {}
        if start_ms is None:
            return {split: self.bounds(*_topic_partition(split))[0] for split in splits}
        for first in range(0, len(splits), _TIMES_PER_CALL):
            some = splits[first : first + _TIMES_PER_CALL]
            asked = [TopicPartition(*_topic_partition(split), start_ms) for split in some]
            ask = partial(self._consumer().offsets_for_times, asked, timeout=self._call_timeout_s)
            found = self.patiently(ask, "offsets of the start time")
            for split, answer in zip(some, found, strict=True):
                if answer.error is not None:
                    raise DataError(f"{split}: no offset for time {start_ms} ms: {answer.error.str()}")
                # Nothing that late yet: the end, as a number, so that what arrives from here on is read.
                starts[split] = answer.offset if answer.offset != OFFSET_END else self.bounds(*_topic_partition(split))[1]
        return starts

    def _start_ms(self) -> int | None:
        if self.config.start_timestamp_ms is not None:
            return self.config.start_timestamp_ms
        return None if self._start_at is None else max(0, int(self._start_at * 1000))

    def _topic_id(self, topic: str) -> str | None:
        """None where the cluster is too old to give topics an identity, or doesn't let us ask."""
        settings = {**self.config.client, "bootstrap.servers": self.config.brokers}
        try:
            admin = AdminClient(settings, logger=_client_log)
            asked = admin.describe_topics(TopicCollection([topic]), request_timeout=self._call_timeout_s)
            topic_id = str(asked[topic].result(self._call_timeout_s).topic_id)
        except (KafkaException, TimeoutError):
            return None
        return None if topic_id in _NO_TOPIC_ID else topic_id

    def _consumer(self) -> Consumer:
        """The client for metadata; readers have their own."""
        if self._client is None:
            self._client = self.consumer(lambda error: None)
        return self._client


@dataclass(slots=True)
class _Partition:
    split: SplitId
    topic: str
    number: int
    offset: int
    """where to begin fetching"""
    next: int
    """the position up to which runs were given"""
    done: IntervalSet
    """rows not to give again; emptied once behind"""


class _PartitionsReader(SplitReader):
    def __init__(self, source: KafkaSource, partitions: Sequence[_Partition]) -> None:
        self._source = source
        self._decoder = source.decoder()
        self._partitions = list(partitions)
        self._index: dict[tuple[str | None, int | None], int] = {(p.topic, p.number): i for i, p in enumerate(partitions)}
        self._poison = 0
        self._trouble: KafkaError | None = None
        self._trouble_since = 0.0
        self._probe_at = 0.0
        self._fatal: KafkaError | None = None
        self._expired = False
        self._ask_for = _FIRST_READ
        self._consumer = source.consumer(self._on_error)
        self._assign()

    def read(self, timeout_s: float) -> RawBatch | None:
        messages: list[Message] = self._consumer.consume(self._ask_for, timeout_s)
        if any([message.error() is not None for message in messages]):  # noqa: C419 - a list is faster than a generator here
            for message in messages:
                self._on_partition_error(message, message.error())
            messages = [message for message in messages if message.error() is None]
        if self._expired:
            # A partition that ran into expired offsets can't be moved alone. All go back to what was given, so what came with
            # the error comes again.
            self._assign()
            messages = []
        if self._fatal is not None:
            raise DataError(f"kafka {self._source.config.brokers}: {self._fatal.str()}")
        if messages:
            self._trouble = None
            return self._batch(messages)
        if self._trouble is not None:
            self._probe()
        return None

    def close(self) -> None:
        self._consumer.close()

    def _assign(self) -> None:
        self._expired = False
        self._consumer.assign(
            [TopicPartition(part.topic, part.number, max(part.offset, part.next >> ROW_BITS)) for part in self._partitions]
        )

    def _batch(self, messages: Sequence[Message]) -> RawBatch:
        places = np.array([self._index[message.topic(), message.partition()] for message in messages])
        order = np.argsort(places, kind="stable")
        if len(self._partitions) > 1:
            messages = [messages[index] for index in order.tolist()]
        offsets = np.array([message.offset() for message in messages], np.int64)
        stamps = _stamps(messages)
        decoded = self._decoder.decode([message.value() for message in messages])
        rows_per_message = max(1.0, decoded.table.num_rows / len(messages))
        self._ask_for = min(_MAX_MESSAGES, max(1, int(_ROWS_PER_READ / rows_per_message)))
        edges = np.searchsorted(places[order], np.arange(len(self._partitions) + 1))
        self._check(decoded, offsets, edges)
        arrived_at = np.repeat(stamps, decoded.rows)
        event_time = self._event_time(decoded, arrived_at)
        ends = np.concatenate([[0], np.cumsum(decoded.rows)])
        runs: list[Run] = []
        for part, (start, stop) in zip(self._partitions, pairwise(edges.tolist()), strict=True):
            if start < stop:
                times = event_time[ends[start] : ends[stop]]
                runs.extend(message_runs(part.split, part.next, offsets[start:stop], decoded.rows[start:stop], times))
                part.next = runs[-1].stop
        return self._without_done(RawBatch(decoded.table, tuple(runs), event_time, arrived_at))

    def _event_time(self, decoded: Decoded, arrived_at: np.ndarray) -> np.ndarray:
        name = self._source.event_time_column
        if name is None:
            return arrived_at
        if name not in decoded.table.column_names:
            if not decoded.table.num_rows:
                return arrived_at
            raise SchemaError(f"kafka {', '.join(self._source.config.topic)}: no column {name!r} for the event time")
        return column_times(decoded.table.column(name), where=f"kafka {', '.join(self._source.config.topic)}: column {name!r}")

    def _without_done(self, batch: RawBatch) -> RawBatch:
        done = {part.split: part.done for part in self._partitions if part.done}
        if not done:
            return batch
        keep = np.concatenate([~done.get(run.split, NOTHING).holds(positions(run)) for run in batch.runs])
        for part in self._partitions:
            if part.done and part.next >= part.done.intervals[-1][1]:
                part.done = NOTHING
        return keep_rows(batch, keep)

    def _check(self, decoded: Decoded, offsets: np.ndarray, edges: np.ndarray) -> None:
        """Count and report messages that can't be read; refuse those that a position can't tell the rows of apart."""

        def where(index: int) -> tuple[_Partition, int]:
            return self._partitions[int(np.searchsorted(edges, index, side="right")) - 1], int(offsets[index])

        if len(decoded.rows) and decoded.rows.max() > _MESSAGE:
            part, offset = where(int(decoded.rows.argmax()))
            raise DataError(
                f"{part.split}, offset {offset}: {decoded.rows.max()} rows in one message; at most {_MESSAGE} can be told apart"
            )
        for index, why in sorted(decoded.poison.items()):
            part, offset = where(index)
            self._poison += 1
            log.warning("%s, offset %d: skipped, can't be read: %s", part.split, offset, why)
            event("source.poison", topic=part.topic, partition=part.number, offset=offset, why=why)
            if self._poison > self._source.config.max_poison:
                raise DataError(
                    f"{part.split}, offset {offset}: can't be read ({why}), the {self._poison}th such message in this run; "
                    f"kafka.max_poison allows {self._source.config.max_poison}"
                )

    def _on_error(self, error: KafkaError) -> None:
        """Called by librdkafka within `consume`."""
        if _passes(error):
            self._note_trouble(error)
        elif self._fatal is None:
            self._fatal = error

    def _on_partition_error(self, message: Message, error: KafkaError | None) -> None:
        if error is None or error.code() == KafkaError._PARTITION_EOF:
            return
        if _passes(error):
            self._note_trouble(error)
            return
        where = f"kafka {self._source.config.brokers}: {message.topic()}:{message.partition()}"
        if error.code() not in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise DataError(f"{where}: {error.str()}")
        part = self._partitions[self._index[message.topic(), message.partition()]]
        part.offset = self._source.fit(part.split, part.next >> ROW_BITS)
        self._expired = True

    def _note_trouble(self, error: KafkaError) -> None:
        if self._trouble is None:
            self._trouble_since = time.monotonic()
            log.warning("kafka %s: %s; waiting for it to pass", self._source.config.brokers, error.str())
        self._trouble = error

    def _probe(self) -> None:
        """Tell silence from an outage, and end an outage that lasts too long."""
        now = time.monotonic()
        if now < self._probe_at or not self._partitions:
            return
        part = self._partitions[0]
        try:
            self._consumer.get_watermark_offsets(TopicPartition(part.topic, part.number), timeout=_PROBE_S)
            self._trouble = None
        except KafkaException as exception:
            error = exception.args[0]
            if now - self._trouble_since > self._source.config.outage_timeout_s:
                waited = f"can't be reached for {now - self._trouble_since:.0f} s"
                raise DeadlineError(f"kafka {self._source.config.brokers}: {waited} ({error.str()})") from None
        self._probe_at = time.monotonic() + _PROBE_S


def message_runs(split: SplitId, start: int, offsets: np.ndarray, rows: np.ndarray, event_time: np.ndarray) -> list[Run]:
    """Runs of one partition's messages, covering all positions from `start` to behind the last message.

    `offsets`, `rows`: (messages,) int64, rising; `event_time`: (sum of rows,).
    """
    held = np.flatnonzero(rows)
    at, counts = offsets[held], rows[held]
    together = (counts[1:] == 1) & (counts[:-1] == 1) & (np.diff(at) == 1)
    runs: list[Run] = []
    row = 0
    for first, end in pairwise([0, *(np.flatnonzero(~together) + 1).tolist(), len(held)] if len(held) else [0]):
        begin, stop = int(at[first]) << ROW_BITS, (int(at[end - 1]) + 1) << ROW_BITS
        count = int(counts[first:end].sum())
        stride = _MESSAGE if counts[first] == 1 else 1
        runs.append(Run(split, start, stop, count, stride, begin - start, largest(event_time, row, row + count)))
        start = stop
        row += count
    stop = (int(offsets[-1]) + 1) << ROW_BITS
    if stop > start:
        runs.append(Run(split, start, stop, 0, _MESSAGE, stop - start))
    return runs


_client_log = logging.getLogger("tidemill.kafka")


def _stamps(messages: Sequence[Message]) -> np.ndarray:
    """(messages,) float64: when the broker, or the producer, says that each was written."""
    stamps = np.array([message.timestamp() for message in messages], np.float64).reshape(-1, 2)
    return np.where(stamps[:, 0] == TIMESTAMP_NOT_AVAILABLE, np.nan, stamps[:, 1] / 1000.0)


def _passes(error: KafkaError) -> bool:
    return not error.fatal() and (error.retriable() or error.code() in _TRANSIENT)


def _topic_partition(split: SplitId) -> tuple[str, int]:
    topic, _, partition = split.name.rpartition(":")
    return topic, int(partition)


def _check(config: KafkaConfig, columns: Mapping[str, pa.DataType] | None, event_time_column: str | None) -> None:
    if config.message_format == "json" and not columns:
        raise ConfigError("kafka.message_format json needs the columns' types; name the features' inputs, or send arrow messages")
    if columns is not None and event_time_column is not None and event_time_column not in columns:
        raise ConfigError(f"data_config.event_time.column: {event_time_column!r} isn't among the columns that are read")
    allowed = {"enable.auto.commit": "false", "enable.auto.offset.store": "false", "auto.offset.reset": "earliest"}
    hints = {"bootstrap.servers": "brokers", "group.id": "group_id", "auto.offset.reset": "start_timestamp_ms"}
    for key, value in config.client.items():
        if key in hints | allowed and str(value).lower() != allowed.get(key):
            instead = f"kafka.{hints[key]} says that" if key in hints else "positions are kept in checkpoints, not in the group"
            raise ConfigError(f"kafka.client: {key} can't be set here; {instead}")
