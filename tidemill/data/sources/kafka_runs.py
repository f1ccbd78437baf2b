"""Messages of partitions to rows with their positions.

A position is `offset << 20 | row within the message`. One-row messages at consecutive offsets make one run of stride 2**20;
a message of several rows makes a run of stride 1. Positions that no message has (compacted, transaction markers) and messages
that can't be read are gaps, done with once a later row, or a run without rows, is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message, TopicPartition

from tidemill.config.data import KafkaConfig
from tidemill.contracts.progress import ROW_BITS
from tidemill.data.dead_letters import DeadLetter, DeadLetters
from tidemill.data.event_times import column_times
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.messages.decoder import Decoded, Decoder
from tidemill.data.sources.kafka_formats import format_hint
from tidemill.data.split import RawBatch, Run, SplitId, keep_rows, largest, positions
from tidemill.errors import DataError, SchemaError

_MESSAGE = 1 << ROW_BITS
# What one read asks for: many small messages, or as many large ones as make a few batches. A read waits until it has them all
# or its time is over, and holds them all in memory.
_MAX_MESSAGES = 5000
_ROWS_PER_READ = 20_000
_FIRST_READ = 100
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class Partition:
    """A partition that is being read."""

    split: SplitId
    topic: str
    number: int
    offset: int
    """where to begin fetching"""
    next: int
    """the position up to which runs were given"""
    done: IntervalSet
    """rows not to give again; emptied once behind"""
    end: int | None = None
    """the first offset not to read; None: there is no end"""

    @property
    def reached(self) -> int:
        """The first offset of which not all has been given."""
        return max(self.offset, self.next >> ROW_BITS)

    @property
    def is_finished(self) -> bool:
        return self.end is not None and self.reached >= self.end

    def place(self) -> TopicPartition:
        """Where to fetch, as the client wants it."""
        return TopicPartition(self.topic, self.number, self.reached)


class MessageRows:
    """Makes raw batches of messages. Belongs to one thread.

    `event_time_column`: a timestamp, or a number of Unix seconds; None: the messages' timestamps are meant.
    """

    def __init__(self, config: KafkaConfig, decoder: Decoder, event_time_column: str | None, dead_letters: DeadLetters) -> None:
        self._config = config
        self._decoder = decoder
        self._event_time_column = event_time_column
        self._dead_letters = dead_letters
        self._schema = decoder.decode([]).table.schema
        self.ask_for = _FIRST_READ
        """How many messages the next read should ask for."""

    @property
    def none(self) -> pa.Table:
        """A table of no rows."""
        return self._schema.empty_table()

    def batch(self, messages: Sequence[Message], partitions: Sequence[Partition]) -> RawBatch:
        """The rows of messages, by partition; moves the partitions' positions behind them.

        `messages`: at least one, without errors, in order within each partition. Raises DataError for more messages that can't be
        read than the config allows, SchemaError naming the column for a schema that doesn't have it, or not as is needed.
        """
        index = {(part.topic, part.number): place for place, part in enumerate(partitions)}
        places = np.array([index[message.topic(), message.partition()] for message in messages])  # type: ignore[index]
        offsets = np.array([message.offset() for message in messages], np.int64)
        order = np.argsort(places, kind="stable")
        inside = offsets[order] < _ends(partitions)[places[order]]
        beyond = np.unique(places[order[~inside]])
        order = order[inside]
        if len(partitions) > 1 or len(beyond):
            messages = [messages[place] for place in order.tolist()]
            places, offsets = places[order], offsets[order]
        decoded = self._decoder.decode([message.value() for message in messages])
        self._schema = decoded.table.schema
        self._size_next_read(decoded)
        edges = np.searchsorted(places, np.arange(len(partitions) + 1))
        self._check(messages, decoded)
        arrived_at = np.repeat(_stamps(messages), decoded.rows)
        event_time = self._event_time(decoded, arrived_at)
        ends = np.concatenate([[0], np.cumsum(decoded.rows)])
        runs: list[Run] = []
        for part, (start, stop) in zip(partitions, pairwise(edges.tolist()), strict=True):
            if start < stop:
                times = event_time[ends[start] : ends[stop]]
                runs.extend(message_runs(part.split, part.next, offsets[start:stop], decoded.rows[start:stop], times))
                part.next = runs[-1].stop
        # A message behind a partition's end says that nothing before the end is still to come.
        runs.extend(cover(part, part.end) for part in (partitions[place] for place in beyond.tolist()) if not part.is_finished)
        return _without_done(RawBatch(decoded.table, tuple(runs), event_time, arrived_at), partitions)

    def _size_next_read(self, decoded: Decoded) -> None:
        if len(decoded.rows):
            rows_per_message = max(1.0, decoded.table.num_rows / len(decoded.rows))
            self.ask_for = min(_MAX_MESSAGES, max(1, int(_ROWS_PER_READ / rows_per_message)))

    def _event_time(self, decoded: Decoded, arrived_at: np.ndarray) -> np.ndarray:
        name = self._event_time_column
        if name is None:
            return arrived_at
        where = f"kafka {', '.join(self._config.topic)}"
        if name not in decoded.table.column_names:
            if not decoded.table.num_rows:
                return arrived_at
            raise SchemaError(f"{where}: no column {name!r} for the event time")
        return column_times(decoded.table.column(name), where=f"{where}: column {name!r}")

    def _check(self, messages: Sequence[Message], decoded: Decoded) -> None:
        """Report messages that can't be read, or fail for them; refuse those that a position can't tell the rows of apart."""
        most = int(decoded.rows.argmax()) if len(decoded.rows) else 0
        if len(decoded.rows) and decoded.rows[most] > _MESSAGE:
            where = _where(messages[most])
            raise DataError(f"{where}: {decoded.rows[most]} rows in one message; at most {_MESSAGE} can be told apart")
        self._dead_letters.passed(decoded.table.num_rows + len(decoded.poison))
        letters: list[DeadLetter] = []
        for index, poison in sorted(decoded.poison.items()):
            message = messages[index]
            why = poison.why + format_hint(self._config, message.value())
            if poison.is_schema and self._config.on_schema_error == "fail":
                self._dead_letters.add(letters)
                raise SchemaError(f"{_where(message)}: {why}; or set kafka.on_schema_error to skip to go on without such messages")
            place = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset(), "row": None}
            letters.append(DeadLetter(place, why, poison.column, message.value()))
        self._dead_letters.add(letters)


def _where(message: Message) -> str:
    return f"kafka {message.topic()}:{message.partition()}, offset {message.offset()}"


def cover(part: Partition, offset: int) -> Run:
    """A run without rows up to an offset, before which the partition has no further message; moves its position there."""
    stop = max(part.next, offset << ROW_BITS)
    run = Run(part.split, part.next, stop, 0, _MESSAGE, stop - part.next)
    part.next = stop
    return run


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


def _without_done(batch: RawBatch, partitions: Sequence[Partition]) -> RawBatch:
    done = {part.split: part.done for part in partitions if part.done}
    if not done:
        return batch
    keep = np.concatenate([np.zeros(0, bool), *(~done.get(run.split, NOTHING).holds(positions(run)) for run in batch.runs)])
    for part in partitions:
        if part.done and part.next >= part.done.intervals[-1][1]:
            part.done = NOTHING
    return keep_rows(batch, keep)


def _ends(partitions: Sequence[Partition]) -> np.ndarray:
    """(partitions,) int64: the first offset not to read of each."""
    return np.array([_NEVER if part.end is None else part.end for part in partitions], np.int64)


def _stamps(messages: Sequence[Message]) -> np.ndarray:
    """(messages,) float64: when the broker, or the producer, says that each was written."""
    stamps = np.array([message.timestamp() for message in messages], np.float64).reshape(-1, 2)
    return np.where(stamps[:, 0] == TIMESTAMP_NOT_AVAILABLE, np.nan, stamps[:, 1] / 1000.0)
