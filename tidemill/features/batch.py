"""What a step trains on and a server scores: one batch of feature values, labels and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch


@dataclass(frozen=True, slots=True)
class IdColumns:
    """Ids of several features, jagged and feature-major: the order of a KeyedJaggedTensor.

    `values` holds all ids of the first key (row by row), then of the second, and so on; `lengths[f * B + b]` says how
    many of them belong to key f in row b.
    """

    keys: tuple[str, ...]
    values: torch.Tensor
    """(V,) int64"""
    lengths: torch.Tensor
    """(F * B,) int32"""

    def offsets(self) -> torch.Tensor:
        """(F * B + 1,) int64: where the values of each key and row begin; the last is V."""
        offsets = torch.zeros(self.lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(self.lengths, 0, out=offsets[1:])
        return offsets

    def select(self, keys: Sequence[str]) -> IdColumns:
        """The named keys only, in the order asked for. Raises KeyError for one that isn't here."""
        if tuple(keys) == self.keys:
            return self
        index = {key: at for at, key in enumerate(self.keys)}
        lengths = self.lengths.view(len(self.keys), -1) if self.keys else self.lengths.view(0, 0)
        starts = [0, *torch.cumsum(lengths.sum(1, dtype=torch.int64), 0).tolist()]
        chosen = [index[key] for key in keys]
        values = [self.values[starts[at] : starts[at + 1]] for at in chosen]
        return IdColumns(
            tuple(keys),
            torch.cat(values) if values else self.values.new_empty(0),
            lengths[chosen].reshape(-1) if chosen else self.lengths.new_empty(0),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` rows, of which the first `num_rows` are real; the rest is padding of length 0 and weight 0."""

    num_rows: int
    size: int
    """B"""
    dense: torch.Tensor
    """(B, sum of value_dim) float32: the raw features in the order of FeatureSet.dense; 0 in padding"""
    ids: IdColumns
    """the pooled (non-sequence) id features"""
    sequences: IdColumns
    """the sequence id features: one id per step, the first `sequence_length` steps; lengths count steps"""
    labels: dict[str, torch.Tensor]
    """each (B,) float32; 0 in padding"""
    weights: torch.Tensor
    """(B,) float32: the sample weight; 0 in padding"""
    extras: dict[str, pa.Array]
    """untouched columns that were asked for (event id, group id), each `num_rows` long"""
