"""The seam of message formats: messages to rows, many at a time, telling which message each row came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

EMPTY = "it has no content (a tombstone, or blank)"

BAD_MESSAGE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException, OSError, ValueError)
"""What libraries raise for bytes that can't be read. (PanicException is no Exception; polars raises it for damaged Avro.)"""


@dataclass(frozen=True, slots=True)
class Poison:
    """Why a message gives no rows. `column`: the one at fault, if it is one. `is_schema`: not this message is damaged, but what
    its schema says lacks or narrows a column, so that all like it can't be read."""

    why: str
    column: str | None = None
    is_schema: bool = False

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class Decoded:
    """`table`: the rows of all messages, in order; `rows`: (messages,) int64, how many each gave; `poison`: index -> why, for
    messages that can't be read (0 rows)."""

    table: pa.Table
    rows: np.ndarray
    poison: dict[int, Poison]


class Decoder(ABC):
    """Decodes messages into tables of one schema. Used by one thread at a time."""

    @abstractmethod
    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        """All rows of all messages. Never raises for what a message holds; DeadlineError if a schema can't be fetched now."""


class ColumnError(ValueError):
    """A column of a message's schema that doesn't fit."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column!r} {why}")
        self.column = column

    @property
    def poison(self) -> Poison:
        return Poison(str(self), self.column, is_schema=True)


def by_halves(
    read: Callable[[int, int], pa.Table], start: int, stop: int, poison: dict[int, Poison], *, explain: Callable[[int, str], Poison]
) -> Iterator[pa.Table]:
    """The rows of messages [start, stop), in as few calls of `read` as possible: if one fails, its halves are read, down to the
    message at fault, for which `explain(index, error)` says why it is poison."""
    try:
        yield read(start, stop)
    except BAD_MESSAGE as error:
        if stop - start == 1:
            poison[start] = explain(start, str(error))
            return
        middle = (start + stop) // 2
        yield from by_halves(read, start, middle, poison, explain=explain)
        yield from by_halves(read, middle, stop, poison, explain=explain)


Columns = Mapping[str, pa.DataType | None]
"""Columns to read. A type of None means: as the messages have it, in the widest form of its kind (INT64, DOUBLE, STRING)."""
