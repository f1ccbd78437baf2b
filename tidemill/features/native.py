"""The id kernel in compiled code: one call walks all columns where Arrow holds them, without the GIL.

It is given addresses, so the caller keeps the arrays alive. Everything compiled stands in this file, since the cache
of compiled code notices changes to this file only (the mixing functions of hashing.py never change).
"""

# mypy: ignore-errors
# (numba infers the types of what it compiles)

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba
import numpy as np
import pyarrow as pa
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from tidemill.features.columns import Column
from tidemill.features.hashing import (
    FARM_K2,
    FARM_X0,
    FARM_Y0,
    FARM_Z0,
    STD_MULTIPLIER,
    STD_SEED,
    farm_block,
    farm_last,
    farm_upto_3,
    farm_upto_7,
    farm_upto_16,
    farm_upto_32,
    farm_upto_64,
    std_finish,
    std_tail,
    std_word,
)
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
    WIDTH,
    Program,
)

# A column as the kernel sees it: addresses (0 = none), Arrow offsets, and the widths of its integers.
(ROWS, WIDE, TEXT, STARTS, DATA, VALID, SHIFT, LISTED, LIST_WIDE, LIST_STARTS, LIST_VALID, LIST_SHIFT, ADDRESSES) = range(13)


def encode(
    program: Program, columns: Sequence[Column], num_rows: int, size: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int] | None]:
    """All ids, feature-major, (V,) int64; lengths (F, size) int32; and the first bad value as (feature, row, code).

    A column of one row stands for all. Releases the GIL.
    """
    addresses = np.array([_addresses(column) for column in columns], np.int64).reshape(len(columns), ADDRESSES)
    values = np.empty(_bound(addresses, program.plans, num_rows), np.int64)
    lengths = np.zeros((len(columns), size), np.int32)
    fault = np.zeros(3, np.int64)
    tables = (program.plans, program.defaults, program.keys, program.ids)
    used = _encode(addresses, *tables, num_rows, values, lengths, np.empty(20, np.uint8), fault)
    return values[:used], lengths, (int(fault[0]), int(fault[1]), int(fault[2])) if fault[2] else None


def _addresses(column: Column) -> tuple[int, ...]:
    items = column.items
    buffers = items.buffers()
    is_text = len(buffers) == 3
    wide = items.type in (pa.large_string(), pa.int64())
    starts = buffers[1] if is_text else None
    own = (
        column.rows,
        wide,
        is_text,
        starts.address if starts else 0,
        _address(buffers[-1]),
        _address(buffers[0]) if items.null_count else 0,
        items.offset,
    )
    lists = column.lists
    if lists is None:
        return (*own, 0, 0, 0, 0, 0)
    outer = lists.buffers()
    valid = _address(outer[0]) if lists.null_count else 0
    return (*own, 1, pa.types.is_large_list(lists.type), _address(outer[1]), valid, lists.offset)


def _address(buffer: pa.Buffer | None) -> int:
    return buffer.address if buffer is not None else 0


# Within an entry everything is inlined: passing views and plans from call to call took four times as long as the work.
_inline = numba.njit(nogil=True, boundscheck=False, error_model="numpy", forceinline=True)


def _entry(function: Callable) -> Callable:
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    except RuntimeError:  # nowhere to write the cache: compile in each process
        return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _trailing_zeros(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.uint64), generate


@_inline
def _bytes(address, count):
    return numba.carray(_pointer(address), (count,), np.uint8)


@_inline
def _int32s(address, count):
    return numba.carray(_pointer(address), (count,), np.int32)


@_inline
def _uint64s(address, count):
    return numba.carray(_pointer(address), (count,), np.uint64)


@_inline
def _int64s(address, count):
    return numba.carray(_pointer(address), (count,), np.int64)


# Far beyond any buffer: the views have no length of their own, rows and offsets say what is read.
_ALL = 1 << 62


@_inline
def _is_null(valid_address, at):
    if valid_address == 0:
        return False
    return (_bytes(valid_address, _ALL)[np.uint64(at >> 3)] >> (at & 7)) & 1 == 0


# ---- words and hashes


@_inline
def _word(data, at, count):
    word = np.uint64(0)
    for k in range(count):
        word |= np.uint64(data[np.uint64(at + k)]) << np.uint64(8 * k)
    return word


@_inline
def _word8(data, at):
    # Written out, so that the compiler makes one load of it.
    p = np.uint64(at)
    return (
        np.uint64(data[p])
        | np.uint64(data[p + np.uint64(1)]) << np.uint64(8)
        | np.uint64(data[p + np.uint64(2)]) << np.uint64(16)
        | np.uint64(data[p + np.uint64(3)]) << np.uint64(24)
        | np.uint64(data[p + np.uint64(4)]) << np.uint64(32)
        | np.uint64(data[p + np.uint64(5)]) << np.uint64(40)
        | np.uint64(data[p + np.uint64(6)]) << np.uint64(48)
        | np.uint64(data[p + np.uint64(7)]) << np.uint64(56)
    )


