"""Columns of rows and columns of a table: the types that a new table gets, and rows made to fit one that is there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from odps.tunnel.io.types import arrow_type_to_odps_type, odps_type_to_arrow_type
from odps.types import validate_data_type

from tidemill.errors import DataError, SchemaError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# What Arrow has in more widths than MaxCompute: stored as the next wider one.
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.timestamp("s"): pa.timestamp("ms"),
    pa.timestamp("us"): pa.timestamp("ns"),
}


def new_table_columns(table: str, schema: pa.Schema, partition: Sequence[str]) -> dict[str, str]:
    """Name -> MaxCompute's type, for a table that is made for such rows. Raises SchemaError naming a column that it can't have."""
    seen = {name.lower(): f"a partition column of {table}" for name in partition}
    columns = {}
    for field in schema:
        if not _NAME.fullmatch(field.name):
            raise SchemaError(f"{table}: a column can't be called {field.name!r}: letters, digits and _ only")
        if field.name.lower() in seen:
            raise SchemaError(f"{table}: column {field.name!r} is {seen[field.name.lower()]} too; leave it out")
        seen[field.name.lower()] = "another column"
        columns[field.name] = _table_type(table, field)
    return columns


def require_fit(table: str, schema: pa.Schema, columns: Mapping[str, str]) -> None:
    """Raise SchemaError naming the first column of rows that an existing table can't take, or that the rows lack."""
    there = {name.lower() for name in columns}
    names = {field.name.lower() for field in schema}
    extra = [field.name for field in schema if field.name.lower() not in there]
    missing = [name for name in columns if name.lower() not in names]
    if extra:
        raise SchemaError(f"{table}: has no column {extra[0]!r}; it has {', '.join(columns)}")
    if missing:
        raise SchemaError(f"{table}: its column {missing[0]!r} isn't among those to write ({', '.join(schema.names)})")
    fit(table, schema.empty_table(), columns)


def fit(table: str, rows: pa.Table, columns: Mapping[str, str]) -> pa.Table:
    """Rows with the table's columns, in its order and types. Raises SchemaError, or DataError for a value that doesn't fit."""
    by_name = {name.lower(): rows.column(name) for name in rows.column_names}
    fields = [pa.field(name, _arrow_type(table, name, text)) for name, text in columns.items()]
    return pa.table([_cast(table, by_name[field.name.lower()], field) for field in fields], schema=pa.schema(fields))


def _cast(table: str, values: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    found, wanted = _stored(values.type), field.type
    if not _widens(found, wanted):
        raise SchemaError(f"{table}: column {field.name!r} is {wanted} there, and {values.type} in the rows")
    try:
        return values.cast(wanted)
    except pa.ArrowInvalid as error:
        raise DataError(f"{table}: column {field.name!r}: {error}") from None


def _widens(found: Any, wanted: Any) -> bool:
    """Whether values of a type may be stored as another: the same kind of value, and no narrower."""
    types = pa.types
    if found == wanted or types.is_null(found):
        return True
    if types.is_list(found) and types.is_list(wanted):
        return _widens(_stored(found.value_type), wanted.value_type)
    if types.is_map(found) and types.is_map(wanted):
        return _widens(_stored(found.key_type), wanted.key_type) and _widens(_stored(found.item_type), wanted.item_type)
    if types.is_timestamp(found) and types.is_timestamp(wanted):
        return True
    for same in (types.is_signed_integer, types.is_floating):
        if same(found) and same(wanted):
            return bool(found.bit_width <= wanted.bit_width)
    return False


def _stored(kind: Any) -> Any:
    """The nearest type that MaxCompute has."""
    if pa.types.is_large_list(kind):
        return pa.list_(kind.value_type)
    if pa.types.is_dictionary(kind):
        return _stored(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(_stored(kind.value_type))
    return _WIDER.get(kind, kind)


def _table_type(table: str, field: pa.Field) -> str:
    try:
        return str(arrow_type_to_odps_type(_stored(field.type)))
    except TypeError:
        raise SchemaError(f"{table}: column {field.name!r} is {field.type}, which MaxCompute has no type for") from None


def _arrow_type(table: str, name: str, text: str) -> Any:
    try:
        return odps_type_to_arrow_type(validate_data_type(text))
    except (TypeError, ValueError):
        raise SchemaError(f"{table}: column {name!r} is of type {text}, which can't be written") from None
