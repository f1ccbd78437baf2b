"""Fits the columns that messages have to those that are wanted: by name, widened where no value changes, refused otherwise.

| found | wanted | |
|---|---|---|
| a whole number | a whole number of at least its range, or text | taken |
| a whole number | a fraction | taken; a message with a number that it can't hold exactly is poison |
| a fraction | a wider fraction | taken |
| a yes or no | a whole number | 0 or 1 |
| text of any form, a dictionary of text, an enum | text | taken |
| a timestamp | a double | Unix seconds |
| a list, a map | the same of what its items widen to | taken |
| anything else, a narrower type above all | | refused: INT64 doesn't become INT32 |

Columns that aren't wanted, their order, nullability and metadata don't matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidemill.data.messages.decoder import ColumnError, Columns
from tidemill.logs import event, log

_MOST_SCHEMAS = 64
_TEXT = (pa.string(), pa.large_string(), pa.string_view())
_Column: TypeAlias = pa.ChunkedArray | pa.Array


class Fitting:
    """Brings tables of any schema into one. `where`: for the log ("kafka clicks"). Not thread-safe.

    The types of columns that are wanted as they come are those of the first schema seen, in the widest form of their kind.
    `columns` None: all columns that the first schema has.
    """

    def __init__(self, columns: Columns | None, where: str) -> None:
        self._columns = columns
        self._where = where
        self._known: list[tuple[pa.Schema, list[int]]] = []
        self._first: pa.Schema | None = None
        self._told: set[str] = set()
        known = columns is not None and all(kind is not None for kind in columns.values())
        self.schema: pa.Schema | None = pa.schema(list(columns.items())) if columns and known else None
        """What tables are brought into; None until a first schema has said."""

    @property
    def names(self) -> list[str] | None:
        """The columns that are wanted; None: all there are."""
        return None if self._columns is None else list(self._columns)

    def check(self, found: pa.Schema) -> None:
        """Take a schema as what messages have, and say once how it differs from the first. Raises ColumnError for the first column
        that is missing or doesn't fit."""
        self._plan(found)
        if self._first is None:
            self._first = found
        elif not found.equals(self._first):
            self._tell(_change(self._first, found))
        elif found.metadata != self._first.metadata:
            self._tell("metadata")

    def fit(self, table: pa.Table) -> pa.Table:
        """The table in `schema`. Raises ColumnError as `check` does, ArrowInvalid for a number that can't be held exactly."""
        indices = self._plan(table.schema)
        assert self.schema is not None
        columns = [_converted(table.column(index), field.type) for index, field in zip(indices, self.schema, strict=True)]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def empty(self) -> pa.Table:
        return (self.schema if self.schema is not None else pa.schema([])).empty_table()

    def _plan(self, found: pa.Schema) -> list[int]:
        """Which of its columns is each of the wanted ones."""
        for schema, indices in self._known:
            if found.equals(schema):
                return indices
        if self.schema is None:
            self.schema = _first_schema(self._columns, found)
        indices = [_index(found, field) for field in self.schema]
        if len(self._known) < _MOST_SCHEMAS:
            self._known.append((found, indices))
        return indices

    def _tell(self, change: str) -> None:
        """Say once what has changed."""
        if change not in self._told and len(self._told) < _MOST_SCHEMAS:
            self._told.add(change)
            log.info("%s: the messages' schema has changed (%s); what is needed is still there", self._where, change)
            event("source.schema_changed", source=self._where, change=change)


def _change(first: pa.Schema, found: pa.Schema) -> str:
    """How a schema differs from the first one."""
    changes = [f"{name} came" for name in found.names if name not in first.names]
    changes += [f"{name} went" for name in first.names if name not in found.names]
    for field in found:
        if field.name in first.names and field.type != first.field(field.name).type:
            changes.append(f"{field.name} was {first.field(field.name).type}, is {field.type}")
    return "; ".join(changes) or ("nullability" if found.names == first.names else "order")


