"""A seeded order of files and rows that a resumed run finds again.

The order is made of the rows' own places alone: rows that were trained already are left out of it, and the others keep theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.data.split import Scatter, Split, SplitId


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The order of one pass. Rows are shuffled within blocks of `block_rows`; the files that blocks are made of as a whole."""

    seed: int
    pass_number: int
    block_rows: int

    def splits(self, splits: Sequence[Split]) -> list[Split]:
        """The splits in this pass's order, which doesn't depend on the order they came in."""
        return sorted(splits, key=lambda split: (self._key(split.id), split.id))

    def rows(self, scatter: Scatter) -> np.ndarray:
        """(n,) int64: the rows in their new order."""
        keys = np.array([self._key(split) for split in scatter.splits], dtype=np.uint64)
        mixed = _mixed(keys[scatter.index] + scatter.positions.astype(np.uint64))
        # Lexicographic by place where two rows mix to the same number, so that the order never depends on what was left out.
        return np.lexsort((scatter.positions, scatter.index, mixed))

    def _key(self, split: SplitId) -> int:
        text = f"{self.seed}/{self.pass_number}/{split.kind}/{split.name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine and version of numpy."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
