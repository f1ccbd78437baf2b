"""Reads a rank's share of bounded splits on several threads at once, in an order that depends on the share alone.

The share is cut into as many stretches as there are readers, and each stretch into blocks. Blocks are given in turn: the first
of each stretch, then the second of each, and so on. Rows that were trained before are left out of their blocks; all others come
in the order in which a run from the beginning would have seen them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tidemill.data.assignment import Assigned
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.shuffle import Shuffle
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import RawBatch, Run, Scatter, SplitId, positions, split_rows

_POLL_S = 0.05
# Rows that a reader may be ahead, so that decoding goes on while blocks of a few rows are handed over.
_ROWS_AHEAD = 65536


def stretches(assigned: Sequence[Assigned], count: int) -> list[list[Assigned]]:
    """The share in `count` contiguous parts whose sizes differ by at most 1; some are empty if there are fewer rows."""
    shares = [part.whole or NOTHING for part in assigned]
    total = sum(share.count() for share in shares)
    bounds = [total * number // count for number in range(count + 1)]
    cut: list[list[Assigned]] = [[] for _ in range(count)]
    before = 0
    for part, share in zip(assigned, shares, strict=True):
        for number in range(count):
            mine = share.slice(max(bounds[number] - before, 0), max(bounds[number + 1] - before, 0))
            if mine:
                cut[number].append(replace(part, share=mine, remaining=mine & (part.remaining or NOTHING)))
        before += share.count()
    return cut


class BlockReader(SplitReader):
    """All of a rank's share. `block_rows`: rows of a block; `shuffle`: order within blocks, None: as they lie.

    Without `in_order` whatever block is there is given next: faster if readers differ in speed, but no two runs see the same
    batches. Each reader is ahead by a few blocks. Errors of a reader come in its place.
    """

    def __init__(
        self,
        source: Source,
        assigned: Sequence[Assigned],
        *,
        readers: int,
        block_rows: int,
        shuffle: Shuffle | None,
        in_order: bool,
    ) -> None:
        self._source = source
        self._block_rows = block_rows
        self._shuffle = shuffle
        self._in_order = in_order
        self._depth = max(2, _ROWS_AHEAD // block_rows)
        self._changed = threading.Condition()
        self._closed = False
        self._queues: list[deque[_Block]] = []
        self._ready: deque[RawBatch] = deque()
        self._threads: list[threading.Thread] = []
        for number, parts in enumerate(stretches(assigned, readers)):
            self._queues.append(deque())
            thread = threading.Thread(target=self._work, args=(number, parts), name=f"loader-read-{number}", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def read(self, timeout_s: float) -> RawBatch | None:
        if not self._ready:
            with self._changed:
                block = self._changed.wait_for(self._next, timeout_s)
                if block is None:
                    return None
                if block.error is not None:
                    # It stays where it is: whoever asks again gets it again.
                    raise block.error
                self._queues[block.reader].popleft()
                self._changed.notify_all()
            self._ready.extend(block.pieces)
        return self._ready.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> _Block | None:
        """The block whose turn it is, if it is there. Called with the lock held."""
        heads = [queue[0] for queue in self._queues if queue]
        block = min(heads, key=lambda head: (head.number, head.reader), default=None)
        is_complete = len(heads) == len(self._queues)
        return block if is_complete or (block and not self._in_order and block.number < _END) else None

    def _work(self, number: int, parts: Sequence[Assigned]) -> None:
        at = -1
        try:
            # Closed here, since what closing a reader raises would otherwise come out of a garbage collection.
            with closing(self._blocks(parts)) as blocks:
                for at, pieces in blocks:
                    if not self._put(_Block(at, number, pieces)):
                        return
            end = _Block(_END, number, [], EOFError("all rows of the share were read"))
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever reads
            end = _Block(at + 1, number, [], error)
        self._put(end)

    def _put(self, block: _Block) -> bool:
        with self._changed:
            queue = self._queues[block.reader]
            self._changed.wait_for(lambda: self._closed or len(queue) < self._depth)
            queue.append(block)
            self._changed.notify_all()
            return not self._closed

    def _blocks(self, parts: Sequence[Assigned]) -> Generator[tuple[int, list[RawBatch]], None, None]:
        """(number, rows) of each block of a stretch that has rows left."""
        left = [part for part in parts if part.remaining]
        if not left:
            return
        places = _Places(parts, self._block_rows)
        reader = self._source.open_all(left)
        try:
            current, pieces = 0, list[RawBatch]()
            for raw in self._read_all(reader):
                for number, piece in places.cut(raw):
                    if number is not None and number != current and pieces:
                        yield current, self._finished(pieces)
                        pieces = []
                    current = current if number is None else number
                    pieces.append(piece)
            if pieces:
                yield current, self._finished(pieces)
        finally:
            reader.close()

    def _read_all(self, reader: SplitReader) -> Iterator[RawBatch]:
        while not self._closed:
            try:
                raw = reader.read(_POLL_S)
            except EOFError:
                return
            if raw is not None:
                yield raw

    def _finished(self, pieces: list[RawBatch]) -> list[RawBatch]:
        return pieces if self._shuffle is None else [shuffled(pieces, self._shuffle)]


_END = 1 << 62
"""Number of the block behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    number: int
    reader: int
    pieces: list[RawBatch]
    error: BaseException | None = None


