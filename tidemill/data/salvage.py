"""Batches of which some rows can't be transformed: the others are, and the positions of all stay covered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa

from tidemill.data.split import Provenance, RawBatch, Run, join_runs, keep_rows
from tidemill.errors import DataError, SchemaError

T = TypeVar("T")
Transform = Callable[[pa.Table], T]


def bad_rows(table: pa.Table, transform: Transform[T], error: DataError) -> Iterator[tuple[int, str]]:
    """(row, why) of each row that `transform` fails for, given that it failed with `error` for all of them.

    Halves are tried, down to single rows: about log2(rows) more batches' work for each bad row. Raises what fails only together,
    and a SchemaError, which is no row's fault.
    """
    yield from _search(table, 0, transform, error)


def without_rows(table: pa.Table, provenance: Provenance, rows: Sequence[int]) -> tuple[pa.Table, Provenance]:
    """A batch, not a shuffled one, without those rows. Its runs still cover their positions."""
    keep = np.ones(table.num_rows, bool)
    keep[list(rows)] = False
    kept = keep_rows(RawBatch(table, provenance.runs, provenance.event_time), keep)
    return kept.table, replace(provenance, runs=kept.runs, num_rows=kept.num_rows, event_time=kept.event_time)


def covering(provenance: Provenance, runs: Sequence[Run]) -> Provenance:
    """A batch that covers those runs too, which follow it and hold no rows."""
    return replace(provenance, runs=join_runs([*provenance.runs, *runs]))


def _search(table: pa.Table, first: int, transform: Transform[T], error: DataError) -> Iterator[tuple[int, str]]:
    """Within a table, whose first row has the number `first`, that fails with `error`."""
    if isinstance(error, SchemaError):
        raise error
    if table.num_rows == 1:
        # Its number is 0 now, which says nothing.
        yield first, str(error).replace(", row 0", "", 1)
        return
    found = False
    middle = table.num_rows // 2
    for half, start in ((table.slice(0, middle), first), (table.slice(middle), first + middle)):
        try:
            transform(half)
        except DataError as own:
            found = True
            yield from _search(half, start, transform, own)
    if not found:
        raise error
