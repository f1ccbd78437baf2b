"""The seam of a feature kind, and the steps that all kinds take from a config to a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from tidemill import registry
from tidemill.config.base import Config
from tidemill.config.feature import SIDES
from tidemill.errors import ConfigError
from tidemill.features.plan import Bucketizer, FeaturePlan, PlanContext


@dataclass(frozen=True, slots=True)
class Example:
    """A config with rows for it, missing ones among them: documentation that the feature contract runs."""

    config: Config
    columns: Mapping[str, pa.Array]
    same: Mapping[str, pa.Array] | None = None
    """other forms of `columns` (lists instead of text, say) that give equal output"""


class Feature(ABC):
    """A kind of feature. A subclass has a nested `Config`, found by its registry kind, and compiles it to plans."""

    Config: ClassVar[type[Config]]

    @classmethod
    @abstractmethod
    def plans(cls, config: Any, context: PlanContext) -> list[FeaturePlan]:
        """The plans of a feature, in the order of their outputs. Pure. Raises ConfigError that names the feature."""

    @classmethod
    @abstractmethod
    def examples(cls) -> list[Example]:
        """At least one of each way to use the kind, for FG_DAG."""


def feature_class(kind: str) -> type[Feature]:
    """The class of a registered kind. Raises ConfigError for an unknown one."""
    found = registry.resolve("feature", kind)
    if not issubclass(found, Feature):
        raise ConfigError(f"feature {kind!r} is registered as {found.__qualname__}, which isn't a Feature")
    return found


def read_expression(name: str, expression: str | None, context: PlanContext) -> tuple[str, str | None]:
    """(column, side) of a feature with one input: `side:column`, or the feature's own name if data are encoded."""
    side, colon, column = (expression or "").partition(":")
    if context.encoded:
        return context.prefix + name, side if colon else None
    if not colon or not column:
        raise ConfigError(f"feature {name!r}: expression {expression!r} isn't of the form side:column (user:user_id)")
    if side not in SIDES:
        raise ConfigError(f"feature {name!r}: side {side!r} of {expression!r} isn't supported; use {', '.join(SIDES)}")
    return context.prefix + column, side


def require_separator(name: str, field: str, separator: str) -> str:
    """The separator itself. Raises ConfigError unless it is one ASCII character."""
    if len(separator) != 1 or not separator.isascii():
        raise ConfigError(f"feature {name!r}: {field} {separator!r} must be one ASCII character")
    return separator


def require_pooling(name: str, pooling: str) -> str:
    if pooling not in ("sum", "mean"):
        raise ConfigError(f"feature {name!r}: pooling {pooling!r} isn't known; use sum or mean")
    return pooling


def list_bucketizer(tokens: Sequence[str], default: str, oov: int | None) -> Bucketizer:
    """Positions in a vocabulary. Without `oov`, slot 0 is the default's, 1 everything unknown's, tokens follow from 2."""
    if oov is not None:
        positions: dict[str, int] = {}
        for at, token in enumerate(tokens):
            positions.setdefault(token, at)
        return _vocabulary(positions, len(tokens), oov)
    # A default that the list holds too keeps the list's position.
    positions = {token: at for at, token in enumerate([default, "<OOV>", *tokens])}
    return _vocabulary(positions, len(tokens) + 2, 1)


def dict_bucketizer(indices: Mapping[str, int], default: str, oov: int | None) -> Bucketizer:
    """Given indices. Without `oov`, the default is 0 even if it has an index, and unknown tokens are 1."""
    positions = dict(indices) if oov is not None else {**indices, default: 0}
    return _vocabulary(positions, max(positions.values()) + 1, 1 if oov is None else oov)


def _vocabulary(positions: dict[str, int], num_buckets: int, oov: int) -> Bucketizer:
    return Bucketizer("vocabulary", num_buckets, tuple(positions), tuple(positions.values()), oov)
