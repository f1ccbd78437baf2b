"""All features of a model, compiled once, that turn Arrow rows into batches; trainer and server run the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tidemill.config.base import Config
from tidemill.errors import ConfigError, DataError, SchemaError
from tidemill.features.batch import Batch, IdColumns
from tidemill.features.columns import (
    FLOAT_TYPES,
    ID_TYPES,
    NUMBER_ID_TYPES,
    Column,
    id_column,
    single_array,
)
from tidemill.features.dense import DenseBlock, boundary_column
from tidemill.features.feature import feature_class
from tidemill.features.hashing import HASH_VERSIONS, require_hash
from tidemill.features.plan import (
    DensePlan,
    DenseSpec,
    FeaturePlan,
    IdPlan,
    IdSpec,
    PlanContext,
    plan_from_json,
    plan_to_json,
)
from tidemill.features.program import EMPTY_STEP, NOT_A_NUMBER, OUT_OF_RANGE, build_program

try:
    from tidemill.features.native import encode
except ImportError:  # no numba
    from tidemill.features.vectorized import encode

SCHEMA = "tidemill.features/1"
FG_MODES = ("FG_NONE", "FG_NORMAL", "FG_DAG")
"""FG_NORMAL computes what FG_DAG computes: the kinds so far have no features of features"""


@dataclass(frozen=True, slots=True)
class InputColumn:
    """A column that a set reads: what for, and the Arrow types it may have."""

    name: str
    role: str
    """feature, label, weight or extra"""
    accepts: tuple[str, ...]
    """empty: any type"""
    used_by: tuple[str, ...]
    side: str | None = None


class FeatureSet:
    """Immutable once compiled, so threads may share it; kernels release the GIL.

    `dense` and `id_features` are in the order of the outputs: Batch.ids holds the id features that aren't sequences,
    Batch.sequences those that are, both in config order.
    """

    def __init__(
        self,
        plans: Sequence[FeaturePlan],
        *,
        labels: Sequence[str] = (),
        sample_weight: str | None = None,
        extras: Sequence[str] = (),
        hash_function: str = "std",
    ) -> None:
        """From plans; most callers want `compile` or `from_spec`."""
        self._plans = tuple(plans)
        self._labels, self._sample_weight, self._extras = tuple(labels), sample_weight, tuple(extras)
        self._hash = require_hash(hash_function)
        self._require_unique()
        ids = [plan for plan in self._plans if isinstance(plan, IdPlan)]
        self._pooled = tuple(plan for plan in ids if not plan.is_sequence)
        self._sequences = tuple(plan for plan in ids if plan.is_sequence)
        self._program = build_program([*self._pooled, *self._sequences], self._hash)
        self._dense = DenseBlock([plan for plan in self._plans if isinstance(plan, DensePlan)])
        self.id_features = tuple(_id_spec(plan) for plan in ids)
        self.dense: tuple[DenseSpec, ...] = self._dense.specs
        self.input_columns = self._input_columns()

    @classmethod
    def compile(
        cls,
        features: Sequence[tuple[str, Config]],
        *,
        labels: Sequence[str] = (),
        sample_weight: str | None = None,
        extras: Sequence[str] = (),
        fg_mode: str = "FG_DAG",
        multival_separator: str = "\x03",
        hash_function: str = "std",
    ) -> FeatureSet:
        """Compile (kind, config) pairs.

        `multival_separator` splits text in FG_NONE only; `hash_function` is "std" (tzrec's default) or "farm". Raises
        ConfigError that names the feature.
        """
        if fg_mode not in FG_MODES:
            raise ConfigError(f"fg_mode {fg_mode!r} isn't supported; use one of {', '.join(FG_MODES)}")
        context = PlanContext(encoded=fg_mode == "FG_NONE", encoded_separator=multival_separator)
        plans = [plan for kind, config in features for plan in feature_class(kind).plans(config, context)]
        return cls(plans, labels=labels, sample_weight=sample_weight, extras=extras, hash_function=hash_function)

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> FeatureSet:
        """The set that `spec()` describes, with bit-equal output. Raises ConfigError if this version can't give it."""
        if spec.get("schema") != SCHEMA:
            raise ConfigError(f"feature spec has schema {spec.get('schema')!r}; this version reads {SCHEMA!r}")
        name, version = spec["hash"]["function"], spec["hash"]["version"]
        if HASH_VERSIONS.get(name) != version:
            raise ConfigError(f"feature spec needs hash function {name!r} version {version}, which isn't here")
        return cls(
            [plan_from_json(plan) for plan in spec["features"]],
            labels=spec["labels"],
            sample_weight=spec["sample_weight"],
            extras=spec["extras"],
            hash_function=name,
        )

    def spec(self) -> dict[str, Any]:
        """A JSON-able description, enough to rebuild the set anywhere; stored in snapshots."""
        return {
            "schema": SCHEMA,
            "hash": {"function": self._hash, "version": HASH_VERSIONS[self._hash]},
            "features": [plan_to_json(plan) for plan in self._plans],
            "labels": list(self._labels),
            "sample_weight": self._sample_weight,
            "extras": list(self._extras),
        }

    def transform(self, table: pa.RecordBatch | pa.Table, *, size: int | None = None, with_labels: bool = True) -> Batch:
        """A batch of the table's rows, padded to `size` (default: as many as there are rows).

        Without labels, sample weights aren't read either, and extras only if they are there. Raises SchemaError for a
        missing column or a wrong type, DataError for a bad value; both name feature and column, the latter row and
        value.
        """
        columns = dict(zip(table.schema.names, table.columns, strict=True))
        return self.transform_columns(columns, table.num_rows, size=size, with_labels=with_labels)

    def transform_columns(
        self,
        columns: Mapping[str, pa.Array | pa.ChunkedArray],
        num_rows: int,
        *,
        size: int | None = None,
        with_labels: bool = False,
    ) -> Batch:
        """As `transform`, of columns that each have `num_rows` rows, or a single one that stands for all of them."""
        size = num_rows if size is None else size
        if size < num_rows:
            raise DataError(f"{num_rows} rows don't fit into a batch of {size}")
        reader = _Reader(columns, num_rows)
        ids, sequences = self._encode_ids(reader, size)
        dense = self._dense.read(reader.feature_array, num_rows, size)
        labels = {name: reader.numbers("label", name, size) for name in self._labels} if with_labels else {}
        weights = torch.zeros(size)
        weights[:num_rows] = 1
        if with_labels and self._sample_weight:
            weights = reader.numbers("sample weight", self._sample_weight, size)
            if bool((weights < 0).any()):
                row = int((weights < 0).nonzero()[0])
                raise DataError(f"sample weight {self._sample_weight!r}, row {row}: {weights[row]} is negative")
        extras = {name: reader.extra(name) for name in self._extras if with_labels or name in columns}
        return Batch(num_rows, size, dense, ids, sequences, labels, weights, extras)

    def _encode_ids(self, reader: _Reader, size: int) -> tuple[IdColumns, IdColumns]:
        plans = (*self._pooled, *self._sequences)
        columns = [_read_ids(plan, reader) for plan in plans]
        values, lengths, fault = encode(self._program, columns, reader.num_rows, size)
        if fault is not None:
            raise _value_error(plans[fault[0]], reader, fault[1], fault[2])
        num_pooled = len(self._pooled)
        boundary = int(lengths[:num_pooled].sum(dtype=np.int64))
        all_values, all_lengths = torch.from_numpy(values), torch.from_numpy(lengths.reshape(-1))
        ids = IdColumns(tuple(plan.name for plan in self._pooled), all_values[:boundary], all_lengths[: num_pooled * size])
        sequences = IdColumns(tuple(plan.name for plan in self._sequences), all_values[boundary:], all_lengths[num_pooled * size :])
        return ids, sequences

    def _require_unique(self) -> None:
        names = [plan.name for plan in self._plans]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"feature {name!r} is there twice; feature names must be unique")

    def _input_columns(self) -> tuple[InputColumn, ...]:
        inputs: dict[str, InputColumn] = {}
        for plan in self._plans:
            before = inputs.get(plan.column)
            users = (*(before.used_by if before else ()), plan.name)
            accepts = _accepts(plan)
            if before:
                accepts = tuple(type_ for type_ in before.accepts if type_ in accepts)
            inputs[plan.column] = InputColumn(plan.column, "feature", accepts, users, plan.side)
        numeric = ("float32", "float64", "int32", "int64", "bool")
        others = [InputColumn(name, "label", numeric, (name,)) for name in self._labels]
        if self._sample_weight:
            others.append(InputColumn(self._sample_weight, "weight", numeric, (self._sample_weight,)))
        others += [InputColumn(name, "extra", (), (name,)) for name in self._extras]
        for column in others:
            inputs.setdefault(column.name, column)
        return tuple(inputs.values())


