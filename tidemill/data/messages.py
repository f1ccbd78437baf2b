"""Messages to rows, many at a time, telling which message each row came from and which messages hold no rows at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import polars as pl
import pyarrow as pa

_EMPTY = "it has no content (a tombstone, or blank)"


@dataclass(frozen=True, slots=True)
class Decoded:
    """`table`: the rows of all messages, in order; `rows`: (messages,) int64, how many each gave; `poison`: index -> why, for
    messages that can't be read (0 rows)."""

    table: pa.Table
    rows: np.ndarray
    poison: dict[int, str]


class Decoder(ABC):
    """Decodes messages into tables of one schema. Used by one thread at a time."""

    @abstractmethod
    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        """All rows of all messages. Never raises for what a message holds."""


class JsonDecoder(Decoder):
    """One JSON object a message, or an array of them, one a row.

    Columns that a message lacks are null, those that aren't declared are ignored, and a value of another type makes the
    message poison (but a number is taken as text where text is declared).
    """

    def __init__(self, columns: Mapping[str, pa.DataType]) -> None:
        self._schema = pa.schema(list(columns.items()))
        self._polars_schema = pl.Schema(pl.DataFrame(self._schema.empty_table()).schema)

    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        poison: dict[int, str] = {}
        lines, rows = self._lines(messages, poison)
        firsts = np.concatenate([[0], np.cumsum(rows)])
        tables = list(self._parse(lines, firsts, 0, len(messages), poison))
        rows[list(poison)] = 0
        return Decoded(pa.concat_tables([*tables, self._schema.empty_table()]), rows, poison)

    def _lines(self, messages: Sequence[bytes | None], poison: dict[int, str]) -> tuple[Sequence[bytes], np.ndarray]:
        """One line a row, and the number of lines of each message."""
        # Braces at the front and no line breaks inside: nearly always, and cheap to find out for all messages at once.
        if all([message and message[:1] == b"{" for message in messages]):  # noqa: C419 - a list is faster than a generator here
            plain: Sequence[bytes] = messages  # type: ignore[assignment]
            if b"".join(plain).find(b"\n") < 0:
                return plain, np.ones(len(messages), np.int64)
        lines: list[bytes] = []
        rows = np.zeros(len(messages), np.int64)
        for index, message in enumerate(messages):
            try:
                own = _one_line_each(message)
            except ValueError as error:
                poison[index] = str(error)
                continue
            lines.extend(own)
            rows[index] = len(own)
        return lines, rows

    def _parse(
        self, lines: Sequence[bytes], firsts: np.ndarray, start: int, stop: int, poison: dict[int, str]
    ) -> Iterator[pa.Table]:
        """The rows of messages [start, stop). One call parses all; if it fails, halves are tried, down to the message at fault."""
        own = lines[firsts[start] : firsts[stop]]
        if not own:
            return
        try:
            # Every line begins with a brace, so each gives at least one row or an error, and equal numbers mean one row each.
            frame = pl.read_ndjson(b"\n".join(own), schema=self._polars_schema)
            if frame.height != len(own):
                raise ValueError(f"{len(own)} JSON objects were expected, {frame.height} found")
            yield frame.to_arrow().cast(self._schema)
        except (pl.exceptions.PolarsError, pa.ArrowException, ValueError) as error:
            if stop - start == 1:
                poison[start] = str(error)
                return
            middle = (start + stop) // 2
            yield from self._parse(lines, firsts, start, middle, poison)
            yield from self._parse(lines, firsts, middle, stop, poison)


class ArrowDecoder(Decoder):
    """One Arrow IPC stream a message; the rows of all its record batches.

    `columns` None: the first message that can be read says what the schema is. Columns are matched by name: those that a
    message lacks are null, others are ignored, narrower numbers are widened; any other type makes the message poison.
    """

    def __init__(self, columns: Mapping[str, pa.DataType] | None) -> None:
        self._schema = None if columns is None else pa.schema(list(columns.items()))

    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        poison: dict[int, str] = {}
        rows = np.zeros(len(messages), np.int64)
        tables: list[pa.Table] = []
        for index, message in enumerate(messages):
            try:
                table = self._table(message)
            except (pa.ArrowException, OSError, ValueError) as error:
                poison[index] = str(error)
                continue
            tables.append(table)
            rows[index] = table.num_rows
        if not tables:
            return Decoded((self._schema or pa.schema([])).empty_table(), rows, poison)
        return Decoded(pa.concat_tables(tables), rows, poison)

    def _table(self, message: bytes | None) -> pa.Table:
        if not message:
            raise ValueError(_EMPTY)
        table = pa.ipc.open_stream(message).read_all()
        # Offsets that point outside would crash the process when the rows are used, not here.
        table.validate(full=True)
        if self._schema is None:
            self._schema = table.schema.remove_metadata()
        if table.schema.equals(self._schema):
            return table.replace_schema_metadata(None)
        return pa.Table.from_arrays([_column(table, field) for field in self._schema], schema=self._schema)


def _one_line_each(message: bytes | None) -> list[bytes]:
    if not message or not message.strip():
        raise ValueError(_EMPTY)
    value = orjson.loads(message)
    objects = value if isinstance(value, list) else [value]
    for item in objects:
        if not isinstance(item, dict):
            raise ValueError(f"it holds {type(item).__name__} where a JSON object is expected")
    return [orjson.dumps(item) for item in objects]


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if field.name not in table.schema.names:
        return pa.nulls(table.num_rows, field.type)
    column = table.column(field.name)
    if not _widens(column.type, field.type):
        raise ValueError(f"column {field.name!r} is {column.type}, not {field.type}")
    return column.cast(field.type)


def _widens(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether every value of one type has the same value in the other."""
    kinds = pa.types
    if found == wanted or kinds.is_null(found):
        return True
    if kinds.is_list(found) or kinds.is_large_list(found):
        return (kinds.is_list(wanted) or kinds.is_large_list(wanted)) and _widens(found.value_type, wanted.value_type)
    for same in (kinds.is_signed_integer, kinds.is_unsigned_integer, kinds.is_floating):
        if same(found) and same(wanted):
            return found.bit_width <= wanted.bit_width
    text = (pa.string(), pa.large_string(), pa.string_view())
    return found in text and wanted in text