@_inline
def _std(data, start, stop):
    state = STD_SEED ^ (np.uint64(stop - start) * STD_MULTIPLIER)
    at = start
    while stop - at >= 8:
        state = std_word(state, _word8(data, at))
        at += 8
    if at < stop:
        state = std_tail(state, _word(data, at, stop - at))
    return std_finish(state)


@_inline
def _farm(data, start, stop):
    count = stop - start
    size = np.uint64(count)
    if count > 64:
        return _farm_long(data, start, stop)
    if count > 32:
        return farm_upto_64(
            _word8(data, start),
            _word8(data, start + 8),
            _word8(data, start + 16),
            _word8(data, start + 24),
            _word8(data, stop - 32),
            _word8(data, stop - 24),
            _word8(data, stop - 16),
            _word8(data, stop - 8),
            size,
        )
    if count > 16:
        return farm_upto_32(_word8(data, start), _word8(data, start + 8), _word8(data, stop - 16), _word8(data, stop - 8), size)
    if count >= 8:
        return farm_upto_16(_word8(data, start), _word8(data, stop - 8), size)
    if count >= 4:
        return farm_upto_7(_word(data, start, 4), _word(data, stop - 4, 4), size)
    if count > 0:
        return farm_upto_3(_word(data, start, 1), _word(data, start + (count >> 1), 1), _word(data, stop - 1, 1), size)
    return FARM_K2


@_inline
def _eight(data, at):
    return (
        _word8(data, at),
        _word8(data, at + 8),
        _word8(data, at + 16),
        _word8(data, at + 24),
        _word8(data, at + 32),
        _word8(data, at + 40),
        _word8(data, at + 48),
        _word8(data, at + 56),
    )


@_inline
def _farm_long(data, start, stop):
    zero = np.uint64(0)
    x, y, z = FARM_X0 + _word8(data, start), FARM_Y0, FARM_Z0
    v0, v1, u0, u1 = zero, zero, zero, zero
    at = start
    while stop - at > 64:
        b0, b1, b2, b3, b4, b5, b6, b7 = _eight(data, at)
        x, y, z, v0, v1, u0, u1 = farm_block(x, y, z, v0, v1, u0, u1, b0, b1, b2, b3, b4, b5, b6, b7)
        at += 64
    rest = np.uint64((stop - start - 1) & 63)
    b0, b1, b2, b3, b4, b5, b6, b7 = _eight(data, stop - 64)
    return farm_last(x, y, z, v0, v1, u0, u1, rest, b0, b1, b2, b3, b4, b5, b6, b7)


# ---- one value


@_inline
def _parse(data, start, stop):
    """The whole number in data[start:stop]; -NOT_A_NUMBER or -OUT_OF_RANGE if it has none or is negative or huge."""
    negative = data[np.uint64(start)] == 45
    at = start + 1 if negative or data[np.uint64(start)] == 43 else start
    if at == stop:
        return -NOT_A_NUMBER
    value = 0
    huge = False
    while at < stop:
        digit = np.int64(data[np.uint64(at)]) - 48
        if digit < 0 or digit > 9:
            return -NOT_A_NUMBER
        huge |= value > 99_999_999_999_999_999
        if not huge:
            value = value * 10 + digit
        at += 1
    return -OUT_OF_RANGE if huge or (negative and value > 0) else value


@_inline
def _look_up(key, plan, keys, ids):
    mask = plan[TABLE_MASK]
    slot = np.int64(key & np.uint64(mask))
    while True:
        at = plan[TABLE] + slot
        if ids[at] < 0:
            return plan[UNKNOWN]
        if keys[at] == key:
            return ids[at]
        slot = (slot + 1) & mask


@_inline
def _text_id(data, start, stop, plan, keys, ids):
    """The id of data[start:stop], which isn't empty; or a negative code."""
    rule = plan[RULE]
    if rule == STD:
        return np.int64(_std(data, start, stop) % np.uint64(plan[MODULUS]))
    if rule == FARM:
        return np.int64(_farm(data, start, stop) % np.uint64(plan[MODULUS]))
    if rule == VOCABULARY:
        return _look_up(_std(data, start, stop), plan, keys, ids)
    value = _parse(data, start, stop)
    return -OUT_OF_RANGE if value >= plan[MODULUS] else value


@_inline
def _number_id(value, plan, keys, ids, digits):
    rule = plan[RULE]
    if rule == COPY:
        return value
    if rule == NUMBER:
        return -OUT_OF_RANGE if value < 0 or value >= plan[MODULUS] else value
    start = _write_digits(value, digits)
    return _text_id(digits, start, 20, plan, keys, ids)


