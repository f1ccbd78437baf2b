"""The id kernel in NumPy, for machines without numba: a column at a time, with the same bits as the compiled one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.features.columns import Column
from tidemill.features.hashing import hash_ranges
from tidemill.features.program import (
    COPY,
    DEFAULT_START,
    DEFAULT_STOP,
    DELIMITER,
    EMPTY_STEP,
    FARM,
    LIMIT,
    MODULUS,
    NOT_A_NUMBER,
    NUMBER,
    OUT_OF_RANGE,
    RULE,
    SEPARATOR,
    STD,
    TABLE,
    TABLE_MASK,
    UNKNOWN,
    VOCABULARY,
    Program,
)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Ranges of bytes and the row each belongs to, in row order."""

    data: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def keep(self, chosen: np.ndarray) -> _Pieces:
        return _Pieces(self.data, self.rows[chosen], self.starts[chosen], self.stops[chosen])


def encode(
    program: Program, columns: Sequence[Column], num_rows: int, size: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int] | None]:
    """As native.encode."""
    lengths = np.zeros((len(columns), size), np.int32)
    parts: list[np.ndarray] = []
    for feature, (column, plan) in enumerate(zip(columns, program.plans, strict=True)):
        distinct = min(column.rows, num_rows)
        values, counts, fault = _encode_column(program, plan, column, distinct)
        if fault is not None:
            return np.empty(0, np.int64), lengths, (feature, *fault)
        if distinct < num_rows:
            values, counts = np.tile(values, num_rows), np.tile(counts, num_rows)
        parts.append(values)
        lengths[feature, :num_rows] = counts
    return np.concatenate(parts) if parts else np.empty(0, np.int64), lengths, None


def _encode_column(
    program: Program, plan: np.ndarray, column: Column, num_rows: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int] | None]:
    rows, items = _items(column, num_rows)
    is_text = pa.types.is_string(column.items.type) or pa.types.is_large_string(column.items.type)
    # An element that is missing: a step keeps its place, a value of a bag has none.
    if is_text:
        pieces = _pieces(plan, column, rows, items)
        missing = pieces.starts == pieces.stops
    else:
        numbers, missing = _numbers(column, items)
        pieces = _Pieces(np.empty(0, np.uint8), rows, numbers, numbers)
    if plan[DELIMITER] < 0 or (column.lists is None and not is_text):
        pieces, missing = pieces.keep(~missing), missing[~missing]
    kept = _within_limit(pieces.rows, int(plan[LIMIT]))
    pieces, missing = pieces.keep(kept), missing[kept]
    ids = np.full(len(missing), -EMPTY_STEP, np.int64)
    if plan[DEFAULT_START] < plan[DEFAULT_STOP]:
        ids[:] = program.defaults[plan[DEFAULT_START]]
    present = np.flatnonzero(~missing)
    chosen = pieces.keep(present)
    ids[present] = _text_ids(program, plan, chosen) if is_text else _number_ids(program, plan, chosen.starts)
    bad = np.flatnonzero(ids < 0)
    if len(bad):
        return ids, ids, (int(pieces.rows[bad[0]]), -int(ids[bad[0]]))
    defaults = program.defaults[plan[DEFAULT_START] : plan[DEFAULT_STOP]]
    return *_fill_missing(pieces.rows, ids, num_rows, defaults), None


