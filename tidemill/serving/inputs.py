"""From a batch of ids and the tables to the dense program's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.contracts.snapshot import PooledLookup, ProgramInputs, SequenceInput, StepLookup
from tidemill.errors import ServingError
from tidemill.features.batch import Batch, IdColumns
from tidemill.serving.tables import Tables


def program_inputs(plan: ProgramInputs, tables: Tables, batch: Batch) -> dict[str, torch.Tensor]:
    """What `ProgramInputs` describes, for the batch's B rows; inputs that would be empty are left out.

    Raises ServingError if the batch lacks a feature or holds an id outside its table.
    """
    inputs: dict[str, torch.Tensor] = {}
    if plan.num_dense:
        inputs["dense"] = batch.dense
    ids = _Jagged.of(batch.ids, batch.size)
    if plan.pooled:
        inputs["pooled"] = torch.from_numpy(_pooled(plan.pooled, tables, ids))
    steps = _Jagged.of(batch.sequences, batch.size)
    for group in plan.sequences:
        _add_sequence(inputs, group, tables, ids, steps)
    return inputs


@dataclass(frozen=True, slots=True)
class _Jagged:
    """Ids of several features as NumPy arrays, for `size` rows."""

    size: int
    index: dict[str, int]
    values: np.ndarray
    lengths: np.ndarray
    """(features, size)"""
    starts: list[int]
    """Where each feature's values begin, and the end of the last."""
    single: list[bool]
    """Whether each row of a feature has exactly one id."""

    @classmethod
    def of(cls, columns: IdColumns, size: int) -> _Jagged:
        lengths = columns.lengths.numpy().reshape(len(columns.keys), size)
        starts = [0, *np.cumsum(lengths.sum(1, dtype=np.int64)).tolist()]
        single = ((lengths == 1).all(1)).tolist()
        return cls(size, {key: at for at, key in enumerate(columns.keys)}, columns.values.numpy(), lengths, starts, single)

    def feature(self, name: str) -> tuple[np.ndarray, np.ndarray, bool]:
        """Ids of a feature, their number in each row, and whether that is 1 everywhere."""
        at = self.index.get(name)
        if at is None:
            raise ServingError(f"the program wants ids of {name!r}, which the feature set doesn't make ({', '.join(self.index)})")
        return self.values[self.starts[at] : self.starts[at + 1]], self.lengths[at], self.single[at]


def _lookup(tables: Tables, table: str, feature: str, ids: np.ndarray) -> np.ndarray:
    try:
        return tables[table].lookup(ids)
    except IndexError:
        raise ServingError(f"feature {feature!r} has ids up to {ids.max()}, beyond the end of table {table!r}") from None


def _dims(lookups: Sequence[PooledLookup | StepLookup], tables: Tables) -> list[int]:
    return [tables[lookup.table].spec.embedding_dim for lookup in lookups]


def _pooled(lookups: Sequence[PooledLookup], tables: Tables, ids: _Jagged) -> np.ndarray:
    dims = _dims(lookups, tables)
    pooled = np.zeros((ids.size, sum(dims)), np.float32)
    at = 0
    for lookup, dim in zip(lookups, dims, strict=True):
        values, lengths, single = ids.feature(lookup.feature)
        rows = _lookup(tables, lookup.table, lookup.feature, values)
        if single:
            pooled[:, at : at + dim] = rows
        elif len(values):
            _pool(pooled[:, at : at + dim], rows, lengths, mean=lookup.pooling == "mean")
        at += dim
    return pooled


def _pool(target: np.ndarray, rows: np.ndarray, lengths: np.ndarray, *, mean: bool) -> None:
    """Sum or average consecutive rows into each row of `target` that has any; the others stay zero."""
    filled = np.flatnonzero(lengths)
    counts = lengths[filled]
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(rows, starts, axis=0, dtype=np.float32)
    target[filled] = sums / counts[:, None].astype(np.float32) if mean else sums


def _add_sequence(inputs: dict[str, torch.Tensor], group: SequenceInput, tables: Tables, ids: _Jagged, steps: _Jagged) -> None:
    if group.query:
        inputs[f"{group.group}.query"] = torch.from_numpy(_first_steps(group.query, tables, ids, 1)[:, 0])
    if group.steps:
        inputs[f"{group.group}.sequence"] = torch.from_numpy(_first_steps(group.steps, tables, steps, group.max_steps))
        _, lengths, _ = steps.feature(group.steps[0].feature)
        inputs[f"{group.group}.lengths"] = torch.from_numpy(np.minimum(lengths, group.max_steps).astype(np.int64))


def _first_steps(lookups: Sequence[StepLookup], tables: Tables, ids: _Jagged, max_steps: int) -> np.ndarray:
    """(B, max_steps, sum of dims): each row's first ids; zeros behind its last."""
    dims = _dims(lookups, tables)
    padded = np.zeros((ids.size, max_steps, sum(dims)), np.float32)
    at = 0
    for lookup, dim in zip(lookups, dims, strict=True):
        values, lengths, _ = ids.feature(lookup.feature)
        row = np.repeat(np.arange(ids.size), lengths)
        step = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = np.flatnonzero(step < max_steps)
        padded[row[kept], step[kept], at : at + dim] = _lookup(tables, lookup.table, lookup.feature, values[kept])
        at += dim
    return padded