@_inline
def _write_digits(value, digits):
    """Decimal text at the end of a 20-byte array; returns where it begins."""
    rest = np.uint64(value) if value >= 0 else np.uint64(0) - np.uint64(value)
    at = 20
    while True:
        at -= 1
        digits[at] = np.uint8(48 + rest % np.uint64(10))
        rest //= np.uint64(10)
        if rest == 0:
            break
    if value < 0:
        at -= 1
        digits[at] = 45
    return at


# ---- one row


@_inline
def _find(data, start, stop, byte):
    """Where `byte` is first in data[start:stop], or stop; eight bytes at a time."""
    ones, tops = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    pattern = np.uint64(byte) * ones
    while stop - start >= 8:
        differences = _word8(data, start) ^ pattern
        # The lowest top bit that stays set marks the first byte without a difference.
        zeros = (differences - ones) & ~differences & tops
        if zeros != 0:
            return start + (_trailing_zeros(zeros) >> 3)
        start += 8
    while start < stop and data[np.uint64(start)] != byte:
        start += 1
    return start


@_inline
def _first_piece(data, start, stop, separator):
    """The first piece between separators that isn't empty; (stop, stop) if there is none."""
    while start < stop and data[np.uint64(start)] == separator:
        start += 1
    end = start
    while end < stop and data[np.uint64(end)] != separator:
        end += 1
    return start, end


@_inline
def _text_item(data, start, stop, cut, separator, plan, views, values, cursor, room):
    """Write the ids of one text, cut into pieces at `cut`; of a step, up to `separator`. -1: there are no such bytes.

    Returns cursor, or a negative code.
    """
    is_sequence = plan[DELIMITER] >= 0
    at = start
    while room > 0:
        end = _find(data, at, stop, cut) if cut >= 0 else stop
        first, last = at, end
        if separator >= 0:
            first, last = _first_piece(data, at, end, separator)
        if first < last:
            value = _text_id(data, first, last, plan, views[1], views[2])
            if value < 0:
                return value
            values[cursor] = value
            cursor += 1
            room -= 1
        elif is_sequence:
            if plan[DEFAULT_START] == plan[DEFAULT_STOP]:
                return -EMPTY_STEP
            values[cursor] = views[0][plan[DEFAULT_START]]
            cursor += 1
            room -= 1
        if end >= stop:
            break
        at = end + 1
    return cursor


@_inline
def _text_row(column, plan, views, starts, low, high, cut, separator, values, cursor):
    """Write the ids of the items [low, high) of one row. Returns cursor, or a negative code."""
    data = _bytes(column[DATA], _ALL)
    begin = cursor
    limit = plan[LIMIT] if plan[LIMIT] > 0 else _ALL
    listed = column[LISTED] == 1
    for item in range(low, high):
        room = limit - (cursor - begin)
        if room <= 0:
            break
        at = item + column[SHIFT]
        start, stop = np.int64(starts[np.uint64(at)]), np.int64(starts[np.uint64(at + 1)])
        if _is_null(column[VALID], at):
            stop = start
        if start == stop and not listed:
            break
        cursor = _text_item(data, start, stop, cut, separator, plan, views, values, cursor, room)
        if cursor < 0:
            return cursor
    return cursor


@_inline
def _number_row(column, plan, views, data, low, high, values, cursor, digits):
    begin = cursor
    limit = plan[LIMIT] if plan[LIMIT] > 0 else _ALL
    is_sequence = plan[DELIMITER] >= 0
    for item in range(low, high):
        if cursor - begin >= limit:
            break
        at = item + column[SHIFT]
        if not _is_null(column[VALID], at):
            value = _number_id(np.int64(data[np.uint64(at)]), plan, views[1], views[2], digits)
        elif not is_sequence or column[LISTED] == 0:
            continue
        elif plan[DEFAULT_START] == plan[DEFAULT_STOP]:
            value = -EMPTY_STEP
        else:
            value = views[0][plan[DEFAULT_START]]
        if value < 0:
            return value
        values[cursor] = value
        cursor += 1
    return cursor


# ---- one column


@_inline
def _extent(column, row):
    """The items [low, high) of a row; none for a null list."""
    if column[LISTED] == 0:
        return row, row + 1
    at = row + column[LIST_SHIFT]
    if _is_null(column[LIST_VALID], at):
        return np.int64(0), np.int64(0)
    if column[LIST_WIDE]:
        starts = _int64s(column[LIST_STARTS], _ALL)
        return starts[np.uint64(at)], starts[np.uint64(at + 1)]
    narrow = _int32s(column[LIST_STARTS], _ALL)
    return np.int64(narrow[np.uint64(at)]), np.int64(narrow[np.uint64(at + 1)])


