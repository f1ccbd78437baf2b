"""Raw features: the dense block of a batch, and the ids of features with boundaries. NaN means missing throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import torch

from tidemill.errors import DataError
from tidemill.features.columns import Column, Floats, float_column, step_column
from tidemill.features.normalize import NormalizerStack, bucketize, normalize, parse_normalizer
from tidemill.features.plan import DensePlan, DenseSpec, IdPlan


class DenseBlock:
    """All dense raw features of a set, stacked. Immutable."""

    def __init__(self, plans: Sequence[DensePlan]) -> None:
        self._plans = tuple(plans)
        normalizers = [parse_normalizer(plan.name, plan.normalizer) for plan in plans for _ in range(plan.dim)]
        self._normalizers = NormalizerStack(normalizers)
        defaults = [plan.default or (np.nan,) * plan.dim for plan in plans]
        self._defaults = np.array([value for row in defaults for value in row], np.float64)[:, None]
        self._owners = [plan for plan in plans for _ in range(plan.dim)]
        offsets = np.cumsum([0, *(plan.dim for plan in plans)]).tolist()
        self.specs = tuple(DenseSpec(plan.name, plan.dim, at) for plan, at in zip(plans, offsets, strict=False))

    def read(self, array_of: Callable[[DensePlan], tuple[pa.Array, str]], num_rows: int, size: int) -> torch.Tensor:
        """(size, sum of dim) float32, 0 in padding. Raises DataError for a wrong number of values or infinity."""
        block = np.empty((len(self._owners), num_rows))
        at = 0
        for plan in self._plans:
            array, owner = array_of(plan)
            block[at : at + plan.dim] = _rows(float_column(array, owner, plan), plan.dim, owner)
            at += plan.dim
        missing = np.isnan(block)
        block = self._normalizers.apply(block)
        np.copyto(block, self._defaults, where=missing)
        out = np.zeros((size, len(block)), np.float32)
        with np.errstate(over="ignore"):
            out[:num_rows] = block.T
        if not np.isfinite(out).all():
            self._raise(out, array_of)
        return torch.from_numpy(out)

    def _raise(self, out: np.ndarray, array_of: Callable[[DensePlan], tuple[pa.Array, str]]) -> None:
        row, at = np.argwhere(~np.isfinite(out))[0].tolist()
        plan = self._owners[at]
        array, owner = array_of(plan)
        value = array[row if len(array) > 1 else 0].as_py()
        why = "isn't finite in float32"
        if np.isnan(out[row, at]) and plan.default is None:
            why = "is missing and the feature has no default value"
        raise DataError(f"{owner}, row {row}: value {value!r} {why}")


def boundary_column(plan: IdPlan, array: pa.Array, owner: str) -> Column:
    """The bucket of each number as a column of finished ids; null where the number is missing."""
    read = step_column if plan.is_sequence else float_column
    floats = read(array, owner, plan)
    numbers = normalize(floats.values, parse_normalizer(plan.name, plan.normalizer))
    items = pa.array(bucketize(numbers, plan.bucketizer.boundaries), mask=np.isnan(floats.values))
    if floats.offsets is None:
        return Column(len(items), items)
    lists = pa.LargeListArray.from_arrays(pa.array(floats.offsets), items)
    return Column(len(lists), items, lists)


def _rows(floats: Floats, dim: int, owner: str) -> np.ndarray:
    """(dim, rows) of the column; a missing row is NaN."""
    if floats.offsets is None and dim == 1:
        return floats.values[None, :]
    offsets = np.arange(len(floats.values) + 1) if floats.offsets is None else floats.offsets
    counts = np.diff(offsets)
    firsts = np.append(floats.values, np.nan)[offsets[:-1]]
    missing = (counts == 0) | ((counts == 1) & np.isnan(firsts))
    wrong = np.flatnonzero((counts != dim) & ~missing)
    if len(wrong):
        row = wrong[0]
        values = floats.values[offsets[row] : offsets[row + 1]].tolist()
        raise DataError(f"{owner}, row {row}: {len(values)} numbers ({values[:8]}), value_dim is {dim}")
    rows = np.full((len(counts), dim), np.nan)
    full = np.flatnonzero(~missing)
    rows[full] = floats.values[offsets[full][:, None] + np.arange(dim)]
    return rows.T