class _Places:
    """Which block of a stretch a row belongs to, whatever is left of the stretch."""

    def __init__(self, parts: Sequence[Assigned], block_rows: int) -> None:
        self._block_rows = block_rows
        self._before: dict[SplitId, tuple[int, IntervalSet]] = {}
        before = 0
        for part in parts:
            share = part.whole or NOTHING
            self._before[part.split.id] = (before, share)
            before += share.count()

    def cut(self, raw: RawBatch) -> Iterator[tuple[int | None, RawBatch]]:
        """The pieces of a raw batch by block; None: it has no rows, and goes with whatever came before it."""
        blocks = [self._of(run) for run in raw.runs if run.rows]
        if not blocks:
            yield None, raw
            return
        numbers = np.concatenate(blocks)
        taken = 0
        for edge in np.flatnonzero(np.diff(numbers)).tolist():
            piece, raw = split_rows(raw, edge + 1 - taken)
            yield int(numbers[edge]), piece
            taken = edge + 1
        yield int(numbers[-1]), raw

    def _of(self, run: Run) -> np.ndarray:
        before, share = self._before[run.split]
        return (before + share.ranks(positions(run))) // self._block_rows


def shuffled(pieces: Sequence[RawBatch], shuffle: Shuffle) -> RawBatch:
    """The rows of some raw batches as one, in the shuffle's order. Positions without rows stay runs."""
    runs = [run for piece in pieces for run in piece.runs]
    numbers = {split: number for number, split in enumerate(dict.fromkeys(run.split for run in runs))}
    index = [np.full(run.rows, numbers[run.split], dtype=np.int32) for run in runs]
    scatter = Scatter(tuple(numbers), np.concatenate(index), np.concatenate([positions(run) for run in runs]))
    order = shuffle.rows(scatter)
    table = pa.concat_tables([piece.table for piece in pieces if piece.num_rows] or [pieces[0].table])
    return RawBatch(
        table.combine_chunks().take(pa.array(order)),
        tuple(hole for run in runs for hole in _holes(run)),
        _reordered([piece.event_time for piece in pieces if piece.num_rows], order),
        _reordered([piece.arrived_at for piece in pieces if piece.num_rows], order),
        Scatter(scatter.splits, scatter.index[order], scatter.positions[order]),
    )


def _reordered(parts: Sequence[np.ndarray | None], order: np.ndarray) -> np.ndarray | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known)[order] if known and len(known) == len(parts) else None


def _holes(run: Run) -> Iterator[Run]:
    """The positions of a run that hold no row. A row of a bounded split has one position."""
    first = run.start + run.gap
    if run.gap:
        yield Run(run.split, run.start, first, 0, gap=run.gap)
    last = first + run.rows
    if run.rows and run.stride != 1:
        raise ValueError(f"{run.split}: rows {run.stride} positions apart can't be shuffled")
    if run.stop > last:
        yield Run(run.split, last, run.stop, 0, gap=run.stop - last)