def widens(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of one type can be read as the other; see the table above."""
    kinds = pa.types
    if found == wanted or kinds.is_null(found):
        return True
    if kinds.is_dictionary(found):
        return widens(found.value_type, wanted)
    if _is_list(found):
        if kinds.is_map(wanted) and kinds.is_struct(found.value_type):
            return _entries_widen(found.value_type, wanted)
        return _is_list(wanted) and widens(found.value_type, wanted.value_type)
    if kinds.is_map(found):
        return kinds.is_map(wanted) and widens(found.key_type, wanted.key_type) and widens(found.item_type, wanted.item_type)
    if found in _TEXT:
        return wanted in _TEXT
    if kinds.is_integer(found):
        return wanted in _TEXT or kinds.is_floating(wanted) or _holds(found, wanted)
    if kinds.is_floating(found):
        return kinds.is_floating(wanted) and found.bit_width <= wanted.bit_width
    if kinds.is_boolean(found):
        return kinds.is_integer(wanted)
    return kinds.is_timestamp(found) and wanted == pa.float64()


def widest(kind: pa.DataType) -> pa.DataType:
    """The form in which a column without a declared type is read."""
    kinds = pa.types
    if kinds.is_dictionary(kind):
        return widest(kind.value_type)
    if _is_list(kind):
        return pa.list_(widest(kind.value_type))
    if kinds.is_map(kind):
        return pa.map_(widest(kind.key_type), widest(kind.item_type))
    if kind in _TEXT:
        return pa.string()
    if kinds.is_integer(kind):
        return pa.int64() if kind != pa.uint64() else kind
    return pa.float64() if kinds.is_floating(kind) else kind


def _first_schema(columns: Columns | None, found: pa.Schema) -> pa.Schema:
    if columns is None:
        return pa.schema([(field.name, widest(field.type)) for field in found])
    fields = []
    for name, kind in columns.items():
        if kind is None:
            _require(found, name)
        fields.append((name, kind if kind is not None else widest(found.field(name).type)))
    return pa.schema(fields)


def _index(found: pa.Schema, field: pa.Field) -> int:
    _require(found, field.name)
    kind = found.field(field.name).type
    if not widens(kind, field.type):
        raise ColumnError(
            field.name,
            f"is {kind} in the message, which can't be read as {field.type}; declare its type in data_config.input_fields",
        )
    return found.get_field_index(field.name)


def _require(found: pa.Schema, name: str) -> None:
    count = len(found.get_all_field_indices(name))
    if count == 0:
        raise ColumnError(name, f"isn't in the message; it has {', '.join(found.names) or 'none'}")
    if count > 1:
        raise ColumnError(name, "is there twice in the message")


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _holds(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether one whole number's range lies within the other's."""
    if not pa.types.is_integer(wanted):
        return False
    signed, wanted_signed = pa.types.is_signed_integer(found), pa.types.is_signed_integer(wanted)
    if signed == wanted_signed:
        return bool(found.bit_width <= wanted.bit_width)
    return wanted_signed and bool(found.bit_width < wanted.bit_width)


def _entries_widen(entry: pa.DataType, wanted: pa.DataType) -> bool:
    if [entry.field(index).name for index in range(entry.num_fields)] != ["key", "value"]:
        return False
    return widens(entry.field(0).type, wanted.key_type) and widens(entry.field(1).type, wanted.item_type)


def _converted(column: _Column, wanted: pa.DataType) -> _Column:
    kind = column.type
    if kind == wanted:
        return column
    if pa.types.is_timestamp(kind) and wanted == pa.float64():
        microseconds = column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
        return pc.divide(microseconds.cast(pa.float64(), safe=False), 1e6)
    if pa.types.is_map(wanted) and _is_list(kind):
        return _each(column, lambda lists: _entries_to_map(lists, wanted))
    return column.cast(wanted)


def _each(column: _Column, convert: Callable[[pa.Array], pa.Array]) -> _Column:
    if isinstance(column, pa.Array):
        return convert(column)
    return pa.chunked_array([convert(chunk) for chunk in column.chunks] or [convert(pa.array([], column.type))])


def _entries_to_map(lists: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Lists of (key, value) as maps. A null list becomes a null map."""
    lists = lists.cast(pa.list_(lists.type.value_type))
    entries = lists.values
    maps = pa.MapArray.from_arrays(lists.offsets, entries.field(0).cast(wanted.key_type), entries.field(1).cast(wanted.item_type))
    return pc.if_else(lists.is_valid(), maps, pa.scalar(None, wanted)) if lists.null_count else maps