class _Reader:
    """The columns of one call, checked for presence and length."""

    def __init__(self, columns: Mapping[str, pa.Array | pa.ChunkedArray], num_rows: int) -> None:
        self._columns = columns
        self.num_rows = num_rows

    def array(self, owner: str, name: str) -> pa.Array:
        column = self._columns.get(name)
        if column is None:
            raise SchemaError(f"{owner} isn't there; the data have {', '.join(self._columns)}")
        if len(column) not in (1, self.num_rows):
            raise DataError(f"{owner} has {len(column)} rows instead of {self.num_rows} (or one for all)")
        return single_array(column)

    def feature_array(self, plan: FeaturePlan) -> tuple[pa.Array, str]:
        owner = f"feature {plan.name!r}, column {plan.column!r}"
        return self.array(owner, plan.column), owner

    def numbers(self, what: str, name: str, size: int) -> torch.Tensor:
        """A label or weight column as (size,) float32, 0 in padding."""
        owner = f"{what} column {name!r}"
        array = self.array(owner, name)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int8())
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            raise SchemaError(f"{owner} has type {array.type}; accepted: float32, float64, int32, int64, bool")
        with np.errstate(over="ignore"):
            values = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise DataError(f"{owner}, row {bad[0]}: value {array[int(bad[0])].as_py()!r} isn't a finite number")
        out = np.zeros(size, np.float32)
        out[: self.num_rows] = values
        return torch.from_numpy(out)

    def extra(self, name: str) -> pa.Array:
        array = self.array(f"column {name!r}", name)
        if len(array) == self.num_rows:
            return array
        return array.take(pa.array(np.zeros(self.num_rows, np.int64)))