@_inline
def _row(column, plan, views, row, cut, separator, values, cursor, digits):
    low, high = _extent(column, row)
    if column[TEXT]:
        if column[WIDE]:
            starts = _int64s(column[STARTS], _ALL)
            return _text_row(column, plan, views, starts, low, high, cut, separator, values, cursor)
        narrow = _int32s(column[STARTS], _ALL)
        return _text_row(column, plan, views, narrow, low, high, cut, separator, values, cursor)
    if column[WIDE]:
        return _number_row(column, plan, views, _int64s(column[DATA], _ALL), low, high, values, cursor, digits)
    return _number_row(column, plan, views, _int32s(column[DATA], _ALL), low, high, values, cursor, digits)


@_inline
def _items(column):
    """The items [low, high) of all rows."""
    rows, shift = column[ROWS], column[LIST_SHIFT]
    if column[LISTED] == 0 or rows == 0:
        return np.int64(0), rows
    if column[LIST_WIDE]:
        wide = _int64s(column[LIST_STARTS], _ALL)
        return wide[shift], wide[shift + rows]
    narrow = _int32s(column[LIST_STARTS], _ALL)
    return np.int64(narrow[shift]), np.int64(narrow[shift + rows])


@_inline
def _count(column, byte):
    """How often a byte occurs in the text of all rows."""
    low, high = _items(column)
    low, high = low + column[SHIFT], high + column[SHIFT]
    if column[TEXT] == 0 or column[STARTS] == 0 or low >= high:
        return np.int64(0)
    if column[WIDE]:
        wide = _int64s(column[STARTS], _ALL)
        start, stop = wide[low], wide[high]
    else:
        narrow = _int32s(column[STARTS], _ALL)
        start, stop = np.int64(narrow[low]), np.int64(narrow[high])
    count = np.int64(0)
    for value in _bytes(column[DATA] + start, stop - start):
        count += value == byte
    return count


@_entry
def _bound(columns, plans, num_rows):
    """At least as many values as _encode will write."""
    total = np.int64(0)
    for f in range(len(columns)):
        column, plan = columns[f], plans[f]
        rows = column[ROWS]
        if rows == 0:
            continue
        low, high = _items(column)
        # Each item is a piece, and each cut makes one more; elements of lists aren't cut.
        count = high - low + rows * (plan[DEFAULT_STOP] - plan[DEFAULT_START])
        if column[LISTED] == 0:
            count += _count(column, plan[DELIMITER] if plan[DELIMITER] >= 0 else plan[SEPARATOR])
        if plan[LIMIT] > 0:
            count = min(count, rows * plan[LIMIT])
        total += count * max(1, num_rows // rows)
    return total


@_inline
def _cuts(column, plan):
    """The byte between pieces and, in a sequence, between the values of a step; -1 if the text holds none."""
    separator = plan[SEPARATOR] if _count(column, plan[SEPARATOR]) > 0 else np.int64(-1)
    if plan[DELIMITER] < 0:
        return (separator if column[LISTED] == 0 else np.int64(-1)), np.int64(-1)
    return (plan[DELIMITER] if column[LISTED] == 0 else np.int64(-1)), separator


@_entry
def _encode(columns, plans, defaults, keys, ids, num_rows, all_values, lengths, scratch, fault):
    """Fill values and lengths; returns the number of values, or 0 with `fault` set."""
    cursor = np.int64(0)
    # Inside, arrays are bare views: counting references to owned ones would cost more than the hashing.
    digits = _bytes(scratch.ctypes.data, len(scratch))
    values = _int64s(all_values.ctypes.data, len(all_values))
    views = (
        _int64s(defaults.ctypes.data, len(defaults)),
        _uint64s(keys.ctypes.data, len(keys)),
        _int64s(ids.ctypes.data, len(ids)),
    )
    for f in range(len(columns)):
        column, plan = to_fixed_tuple(columns[f], ADDRESSES), to_fixed_tuple(plans[f], WIDTH)
        cut, separator = _cuts(column, plan)
        # A column of one row is encoded once, and its ids are repeated.
        distinct = min(column[ROWS], num_rows)
        begin = cursor
        for row in range(distinct):
            before = cursor
            cursor = _row(column, plan, views, row, cut, separator, values, cursor, digits)
            if cursor < 0:
                fault[0], fault[1], fault[2] = f, row, -cursor
                return np.int64(0)
            if cursor == before:
                for at in range(plan[DEFAULT_START], plan[DEFAULT_STOP]):
                    values[cursor] = views[0][at]
                    cursor += 1
            lengths[f, row] = cursor - before
        if distinct < num_rows:
            count = cursor - begin
            for row in range(distinct, num_rows):
                values[cursor : cursor + count] = values[begin : begin + count]
                lengths[f, row] = count
                cursor += count
    return cursor