def _items(column: Column, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the position of every element."""
    rows = np.arange(num_rows)
    if column.lists is None:
        return rows, rows
    offsets = column.lists.offsets.to_numpy().astype(np.int64)[: num_rows + 1]
    counts = np.diff(offsets)
    if column.lists.null_count:
        counts = np.where(column.lists.is_null().to_numpy(zero_copy_only=False)[:num_rows], 0, counts)
    rows = np.repeat(rows, counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, offsets[:-1][rows] + within


def _numbers(column: Column, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    array = column.items
    missing = array.is_null().to_numpy(zero_copy_only=False)
    values = array.fill_null(0).to_numpy() if array.null_count else array.to_numpy()
    return values.astype(np.int64)[items], missing[items]


def _pieces(plan: np.ndarray, column: Column, rows: np.ndarray, items: np.ndarray) -> _Pieces:
    """Text cut into values or steps; a step is reduced to its first value."""
    array = column.items
    _, offsets_buffer, data_buffer = array.buffers()
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    at = items + array.offset
    offsets = np.frombuffer(offsets_buffer, width) if offsets_buffer else np.zeros(1, width)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    starts, stops = offsets[at].astype(np.int64), offsets[at + 1].astype(np.int64) if len(at) else offsets[at]
    if array.null_count:
        missing = array.is_null().to_numpy(zero_copy_only=False)[items]
        stops = np.where(missing, starts, stops)
    pieces = _Pieces(data, rows, starts, stops)
    is_sequence = plan[DELIMITER] >= 0
    if column.lists is None:
        pieces = _cut(pieces.keep(starts < stops), int(plan[DELIMITER] if is_sequence else plan[SEPARATOR]))
    return _first_values(pieces, int(plan[SEPARATOR])) if is_sequence else pieces


def _cut(pieces: _Pieces, byte: int) -> _Pieces:
    cuts = np.flatnonzero(pieces.data == byte)
    low, high = np.searchsorted(cuts, pieces.starts), np.searchsorted(cuts, pieces.stops)
    counts = high - low + 1
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    inner = np.append(cuts, 0)
    starts = np.where(within == 0, pieces.starts[rows], inner[low[rows] + within - 1] + 1)
    stops = np.where(within == counts[rows] - 1, pieces.stops[rows], inner[np.minimum(low[rows] + within, len(cuts))])
    return _Pieces(pieces.data, pieces.rows[rows], starts, stops)


def _first_values(pieces: _Pieces, separator: int) -> _Pieces:
    """Each piece from its first byte that isn't a separator to the next separator."""
    others = np.append(np.flatnonzero(pieces.data != separator), len(pieces.data))
    cuts = np.append(np.flatnonzero(pieces.data == separator), len(pieces.data))
    starts = np.minimum(others[np.searchsorted(others, pieces.starts).clip(max=len(others) - 1)], pieces.stops)
    stops = np.minimum(cuts[np.searchsorted(cuts, starts).clip(max=len(cuts) - 1)], pieces.stops)
    return _Pieces(pieces.data, pieces.rows, starts, stops)


def _within_limit(rows: np.ndarray, limit: int) -> np.ndarray:
    if limit == 0:
        return np.ones(len(rows), bool)
    return np.arange(len(rows)) - np.searchsorted(rows, rows) < limit


def _text_ids(program: Program, plan: np.ndarray, pieces: _Pieces) -> np.ndarray:
    rule = plan[RULE]
    if rule in (STD, FARM):
        hashes = hash_ranges("std" if rule == STD else "farm", pieces.data, pieces.starts, pieces.stops)
        return (hashes % np.uint64(plan[MODULUS])).astype(np.int64)
    if rule == VOCABULARY:
        return _look_up(program, plan, hash_ranges("std", pieces.data, pieces.starts, pieces.stops))
    values = _parse(pieces)
    return np.where(values >= plan[MODULUS], -OUT_OF_RANGE, values)


def _number_ids(program: Program, plan: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    if plan[RULE] == COPY:
        return numbers
    if plan[RULE] == NUMBER:
        return np.where((numbers < 0) | (numbers >= plan[MODULUS]), -OUT_OF_RANGE, numbers)
    texts = [str(number).encode() for number in numbers.tolist()]
    stops = np.cumsum([len(text) for text in texts], dtype=np.int64)
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)[: len(texts)]
    data = np.frombuffer(b"".join(texts), np.uint8)
    return _text_ids(program, plan, _Pieces(data, numbers, starts, stops))


def _look_up(program: Program, plan: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    table = slice(int(plan[TABLE]), int(plan[TABLE] + plan[TABLE_MASK] + 1))
    used = np.flatnonzero(program.ids[table] >= 0)
    keys = program.keys[table][used]
    order = np.argsort(keys)
    keys, ids = keys[order], program.ids[table][used][order]
    at = np.searchsorted(keys, hashes).clip(max=len(keys) - 1)
    return np.asarray(np.where(keys[at] == hashes, ids[at], plan[UNKNOWN]))


def _parse(pieces: _Pieces) -> np.ndarray:
    """Whole numbers; -NOT_A_NUMBER or -OUT_OF_RANGE where there is none, or a negative or huge one."""
    count = len(pieces.starts)
    first = pieces.data[pieces.starts] if count else np.empty(0, np.uint8)
    negative = first == ord("-")
    at = pieces.starts + (negative | (first == ord("+")))
    wrong = at == pieces.stops
    values, huge = np.zeros(count, np.int64), np.zeros(count, bool)
    for step in range(int((pieces.stops - at).max(initial=0))):
        rows = np.flatnonzero(at + step < pieces.stops)
        digits = pieces.data[at[rows] + step].astype(np.int64) - 48
        wrong[rows] |= (digits < 0) | (digits > 9)
        huge[rows] |= values[rows] > 99_999_999_999_999_999
        values[rows] = np.where(huge[rows], values[rows], values[rows] * 10 + digits.clip(0, 9))
    values = np.where(huge | (negative & (values > 0)), -OUT_OF_RANGE, values)
    return np.where(wrong, -NOT_A_NUMBER, values)


def _fill_missing(rows: np.ndarray, ids: np.ndarray, num_rows: int, defaults: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows without an id get the defaults; returns values and counts."""
    found = np.bincount(rows, minlength=num_rows)
    empty = np.flatnonzero(found == 0)
    counts = np.where(found == 0, len(defaults), found)
    begins = np.cumsum(counts) - counts
    values = np.empty(int(counts.sum()), np.int64)
    values[begins[rows] + np.arange(len(rows)) - np.searchsorted(rows, rows)] = ids
    values[(begins[empty][:, None] + np.arange(len(defaults))).reshape(-1)] = np.tile(defaults, len(empty))
    return values, counts
