"""Where the records of CSV text end, by the rules of Arrow's parser (RFC 4180, any line end). Compiled; without the GIL.

Two scanners: one reads a byte after the other and knows all the rules. The other takes 64 bytes at once, and only records that
are plain: the right number of values, quotes around whole values, lines that end in \\n or \\r\\n. It stops in front of any
other, which is left to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
_WORD = 64


@dataclass(frozen=True, slots=True)
class Scan:
    """What a stretch of text holds, from the beginning of a record on."""

    rows: int
    """records that end in it; blank lines are none"""
    size: int
    """bytes up to the end of the last of them"""
    lines: int
    """line ends in those bytes, within quotes too"""
    odd_line: int
    """line (from 0) of the first record with another number of values than expected; -1: there is none"""
    odd_values: int
    """how many that one has"""
    open_line: int
    """line (from 0) on which the record begins that doesn't end in the text; -1: there is none"""
    in_quotes: bool
    """the text ends within quotes"""
    may_be_empty: bool
    """False: no value of these records is empty"""
    stray_line: int
    """line (from 0) of the first record in which text follows a closing quote; -1: there is none"""


def scan(text: np.ndarray, delimiter: int, num_values: int, *, is_end: bool, max_rows: int = -1) -> Scan:
    """Scan (n,) uint8. `num_values`: values that a record must have. `is_end`: the text's end ends a record too. `max_rows`: stop
    behind so many records; -1: never."""
    return Scan(*_scan(text, delimiter, num_values, is_end, max_rows))


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Called in compiled code without the first argument, which the types are made of."""
    instruction: Callable[..., Any] = intrinsic(function)
    return instruction


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:  # nowhere to write the cache: compile in each process
        return numba.njit(nogil=True, boundscheck=False)(function)


@_compiled
def _scan_bytes(text: np.ndarray, delimiter: int, num_values: int, is_end: bool, max_rows: int) -> tuple[int | bool, ...]:
    rows, size, lines, lines_done = 0, 0, 0, 0
    odd_line, odd_values = -1, 0
    at, length = 0, len(text)
    begin, begin_line, values = 0, 0, 1
    at_value_start, in_quotes = True, False
    may_be_empty, is_stray, stray_line = False, False, -1
    while rows != max_rows:
        ended = False
        if at == length:
            if not is_end or begin == length or in_quotes:
                break
            ended = True
        else:
            char = text[at]
            at += 1
            if in_quotes:
                if char == _QUOTE:
                    if at < length and text[at] == _QUOTE:
                        at += 1
                    else:
                        in_quotes = False
                        may_be_empty |= text[at - 2] == _QUOTE
                        is_stray |= at < length and text[at] not in (delimiter, _NEWLINE, _RETURN)
                elif char == _NEWLINE:
                    lines += 1
            elif char == delimiter:
                values += 1
                may_be_empty |= at_value_start
                at_value_start = True
            elif char in (_NEWLINE, _RETURN):
                if char == _RETURN and at == length and not is_end:
                    break  # perhaps the first of two bytes that are one line end
                if char == _RETURN and at < length and text[at] == _NEWLINE:
                    at += 1
                lines += 1
                ended = True
            elif char == _QUOTE and at_value_start:
                in_quotes = True
                at_value_start = False
            else:
                at_value_start = False
        if ended:
            if at_value_start and values == 1:
                pass
            else:
                rows += 1
                may_be_empty |= at_value_start
                if is_stray and stray_line < 0:
                    stray_line = begin_line
                if values != num_values and odd_line < 0:
                    odd_line, odd_values = begin_line, values
            size, lines_done = at, lines
            begin, begin_line, values, at_value_start, is_stray = at, lines, 1, True, False
            if at == length:
                break
    open_line = begin_line if begin < length and rows != max_rows else -1
    return rows, size, lines_done, odd_line, odd_values, open_line, in_quotes, may_be_empty, stray_line


@_instruction
def _equal(context: Any, address: Any, char: Any) -> tuple[Signature, Callable[..., Any]]:
    """Which of the 64 bytes at an address are a character: one bit each, the first byte's the lowest."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: list[ir.Value]) -> ir.Value:
        word, number = ir.VectorType(ir.IntType(8), _WORD), ir.IntType(32)
        unset, everywhere = ir.Constant(word, ir.Undefined), ir.Constant(ir.VectorType(number, _WORD), [0] * _WORD)
        found = builder.load(builder.inttoptr(arguments[0], word.as_pointer()), align=1, typ=word)
        wanted = builder.insert_element(unset, arguments[1], ir.Constant(number, 0))
        equal = builder.icmp_unsigned("==", found, builder.shuffle_vector(wanted, unset, everywhere))
        return builder.bitcast(equal, ir.IntType(_WORD))

    return types.uint64(types.uintp, types.uint8), generate


