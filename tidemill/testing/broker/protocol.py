"""The part of Kafka's wire protocol that the development broker speaks: request and response primitives, API keys, error codes.

Nearly only "non-flexible" API versions are offered (no compact strings, no tagged fields), so four integer widths, strings, byte
blocks and arrays are the vocabulary; the compact forms are there for Metadata, which tells topics' ids in flexible versions only.
Source: the Apache Kafka protocol guide.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Self, TypeVar

from tidemill.errors import DataError

Item = TypeVar("Item")

_INT8, _INT16, _INT32, _INT64 = (struct.Struct(code) for code in (">b", ">h", ">i", ">q"))


class ApiKey(IntEnum):
    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    LIST_GROUPS = 16
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    CREATE_PARTITIONS = 37


class ErrorCode(IntEnum):
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_TOPIC = 17
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    UNKNOWN_MEMBER_ID = 25
    REBALANCE_IN_PROGRESS = 27
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    OUT_OF_ORDER_SEQUENCE = 45
    INVALID_PRODUCER_EPOCH = 47
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    KAFKA_STORAGE_ERROR = 56
    MEMBER_ID_REQUIRED = 79
    FENCED_INSTANCE_ID = 82
    INVALID_RECORD = 87
    UNKNOWN_TOPIC_ID = 100


class MalformedRequestError(DataError):
    """The bytes of a request end early or hold impossible lengths; the connection is closed."""


class RequestReader:
    """Reads one request from front to back. Every method raises MalformedRequestError when the bytes run out."""

    __slots__ = ("_buffer", "_position")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._position = 0

    def _number(self, number: struct.Struct) -> int:
        try:
            value: int = number.unpack_from(self._buffer, self._position)[0]
        except struct.error as error:
            raise MalformedRequestError(f"request ends at byte {len(self._buffer)}, inside a number") from error
        self._position += number.size
        return value

    def _block(self, length: int) -> memoryview:
        end = self._position + length
        if end > len(self._buffer):
            raise MalformedRequestError(f"request ends at byte {len(self._buffer)}, a block would end at {end}")
        block = self._buffer[self._position : end]
        self._position = end
        return block

    def int8(self) -> int:
        return self._number(_INT8)

    def int16(self) -> int:
        return self._number(_INT16)

    def int32(self) -> int:
        return self._number(_INT32)

    def int64(self) -> int:
        return self._number(_INT64)

    def boolean(self) -> bool:
        return self.int8() != 0

    def nullable_string(self) -> str | None:
        length = self.int16()
        if length < 0:
            return None
        try:
            return str(self._block(length), "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedRequestError(f"a string in the request is not UTF-8: {error}") from error

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise MalformedRequestError("null where a string is needed")
        return text

    def data(self) -> memoryview:
        """A byte block; null reads as empty. The view shares the request's memory."""
        return self._block(max(self.int32(), 0))

    def raw(self, length: int) -> bytes:
        return bytes(self._block(length))

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self.int8() & 0xFF
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 28:
                raise MalformedRequestError("a variable-length number of more than 5 bytes")

    def compact_string(self) -> str | None:
        """A nullable string in its compact form."""
        length = self.uvarint() - 1
        if length < 0:
            return None
        try:
            return str(self._block(length), "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedRequestError(f"a string in the request is not UTF-8: {error}") from error

    def compact_array(self, read_item: Callable[[], Item]) -> list[Item] | None:
        count = self.uvarint() - 1
        if count > len(self._buffer) - self._position:
            raise MalformedRequestError(f"array of {count} items in {len(self._buffer) - self._position} bytes")
        return None if count < 0 else [read_item() for _ in range(count)]

    def tags(self) -> None:
        """Skip tagged fields: none of them matters here."""
        for _ in range(self.uvarint()):
            self.uvarint()
            self._block(self.uvarint())

    def nullable_array(self, read_item: Callable[[], Item]) -> list[Item] | None:
        count = self.int32()
        # An item has at least one byte, so a larger count is a lie: refuse before looping over it.
        if count > len(self._buffer) - self._position:
            raise MalformedRequestError(f"array of {count} items in {len(self._buffer) - self._position} bytes")
        return None if count < 0 else [read_item() for _ in range(count)]

    def array(self, read_item: Callable[[], Item]) -> list[Item]:
        return self.nullable_array(read_item) or []


class ResponseWriter:
    """Collects one response as a list of chunks; record data is kept by reference, never copied. Methods chain."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks: list[bytes | memoryview] = []

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    def int8(self, value: int) -> Self:
        self.chunks.append(_INT8.pack(value))
        return self

    def int16(self, value: int) -> Self:
        self.chunks.append(_INT16.pack(value))
        return self

    def int32(self, value: int) -> Self:
        self.chunks.append(_INT32.pack(value))
        return self

    def int64(self, value: int) -> Self:
        self.chunks.append(_INT64.pack(value))
        return self

    def string(self, text: str | None) -> Self:
        if text is None:
            return self.int16(-1)
        encoded = text.encode()
        self.int16(len(encoded)).chunks.append(encoded)
        return self

    def uvarint(self, value: int) -> Self:
        encoded = bytearray()
        while value > 0x7F:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
        return self.raw(bytes(encoded))

    def compact_string(self, text: str | None) -> Self:
        if text is None:
            return self.uvarint(0)
        encoded = text.encode()
        return self.uvarint(len(encoded) + 1).raw(encoded)

    def tags(self) -> Self:
        """No tagged fields."""
        return self.uvarint(0)

    def data(self, block: bytes | memoryview) -> Self:
        self.int32(len(block)).chunks.append(block)
        return self

    def raw(self, block: bytes) -> Self:
        self.chunks.append(block)
        return self
