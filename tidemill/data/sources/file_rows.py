"""Rows of files: plain types, event times, where they lie."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidemill.data.event_times import column_times
from tidemill.data.split import RawBatch, Run, SplitId, largest


def timed_rows(split: SplitId, first: int, table: pa.Table, time_column: str | None) -> RawBatch:
    """Consecutive rows of a file from row number `first` on, with event times from a column of theirs."""
    times = times_of(table, time_column, split.name)
    run = Run(split, first, first + table.num_rows, table.num_rows, event_time=largest(times, 0, table.num_rows))
    return RawBatch(table, (run,), times)


def times_of(table: pa.Table, time_column: str | None, path: str) -> np.ndarray | None:
    """(n,) event times of a file's rows; None if no column has them."""
    if time_column is None:
        return None
    return column_times(table.column(time_column), where=f"{path}: column {time_column!r}")


def plain(table: pa.Table) -> pa.Table:
    """Rows with each column's plain type. Raises ArrowInvalid for text that is too much for it (2 GiB in one piece)."""
    schema = pa.schema([pa.field(field.name, plain_type(field.type), field.nullable) for field in table.schema])
    return table if schema.equals(table.schema) else table.cast(schema)


def plain_type(found: pa.DataType) -> pa.DataType:
    """The type that values are read as: writers differ in whether text and lists are large, or values kept in a dictionary."""
    kinds = pa.types
    if kinds.is_dictionary(found):
        return plain_type(found.value_type)
    if kinds.is_large_string(found) or kinds.is_string_view(found):
        return pa.string()
    if kinds.is_large_binary(found) or kinds.is_binary_view(found):
        return pa.binary()
    if kinds.is_list(found) or kinds.is_large_list(found) or kinds.is_fixed_size_list(found):
        return pa.list_(plain_type(found.value_type))
    if kinds.is_map(found):
        return pa.map_(plain_type(found.key_type), plain_type(found.item_type))
    return found