@_instruction
def _count(context: Any, bits: Any) -> tuple[Signature, Callable[..., Any]]:
    """How many bits are set."""

    def generate(context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: list[ir.Value]) -> ir.Value:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@_compiled
def _scan_words(text: np.ndarray, start: int, delimiter: int, num_values: int) -> tuple[int, int, int, bool, bool]:
    """Rows, end and lines of the plain records from `start` on, where one begins; whether it went on as far as there are words;
    whether a value of them may be empty."""
    one, none = np.uint64(1), np.uint64(0)
    base, length = text.ctypes.data, len(text)
    rows, size, lines, lines_done, delimiters = 0, start, 0, 0, 0
    # All bits set while a quoted value goes on from one word into the next.
    quoted = none
    # 1 if a quoted value may begin with the word; and if one ended right before it.
    before, closed = one, none
    # Characters that follow each other with an empty value between them, perhaps; and how the word before ended.
    empty, after_break, after_quote = none, one, none
    for at in range(start, length - _WORD + 1, _WORD):
        word = base + at
        quotes, ends = _equal(word, np.uint8(_QUOTE)), _equal(word, np.uint8(_NEWLINE))
        separators, returns = _equal(word, np.uint8(delimiter)), _equal(word, np.uint8(_RETURN))
        breaks = separators | ends
        empty |= (breaks | returns) & ((breaks << one) | after_break) | quotes & ((quotes << one) | after_quote)
        after_break, after_quote = breaks >> np.uint64(63), quotes >> np.uint64(63)
        inside = quotes
        for shift in (1, 2, 4, 8, 16, 32):
            inside ^= inside << np.uint64(shift)
        inside ^= quoted
        # A quote within a value that isn't quoted means itself, and a doubled one closes and opens, which comes to the same.
        edges = separators | ends | quotes
        if quotes & inside & ~((edges << one) | before):
            return rows, size, lines_done, False, empty != none
        before = edges >> np.uint64(63)
        closing = quotes & ~inside
        if ((closing << one) | closed) & ~(edges | returns):
            return rows, size, lines_done, False, empty != none
        closed = closing >> np.uint64(63)
        returns &= ~inside
        if returns:
            followed = ends >> one
            if at + _WORD < length and text[at + _WORD] == _NEWLINE:
                followed |= one << np.uint64(63)
            if returns & ~followed:
                return rows, size, lines_done, False, empty != none
        separators &= ~inside
        open_ends = ends & ~inside
        while open_ends:
            end = open_ends & (none - open_ends)
            passed = end | (end - one)
            delimiters += _count(separators & passed)
            stop = at + _count(passed)
            is_blank = stop - size == 1 or (stop - size == 2 and text[size] == _RETURN)
            if not is_blank:
                if delimiters != num_values - 1:
                    return rows, size, lines_done, False, empty != none
                rows += 1
            lines_done = lines + _count(ends & passed)
            size, delimiters = stop, 0
            separators &= ~passed
            open_ends ^= end
        delimiters += _count(separators)
        lines += _count(ends)
        quoted = none - (inside >> np.uint64(63))
    return rows, size, lines_done, True, empty != none


@_compiled
def _scan(text: np.ndarray, delimiter: int, num_values: int, is_end: bool, max_rows: int) -> tuple[int | bool, ...]:
    rows, size, lines = 0, 0, 0
    odd_line, odd_values = -1, 0
    may_be_empty, stray_line = False, -1
    while True:
        is_rest = True
        if max_rows < 0:
            more, size, more_lines, is_rest, is_empty = _scan_words(text, size, delimiter, num_values)
            may_be_empty |= is_empty
            rows, lines = rows + more, lines + more_lines
        # One record that isn't plain, or all that is left.
        found = _scan_bytes(text[size:], delimiter, num_values, is_end, max_rows if is_rest else 1)
        if odd_line < 0 and found[3] >= 0:
            odd_line, odd_values = lines + found[3], found[4]
        if stray_line < 0 and found[8] >= 0:
            stray_line = lines + found[8]
        open_line = lines + found[5] if found[5] >= 0 else -1
        rows, size, lines = rows + found[0], size + found[1], lines + found[2]
        may_be_empty |= found[7]
        if is_rest or not found[0]:
            return rows, size, lines, odd_line, odd_values, open_line, found[6], may_be_empty, stray_line
