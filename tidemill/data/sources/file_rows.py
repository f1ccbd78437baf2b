"""Rows of files: plain types, event times, where they lie."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.data.event_times import column_times
from tidemill.data.intervals import IntervalSet
from tidemill.data.split import RawBatch, Run, SplitId, largest


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file, in order. `runs`: [start, stop) of their row numbers, which `table` holds and nothing else."""

    runs: tuple[tuple[int, int], ...]
    table: pa.Table


def overlap(wanted: IntervalSet, first: int, stop: int) -> tuple[tuple[int, int], ...]:
    """The intervals of [first, stop) that are wanted. Cheap for a set of many intervals, as a shuffled read leaves behind."""
    begin = bisect.bisect_right(wanted.intervals, first, key=lambda interval: interval[1])
    end = bisect.bisect_left(wanted.intervals, stop, key=lambda interval: interval[0])
    return tuple((max(low, first), min(high, stop)) for low, high in wanted.intervals[begin:end])


def cut(table: pa.Table, first: int, runs: tuple[tuple[int, int], ...]) -> Piece:
    """The rows of a table, whose first has number `first`, that lie in some intervals of it."""
    if len(runs) == 1:
        [(low, high)] = runs
        return Piece(runs, table.slice(low - first, high - low))
    kept = np.zeros(table.num_rows, bool)
    for low, high in runs:
        kept[low - first : high - first] = True
    return Piece(runs, table.filter(pa.array(kept)))


def raw_batch(split: SplitId, piece: Piece, times: np.ndarray | None, *, shift: int = 0) -> RawBatch:
    """Rows with their positions, which are row numbers plus `shift`. `times`: (n,) or None."""
    runs, at = [], 0
    for start, stop in piece.runs:
        rows = stop - start
        runs.append(Run(split, shift + start, shift + stop, rows, event_time=largest(times, at, at + rows)))
        at += rows
    return RawBatch(piece.table, tuple(runs), times)


def times_of(table: pa.Table, time_column: str | None, path: str) -> np.ndarray | None:
    """(n,) event times of a file's rows; None if no column has them."""
    if time_column is None:
        return None
    return column_times(table.column(time_column), where=f"{path}: column {time_column!r}")


def plain(table: pa.Table, types: Mapping[str, pa.DataType] | None = None) -> pa.Table:
    """Rows with each column's plain type, or the one that `types` names. Raises ArrowInvalid for text that is too much for it
    (2 GiB in one piece)."""
    types = types or {}
    schema = pa.schema([pa.field(field.name, types.get(field.name) or plain_type(field.type)) for field in table.schema])
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
