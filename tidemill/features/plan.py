"""What a feature compiles to: plain values, the same offline and online, that a snapshot stores as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tidemill.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bucketizer:
    """How one value becomes an id in [0, num_buckets).

    kind: "hash" (hash of the text modulo num_buckets), "number" (the value is the id), "vocabulary" (`tokens` and
    their `indices`; others get `oov`), "boundaries" (how many of `boundaries` are <= the value, in float32).
    """

    kind: str
    num_buckets: int
    tokens: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    oov: int = 0
    boundaries: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class IdPlan:
    """One id feature: which column it reads, and how a row becomes ids."""

    name: str
    column: str
    side: str | None
    bucketizer: Bucketizer
    separator: str
    """one character between values; in a sequence, between the values of a step"""
    default: str
    """text that stands for null and empty, before bucketising; "" = nothing"""
    value_dim: int
    """values kept per row (0 = all); in a sequence always 1 per step"""
    embedding_dim: int
    embedding_name: str
    pooling: str
    is_sequence: bool = False
    delimiter: str = ";"
    sequence_length: int = 0
    """steps kept, the first ones (0 = all); 0 for pooled features"""
    normalizer: str = ""


@dataclass(frozen=True, slots=True)
class DensePlan:
    """One raw feature: `dim` floats a row."""

    name: str
    column: str
    side: str | None
    dim: int
    separator: str
    default: tuple[float, ...] | None
    """`dim` values that stand for null and empty, not normalised; None = null is an error"""
    normalizer: str = ""


FeaturePlan = IdPlan | DensePlan


@dataclass(frozen=True, slots=True)
class IdSpec:
    """What a model needs to know of an id feature."""

    name: str
    num_embeddings: int
    embedding_dim: int
    embedding_name: str
    pooling: str
    is_sequence: bool
    sequence_length: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """Where a raw feature lies in Batch.dense: columns [offset, offset + dim)."""

    name: str
    dim: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What all features of a set share while they compile."""

    encoded: bool = False
    """FG_NONE: columns are named as features and hold finished ids and floats"""
    encoded_separator: str = "\x03"
    """between values in encoded text columns"""
    prefix: str = ""
    """of names and columns of the members of a grouped sequence: <sequence_name>__"""


def plan_to_json(plan: FeaturePlan) -> dict[str, Any]:
    return {"plan": "id" if isinstance(plan, IdPlan) else "dense", **dataclasses.asdict(plan)}


def plan_from_json(document: dict[str, Any]) -> FeaturePlan:
    """Raises ConfigError for a plan of an unknown kind or with unknown or missing fields."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}
    kind = fields.pop("plan", None)
    try:
        if kind == "dense":
            return DensePlan(**fields)
        if kind == "id":
            bucketizer: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.pop("bucketizer").items()}
            return IdPlan(bucketizer=Bucketizer(**bucketizer), **fields)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"feature plan {document.get('name')!r} doesn't fit this version: {error}") from error
    raise ConfigError(f"feature plan {document.get('name')!r} has the unknown kind {kind!r}")