def _read_ids(plan: IdPlan, reader: _Reader) -> Column:
    array, owner = reader.feature_array(plan)
    if plan.bucketizer.kind == "boundaries":
        return boundary_column(plan, array, owner)
    return id_column(array, owner, numbers=plan.bucketizer.kind == "number")


def _value_error(plan: IdPlan, reader: _Reader, row: int, code: int) -> DataError:
    array, owner = reader.feature_array(plan)
    last = plan.bucketizer.num_buckets - 1
    reason = {
        NOT_A_NUMBER: "isn't a whole number",
        OUT_OF_RANGE: f"isn't in 0..{last}; raise num_buckets or use hash_bucket_size",
        EMPTY_STEP: "has an empty step and the feature has no fg_encoded_default_value",
    }[code]
    text = repr(array[row].as_py())
    shown = text if len(text) <= 120 else text[:117] + "..."
    return DataError(f"{owner}, row {row}: value {shown} {reason}")


def _id_spec(plan: IdPlan) -> IdSpec:
    return IdSpec(
        plan.name,
        plan.bucketizer.num_buckets,
        plan.embedding_dim,
        plan.embedding_name,
        plan.pooling,
        plan.is_sequence,
        plan.sequence_length,
        plan.value_dim,
    )


def _accepts(plan: FeaturePlan) -> tuple[str, ...]:
    if isinstance(plan, DensePlan) or plan.bucketizer.kind == "boundaries":
        return FLOAT_TYPES
    return NUMBER_ID_TYPES if plan.bucketizer.kind == "number" else ID_TYPES
