"""One partition: an append-only file of record batches, and an index of them in memory that is rebuilt at start."""

from __future__ import annotations

import asyncio
import logging
import os
from bisect import bisect_left, bisect_right
from collections import deque
from pathlib import Path
from typing import NamedTuple

from tidemill.testing.broker.protocol import ErrorCode
from tidemill.testing.broker.records import (
    HEADER_BYTES,
    MAGIC,
    BatchHeader,
    RecordTime,
    next_sequence,
    read_header,
    record_times,
    set_base_offset,
)

logger = logging.getLogger(__name__)

# A producer keeps at most five requests in flight, so a repeated batch is always among its last five.
_BATCHES_REMEMBERED = 5


class Appended(NamedTuple):
    error: int
    base_offset: int


class _SequencedBatch(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int


class _ProducerState:
    """The last batches of one idempotent producer, to recognise repeats and gaps."""

    __slots__ = ("batches", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[_SequencedBatch] = deque(maxlen=_BATCHES_REMEMBERED)


class PartitionLog:
    """Owned by the event loop's thread. What `append` acknowledged is in the file, so it outlives a killed process;
    with `fsync` it is on the disk too."""

    def __init__(self, path: Path, fsync: bool, start_offset: int = 0) -> None:
        self.path = path
        self.next_offset = 0
        self._fsync = fsync
        self._end = 0
        self._base_offsets: list[int] = []
        self._positions: list[int] = []
        # Running maximum, hence sorted: the first entry >= T is the first batch that holds a timestamp >= T.
        self._max_timestamps: list[int] = []
        self._producers: dict[int, _ProducerState] = {}
        self._waiters: set[asyncio.Event] = set()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._recover()
        self.start_offset = min(start_offset, self.next_offset)

    @property
    def max_producer_id(self) -> int:
        return max(self._producers, default=-1)

    def close(self) -> None:
        os.close(self._file)
        self._wake_waiters()

    def append(self, records: memoryview) -> Appended:
        """Store one batch at the end of the log. A batch that an idempotent producer repeats is not stored again."""
        header = read_header(records)
        if header is None or header.num_bytes > len(records):
            return Appended(ErrorCode.CORRUPT_MESSAGE, -1)
        error = _check_batch(header, len(records))
        if error:
            return Appended(error, -1)
        repeated = self._check_sequence(header)
        if repeated is not None:
            return repeated
        return self._store(header, bytearray(records))

    def append_own(self, batch: bytearray) -> None:
        """Store a batch that no producer could send: what compaction or a transaction leaves."""
        header = read_header(batch)
        assert header is not None
        self._store(header, batch)

    def _store(self, header: BatchHeader, batch: bytearray) -> Appended:
        base_offset = self.next_offset
        set_base_offset(batch, base_offset)
        try:
            self._write(batch)
        except OSError:
            logger.exception("%s: append failed", self.path)
            os.ftruncate(self._file, self._end)
            return Appended(ErrorCode.KAFKA_STORAGE_ERROR, -1)
        self._index(header._replace(base_offset=base_offset))
        self._wake_waiters()
        return Appended(ErrorCode.NONE, base_offset)

    def read(self, offset: int, max_bytes: int, at_least_one: bool) -> bytes:
        """Whole batches from the one that holds `offset` on, up to `max_bytes`; one larger than that only if
        `at_least_one`. The caller has checked start_offset <= offset <= next_offset."""
        if offset >= self.next_offset:
            return b""
        first = bisect_right(self._base_offsets, offset) - 1
        begin = self._positions[first]
        if self._end - begin <= max_bytes:
            end = self._end
        else:
            end = self._positions[bisect_right(self._positions, begin + max_bytes) - 1] if max_bytes > 0 else begin
        if end <= begin and at_least_one:
            end = self._batch_end(first)
        return os.pread(self._file, end - begin, begin) if end > begin else b""

    def find_time(self, timestamp_ms: int) -> RecordTime | None:
        """The first record at or behind start_offset whose timestamp is at least `timestamp_ms`."""
        for number in range(bisect_left(self._max_timestamps, timestamp_ms), len(self._positions)):
            begin = self._positions[number]
            batch = os.pread(self._file, self._batch_end(number) - begin, begin)
            header = read_header(batch)
            if header is None or header.next_offset <= self.start_offset or header.max_timestamp < timestamp_ms:
                continue
            for record in record_times(header, batch[HEADER_BYTES:]):
                if record.timestamp_ms >= timestamp_ms and record.offset >= self.start_offset:
                    return record
        return None

    def add_waiter(self, event: asyncio.Event) -> None:
        """Set `event` at the next append."""
        self._waiters.add(event)

    def remove_waiter(self, event: asyncio.Event) -> None:
        self._waiters.discard(event)

    def _wake_waiters(self) -> None:
        for event in self._waiters:
            event.set()

    def _write(self, batch: bytearray) -> None:
        remaining = memoryview(batch)
        position = self._end
        while remaining:
            written = os.pwrite(self._file, remaining, position)
            remaining = remaining[written:]
            position += written
        if self._fsync:
            os.fsync(self._file)

    def _batch_end(self, number: int) -> int:
        return self._positions[number + 1] if number + 1 < len(self._positions) else self._end

    def _check_sequence(self, header: BatchHeader) -> Appended | None:
        """None if the batch is to be stored."""
        producer = self._producers.get(header.producer_id)
        if header.producer_id < 0 or producer is None:
            return None
        if header.producer_epoch < producer.epoch:
            return Appended(ErrorCode.INVALID_PRODUCER_EPOCH, -1)
        if header.producer_epoch > producer.epoch:
            return None if header.base_sequence == 0 else Appended(ErrorCode.OUT_OF_ORDER_SEQUENCE, -1)
        for batch in producer.batches:
            if (batch.first_sequence, batch.last_sequence) == (header.base_sequence, header.last_sequence):
                return Appended(ErrorCode.NONE, batch.base_offset)
        if header.base_sequence != next_sequence(producer.batches[-1].last_sequence):
            return Appended(ErrorCode.OUT_OF_ORDER_SEQUENCE, -1)
        return None

    def _index(self, header: BatchHeader) -> None:
        self._base_offsets.append(header.base_offset)
        self._positions.append(self._end)
        highest = self._max_timestamps[-1] if self._max_timestamps else header.max_timestamp
        self._max_timestamps.append(max(highest, header.max_timestamp))
        self._end += header.num_bytes
        self.next_offset = header.next_offset
        if header.producer_id >= 0:
            self._remember_sequence(header)

    def _remember_sequence(self, header: BatchHeader) -> None:
        producer = self._producers.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            producer = self._producers[header.producer_id] = _ProducerState(header.producer_epoch)
        producer.batches.append(_SequencedBatch(header.base_sequence, header.last_sequence, header.base_offset))

    def _recover(self) -> None:
        """Index the whole batches in the file and cut off what a killed process left half written."""
        size = os.fstat(self._file).st_size
        while self._end < size:
            header = read_header(os.pread(self._file, HEADER_BYTES, self._end))
            if header is None or not header.is_sound or self._end + header.num_bytes > size:
                break
            if header.base_offset != self.next_offset:
                break
            self._index(header)
        if self._end < size:
            logger.warning("%s: cut off %d bytes behind the last whole batch", self.path, size - self._end)
            os.ftruncate(self._file, self._end)


def _check_batch(header: BatchHeader, num_bytes: int) -> ErrorCode:
    if header.magic != MAGIC:
        return ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT
    if not header.is_sound or header.num_records != header.last_offset_delta + 1:
        return ErrorCode.CORRUPT_MESSAGE
    # As in Kafka, a produce request holds one batch for a partition.
    return ErrorCode.NONE if header.num_bytes == num_bytes else ErrorCode.INVALID_RECORD
