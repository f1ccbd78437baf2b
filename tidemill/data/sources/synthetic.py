"""The click world as a source: one day's table of random impressions, made as it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pydantic import Field

from tidemill.config.base import Config as BaseConfig
from tidemill.data.click_world import CHUNK_ROWS, SCHEMA, World, WorldConfig, num_chunks
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import RawBatch, Run, Split, SplitId, largest
from tidemill.errors import SourceChangedError


class SyntheticSource(Source):
    """Splits are ranges of a day's chunks; positions are row numbers within the split."""

    kind = "synthetic"
    bounded = True

    class Config(BaseConfig):
        seed: int = Field(default=0, ge=0)
        """Seed of the click world."""
        day: int = Field(default=0, ge=0)
        """Which of the world's days to read."""
        num_rows: int = Field(default=100_000, ge=1)
        """Rows of the day's table."""
        num_splits: int = Field(default=4, ge=1)
        """Parts that can be read side by side; never more than the table has chunks."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def world(self) -> World:
        return World(self._config.seed)

    def discover(self) -> list[Split]:
        chunks = num_chunks(self._config.num_rows)
        parts = min(self._config.num_splits, chunks)
        bounds = [chunks * n // parts for n in range(parts + 1)]
        return [self._split(begin, end) for begin, end in pairwise(bounds)]

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        mine = {known.id: known for known in self.discover()}.get(split.id)
        if mine is None:
            raise SourceChangedError(f"{split.id} isn't a split of this synthetic source: its config has changed")
        self.verify(mine, split.fingerprint)
        rows = mine.num_rows or 0
        if done and done.intervals[-1][1] > rows:
            raise SourceChangedError(f"{split.id} has {rows} rows, but row {done.intervals[-1][1] - 1} was read before")
        wanted = IntervalSet.of([(0, rows)]) - done if remaining is None else remaining
        return _SyntheticReader(self.world, self._config, mine, wanted)

    def verify(self, split: Split, fingerprint: dict) -> None:
        now = split.fingerprint
        changed = sorted(key for key in now.keys() | fingerprint.keys() if now.get(key) != fingerprint.get(key))
        if changed:
            was = ", ".join(f"{key} was {fingerprint.get(key)}, is {now.get(key)}" for key in changed)
            raise SourceChangedError(f"{split.id} isn't what an earlier run read: {was}")

    def _split(self, begin: int, end: int) -> Split:
        config = self._config
        rows = min(end * CHUNK_ROWS, config.num_rows) - begin * CHUNK_ROWS
        constants = hashlib.sha256(repr(WorldConfig()).encode()).hexdigest()
        fingerprint = {"seed": config.seed, "day": config.day, "table_rows": config.num_rows, "world": constants}
        name = f"{config.seed}:{config.day}:{begin}-{end}"
        return Split(SplitId(self.kind, name), rows, {**fingerprint, "first_chunk": begin, "rows": rows})


class _SyntheticReader(SplitReader):
    def __init__(self, world: World, config: SyntheticSource.Config, split: Split, wanted: IntervalSet) -> None:
        self._split = split
        self._wanted = wanted
        self._first_chunk = int(split.fingerprint["first_chunk"])
        self._batches = self._open(world, config)

    def read(self, timeout_s: float) -> RawBatch | None:
        for first, batch in self._batches:
            runs = (IntervalSet.of([(first, first + batch.num_rows)]) & self._wanted).intervals
            if runs:
                return self._cut(batch, first, runs)
        raise EOFError(f"{self._split.id} has been read")

    def close(self) -> None:
        self._batches = iter(())

    def _open(self, world: World, config: SyntheticSource.Config) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The chunks that hold wanted rows, or lie between such chunks, each with the position of its first row."""
        if not self._wanted:
            return
        begin = self._wanted.intervals[0][0] // CHUNK_ROWS
        end = num_chunks(self._wanted.intervals[-1][1])
        batches = world.chunks(config.day, config.num_rows, self._first_chunk + begin)
        for chunk, batch in zip(range(begin, end), batches, strict=False):
            yield chunk * CHUNK_ROWS, batch

    def _cut(self, batch: pa.RecordBatch, first: int, intervals: tuple[tuple[int, int], ...]) -> RawBatch:
        parts = [batch.slice(start - first, stop - start) for start, stop in intervals]
        table = pa.Table.from_batches(parts, SCHEMA)
        times = table["event_time"].to_numpy()
        ends = np.cumsum([part.num_rows for part in parts])
        runs = tuple(
            Run(self._split.id, start, stop, stop - start, event_time=largest(times, end - (stop - start), end))
            for (start, stop), end in zip(intervals, ends.tolist(), strict=True)
        )
        return RawBatch(table, runs, times)
