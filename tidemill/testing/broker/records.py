"""Record batches of format 2, as producers send them: the 61-byte header, and the timestamps of the records inside.

A batch is stored as it came. Only its base offset and leader epoch are changed, and both lie outside of its checksum.
Source: the Apache Kafka message format, "Record Batch".
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct(">qiibIhiqqqhii")
_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LEADER_EPOCH_AT = 12
_CHECKSUM = struct.Struct(">I")
_CHECKSUM_AT = 17
_CONTROL_KEY = struct.Struct(">hh")
_CONTROL_VALUE = struct.Struct(">hi")
_TRANSACTIONAL, _CONTROL = 0x10, 0x20

HEADER_BYTES = _HEADER.size
MAGIC = 2
# The length field counts what follows it: not the base offset (8 bytes), not itself (4 bytes).
_BYTES_BEFORE_LENGTH_COUNTS = 12
_CODEC_MASK = 0x07
_SEQUENCE_MASK = 0x7FFFFFFF


class BatchHeader(NamedTuple):
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    checksum: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    num_records: int

    @property
    def num_bytes(self) -> int:
        """Size of the whole batch, header included."""
        return self.length + _BYTES_BEFORE_LENGTH_COUNTS

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        return (self.base_sequence + self.last_offset_delta) & _SEQUENCE_MASK

    @property
    def is_sound(self) -> bool:
        """Whether the fields that the log relies on can be true."""
        return self.magic == MAGIC and self.num_bytes >= HEADER_BYTES and self.last_offset_delta >= 0


class RecordTime(NamedTuple):
    timestamp_ms: int
    offset: int


def next_sequence(sequence: int) -> int:
    """Sequence numbers of an idempotent producer wrap at 2**31."""
    return (sequence + 1) & _SEQUENCE_MASK


def read_header(buffer: bytes | bytearray | memoryview) -> BatchHeader | None:
    """The header at the front of `buffer`, or None if the buffer is shorter than one."""
    if len(buffer) < HEADER_BYTES:
        return None
    return BatchHeader(*_HEADER.unpack_from(buffer))


def set_base_offset(batch: bytearray, base_offset: int) -> None:
    _BASE_OFFSET.pack_into(batch, 0, base_offset)
    _LEADER_EPOCH.pack_into(batch, _LEADER_EPOCH_AT, 0)


def emptied_batch(count: int, timestamp_ms: int) -> bytearray:
    """What compaction leaves of a batch of which it has removed all `count` records: its header, which keeps the offsets."""
    return _batch(b"", attributes=0, num_offsets=count, num_records=0, timestamp_ms=timestamp_ms)


def transaction_marker(commit: bool, timestamp_ms: int) -> bytearray:
    """The control record that ends a transaction; clients never show it, but it has an offset."""
    key, value = _CONTROL_KEY.pack(0, int(commit)), _CONTROL_VALUE.pack(0, 0)
    # Attributes, timestamp and offset deltas, key, value, no headers; lengths are zigzag varints, all below 64.
    body = bytes([0, 0, 0, 2 * len(key)]) + key + bytes([2 * len(value)]) + value + bytes([0])
    record = bytes([2 * len(body)]) + body
    return _batch(record, attributes=_TRANSACTIONAL | _CONTROL, num_offsets=1, num_records=1, timestamp_ms=timestamp_ms)


def _batch(records: bytes, *, attributes: int, num_offsets: int, num_records: int, timestamp_ms: int) -> bytearray:
    header = BatchHeader(
        base_offset=0,
        length=HEADER_BYTES + len(records) - _BYTES_BEFORE_LENGTH_COUNTS,
        leader_epoch=0,
        magic=MAGIC,
        checksum=0,
        attributes=attributes,
        last_offset_delta=num_offsets - 1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        num_records=num_records,
    )
    batch = bytearray(_HEADER.pack(*header) + records)
    _CHECKSUM.pack_into(batch, _CHECKSUM_AT, _crc32c(batch[_CHECKSUM_AT + _CHECKSUM.size :]))
    return batch


def _crc32c(data: bytes | bytearray) -> int:
    """The checksum of batches (Castagnoli's polynomial), bit by bit: for a few small ones."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def record_times(header: BatchHeader, body: bytes) -> Iterator[RecordTime]:
    """Timestamp and offset of each record; `body` is what follows the header.

    A batch that can't be decompressed here (snappy, or damaged) yields its first record only, with the batch's
    largest timestamp: a seek by time then lands at the front of the batch, early but never late.
    """
    try:
        records = _decompress(header.attributes & _CODEC_MASK, body)
        position = 0
        for _ in range(header.num_records):
            length, position = _read_varint(records, position)
            timestamp_delta, cursor = _read_varint(records, position + 1)
            offset_delta, _ = _read_varint(records, cursor)
            yield RecordTime(header.base_timestamp + timestamp_delta, header.base_offset + offset_delta)
            position += length
    except (ValueError, OSError, EOFError, IndexError):
        yield RecordTime(header.max_timestamp, header.base_offset)


def _decompress(codec: int, body: bytes) -> bytes:
    if codec == 0:
        return body
    if codec == 1:
        return gzip.decompress(body)
    name = {3: "lz4", 4: "zstd"}.get(codec)
    if name is None:
        raise ValueError(f"no decompressor for codec {codec}")
    # Imported here: only a seek by time into compressed batches needs it, and the broker should start at once.
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(body), name) as stream:
        return bytes(stream.read())


def _read_varint(buffer: bytes, position: int) -> tuple[int, int]:
    """A zigzag varint and the position behind it."""
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7
