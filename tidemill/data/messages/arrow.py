"""Arrow IPC: a stream of record batches a message, or record batches alone whose schema is declared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.data.messages.columns import Fitting
from tidemill.data.messages.decoder import BAD_MESSAGE, EMPTY, ColumnError, Columns, Decoded, Decoder, Poison

_CONTINUATION = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True)
class _Preamble:
    """The schema that messages begin with, as bytes and as what they mean: most messages begin with the same bytes."""

    head: bytes
    schema: pa.Schema


class ArrowDecoder(Decoder):
    """The rows of all record batches of each message.

    `columns` None: the first message that can be read says what the schema is. Columns are fitted by name (see `columns`).
    `declared`: the schema of record batches that come without one; messages that begin with a schema of their own follow that.
    """

    def __init__(self, columns: Columns | None, where: str = "messages", *, declared: pa.Schema | None = None) -> None:
        self._fitting = Fitting(columns, where)
        self._declared = None if declared is None else declared.remove_metadata()
        self._preamble: _Preamble | None = None

    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        poison: dict[int, Poison] = {}
        rows = np.zeros(len(messages), np.int64)
        tables = list(self._tables(messages, rows, poison))
        return Decoded(pa.concat_tables(tables) if tables else self._fitting.empty(), rows, poison)

    def _tables(self, messages: Sequence[bytes | None], rows: np.ndarray, poison: dict[int, Poison]) -> Iterator[pa.Table]:
        """The messages' rows, those of equal schemas that follow each other in one table."""
        batches: list[pa.RecordBatch] = []
        schema: pa.Schema | None = None
        first = 0
        for index, message in enumerate(messages):
            try:
                found, own = self._batches(message)
            except BAD_MESSAGE as error:
                poison[index] = Poison(str(error))
                continue
            if batches and found is not schema:
                yield from self._fitted(batches, schema, messages, range(first, index), rows, poison)
                batches, first = [], index
            schema = found
            batches += own
            rows[index] = sum([batch.num_rows for batch in own])
        if batches:
            yield from self._fitted(batches, schema, messages, range(first, len(messages)), rows, poison)

    def _fitted(
        self,
        batches: list[pa.RecordBatch],
        schema: pa.Schema | None,
        messages: Sequence[bytes | None],
        span: range,
        rows: np.ndarray,
        poison: dict[int, Poison],
    ) -> Iterator[pa.Table]:
        """The batches of some messages, in one go if all is well, else message by message."""
        try:
            yield self._fit(pa.Table.from_batches(batches, schema))
            return
        except ColumnError as error:
            # The schema is the same for all of them.
            for index in span:
                rows[index] = 0
                poison.setdefault(index, error.poison)
            return
        except BAD_MESSAGE:
            pass
        for index in span:
            if index in poison:
                continue
            try:
                found, own = self._batches(messages[index])
                yield self._fit(pa.Table.from_batches(own, found))
            except BAD_MESSAGE as error:
                rows[index] = 0
                poison[index] = Poison(str(error))

    def _fit(self, table: pa.Table) -> pa.Table:
        # Offsets that point outside would crash the process when the rows are used, not here.
        table.validate(full=True)
        self._fitting.check(table.schema)
        return self._fitting.fit(table)

    def _batches(self, message: bytes | None) -> tuple[pa.Schema, list[pa.RecordBatch]]:
        if not message:
            raise ValueError(EMPTY)
        known = self._preamble
        if known is not None and message.startswith(known.head):
            return known.schema, _record_batches(pa.py_buffer(message).slice(len(known.head)), known.schema)
        if self._declared is not None and not _begins_with_schema(message):
            return self._declared, _record_batches(pa.py_buffer(message), self._declared)
        reader = pa.ipc.open_stream(message)
        schema = reader.schema
        if not any(_has_dictionary(field.type) for field in schema):
            # Dictionaries travel in messages of their own, which only the stream's reader puts together.
            self._preamble = known = _Preamble(_head(message), schema)
        return schema, list(reader)


def _record_batches(data: pa.Buffer, schema: pa.Schema) -> list[pa.RecordBatch]:
    messages = pa.ipc.MessageReader.open_stream(data)
    batches: list[pa.RecordBatch] = []
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return batches
        batches.append(pa.ipc.read_record_batch(message, schema))


def _has_dictionary(kind: pa.DataType) -> bool:
    children = (kind.field(index).type for index in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(_has_dictionary(child) for child in children)


def _begins_with_schema(message: bytes) -> bool:
    return bool(pa.ipc.read_message(message).type == "schema")


def _head(message: bytes) -> bytes:
    """The schema message at the front of a stream: marker, length, flatbuffer; it has no body."""
    start = 8 if message[:4] == _CONTINUATION else 4
    return message[: start + int.from_bytes(message[start - 4 : start], "little")]
