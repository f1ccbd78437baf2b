"""Grouped sequences: members that share a length, a delimiter and a prefix."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field, ValidationError

from tidemill import registry
from tidemill.config import base
from tidemill.errors import ConfigError
from tidemill.features.feature import Example, Feature
from tidemill.features.plan import FeaturePlan, PlanContext

_MEMBERS = ("id_feature", "raw_feature")


class SequenceFeature(Feature):
    """Expands to one sequence per member, named `<sequence_name>__<feature_name>`, which reads the column
    `<sequence_name>__<input>`. Members are id_feature and raw_feature (with boundaries)."""

    class Config(base.Config):
        sequence_name: str
        """prefix of columns and features"""
        sequence_length: int = Field(gt=0)
        """steps kept: the first ones"""
        sequence_delim: str = ";"
        """between steps"""
        sequence_pk: str | None = None
        """serving key"""
        features: tuple[dict[str, dict[str, Any]], ...]
        """members, each `kind: {fields}`"""

    NOT_YET: ClassVar[frozenset[str]] = frozenset(("sequence_pk",))

    @classmethod
    def plans(cls, config: Config, context: PlanContext) -> list[FeaturePlan]:
        inner = PlanContext(context.encoded, context.encoded_separator, f"{config.sequence_name}__")
        return [plan for member in config.features for plan in _member_plans(config, member, inner)]

    @classmethod
    def examples(cls) -> list[Example]:
        members = (
            {"id_feature": {"feature_name": "id", "expression": "user:id", "embedding_dim": 4, "hash_bucket_size": 100}},
            {
                "raw_feature": {
                    "feature_name": "price",
                    "expression": "user:price",
                    "embedding_dim": 4,
                    "boundaries": (0.5, 1.5),
                }
            },
        )
        texts = {"clicks__id": ["a;b;;c", "", "x;y"], "clicks__price": ["0.1;2;;1", "", "3"]}
        lists = {"clicks__id": [["a", "b", "", "c"], None, ["x", "y"]], "clicks__price": [[0.1, 2, None, 1], [], [3]]}
        config = cls.Config(sequence_name="clicks", sequence_length=3, features=members)
        return [
            Example(
                config,
                {name: pa.array(rows) for name, rows in texts.items()},
                {name: pa.array(rows) for name, rows in lists.items()},
            )
        ]


def _member_plans(config: SequenceFeature.Config, member: dict[str, dict[str, Any]], context: PlanContext) -> list[FeaturePlan]:
    where = f"sequence_feature {config.sequence_name!r}"
    if len(member) != 1 or next(iter(member)) not in _MEMBERS:
        raise ConfigError(f"{where}: a member is one of {', '.join(_MEMBERS)}, not {', '.join(member) or 'nothing'}")
    ((kind, fields),) = member.items()
    feature = registry.resolve("feature", f"sequence_{kind}")
    shared = {"sequence_length": config.sequence_length, "sequence_delim": config.sequence_delim}
    try:
        return feature.plans(feature.Config(**{**fields, **shared}), context)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}, member {fields.get('feature_name')!r}: {key}: {first['msg']}") from None
