"""Where the records of CSV text end, by the rules of Arrow's parser (RFC 4180, any line end). Compiled; without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34


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


def scan(text: np.ndarray, delimiter: int, num_values: int, *, is_end: bool, max_rows: int = -1) -> Scan:
    """Scan (n,) uint8. `num_values`: values that a record must have. `is_end`: the text's end ends a record too. `max_rows`: stop
    behind so many records; -1: never."""
    return Scan(*_scan(text, delimiter, num_values, is_end, max_rows))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:  # nowhere to write the cache: compile in each process
        return numba.njit(nogil=True, boundscheck=False)(function)


@_compiled
def _scan(text: np.ndarray, delimiter: int, num_values: int, is_end: bool, max_rows: int) -> tuple[int | bool, ...]:
    rows, size, lines, lines_done = 0, 0, 0, 0
    odd_line, odd_values = -1, 0
    at, length = 0, len(text)
    begin, begin_line, values = 0, 0, 1
    at_value_start, in_quotes = True, False
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
                elif char == _NEWLINE:
                    lines += 1
            elif char == delimiter:
                values += 1
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
                if values != num_values and odd_line < 0:
                    odd_line, odd_values = begin_line, values
            size, lines_done = at, lines
            begin, begin_line, values, at_value_start = at, lines, 1, True
            if at == length:
                break
    open_line = begin_line if begin < length and rows != max_rows else -1
    return rows, size, lines_done, odd_line, odd_values, open_line, in_quotes
