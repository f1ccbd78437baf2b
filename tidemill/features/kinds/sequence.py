"""Grouped sequences: members that share a length, a delimiter and a prefix."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from tidemill.config import base
from tidemill.config.base import Positive
from tidemill.config.feature import FeatureEntry
from tidemill.errors import ConfigError
from tidemill.features.feature import Example, Feature, feature_class
from tidemill.features.kinds.id import IdFeature
from tidemill.features.kinds.raw import RawFeature
from tidemill.features.plan import FeaturePlan, PlanContext

_MEMBERS = ("id_feature", "raw_feature")


class SequenceFeature(Feature):
    """Expands to one sequence per member, named `<sequence_name>__<feature_name>`, which reads the column
    `<sequence_name>__<input>`. Members are id_feature and raw_feature (with boundaries)."""

    class Config(base.Config):
        idle_fields: ClassVar[frozenset[str]] = frozenset(("sequence_pk",))

        sequence_name: str
        """prefix of columns and features"""
        sequence_length: Positive
        """steps kept: the first ones"""
        sequence_delim: str = ";"
        """between steps"""
        sequence_pk: str | None = None
        """serving key"""
        features: tuple[FeatureEntry, ...]
        """members, each with its kind and fields"""

    @classmethod
    def plans(cls, config: Config, context: PlanContext) -> list[FeaturePlan]:
        inner = PlanContext(context.encoded, context.encoded_separator, f"{config.sequence_name}__")
        return [plan for member in config.features for plan in _member_plans(config, member, inner)]

    @classmethod
    def examples(cls) -> list[Example]:
        ids = IdFeature.Config(feature_name="id", expression="user:id", embedding_dim=4, hash_bucket_size=100)
        prices = RawFeature.Config(feature_name="price", expression="user:price", embedding_dim=4, boundaries=(0.5, 1.5))
        members = (FeatureEntry(kind="id_feature", config=ids), FeatureEntry(kind="raw_feature", config=prices))
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


def _member_plans(config: SequenceFeature.Config, member: FeatureEntry, context: PlanContext) -> list[FeaturePlan]:
    if member.kind not in _MEMBERS:
        where = f"sequence_feature {config.sequence_name!r}"
        raise ConfigError(f"{where}: a member is one of {', '.join(_MEMBERS)}, not {member.kind}")
    shared = {"sequence_length": config.sequence_length, "sequence_delim": config.sequence_delim}
    return feature_class(f"sequence_{member.kind}").plans(member.config.model_copy(update=shared), context)
