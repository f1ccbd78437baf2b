"""Id features: text or integers to embedding rows, by hash, by number or by vocabulary."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from tidemill.config import base
from tidemill.config.base import Positive, Unsigned, not_yet
from tidemill.config.feature import DynamicEmbedding, ParameterConstraints, ZeroCollisionHash
from tidemill.errors import ConfigError
from tidemill.features.feature import (
    Example,
    Feature,
    dict_bucketizer,
    list_bucketizer,
    read_expression,
    require_pooling,
    require_separator,
)
from tidemill.features.plan import Bucketizer, FeaturePlan, IdPlan, PlanContext

SEQUENCE_DEFAULT = "0"
"""stands in an empty sequence or step for a default_value of "": generated sequences are never empty"""


class IdFeature(Feature):
    """One or more ids a row, pooled by their embeddings' sum or mean.

    null, "" and an empty list are missing: `default_value` (which may hold several values) stands for them, or nothing
    does. Empty values between separators are dropped. Integers hash as their decimal text. A number outside
    [0, num_buckets) is a DataError, in training and in serving (tzrec maps it to row 0).
    """

    class Config(base.Config):
        idle_fields: ClassVar[frozenset[str]] = frozenset(
            (
                "init_fn",
                "use_mask",
                "zch",
                "vocab_file",
                "asset_dir",
                "dynamicemb",
                "fg_value_type",
                "trainable",
                "data_type",
                "embedding_constraints",
                "sequence_fields",
            )
        )

        feature_name: str
        """unique name; also the column name when data are encoded"""
        expression: str | None = None
        """input `side:column`; needed unless data are encoded"""
        embedding_name: str | None = None
        """table name (same name = shared table); default `<feature_name>_emb`"""
        embedding_dim: Positive
        """width of the embedding"""
        hash_bucket_size: Positive | None = None
        """id = hash(text) mod this"""
        num_buckets: Positive | None = None
        """the value already is 0..N-1"""
        vocab_list: tuple[str, ...] = ()
        """text -> position (+2 unless default_bucketize_value is set)"""
        vocab_dict: dict[str, int] = Field(default_factory=dict)
        """text -> given index (from 2 on, unless default_bucketize_value is set)"""
        value_dim: Unsigned | None = None
        """values kept per row, 0 = any; unset: 0, or 1 in a sequence"""
        pooling: str = "sum"
        """sum or mean"""
        default_value: str = ""
        """stands for null and empty, before bucketising; "" = nothing"""
        separator: str = "\x1d"
        """between values in text"""
        weighted: bool = not_yet(False)
        """values are `id:weight`"""
        init_fn: str | None = None
        """table initialiser"""
        use_mask: bool | None = None
        """eligible for random masking"""
        zch: ZeroCollisionHash | None = None
        """collision-free managed table"""
        vocab_file: str | None = None
        """file of tokens or "token index" """
        asset_dir: str | None = None
        """directory of vocab_file (set by export)"""
        dynamicemb: DynamicEmbedding | None = None
        """GPU hash-table embedding"""
        fg_encoded_default_value: str | None = None
        """stands for null when data are encoded"""
        default_bucketize_value: Unsigned | None = None
        """index of unknown tokens; suppresses the two reserved slots"""
        fg_value_type: str | None = None
        """type ahead of bucketising"""
        trainable: bool = True
        """false: frozen table"""
        stub_type: bool = not_yet(False)
        """intermediate only, not fed to the model"""
        data_type: str = "FP32"
        """type of the table's weights"""
        embedding_constraints: ParameterConstraints | None = None
        """sharding limits of this table"""
        sequence_length: Positive | None = None
        """steps kept when used as a sequence: the first ones"""
        sequence_delim: str = ";"
        """between steps when used as a sequence"""
        sequence_fields: tuple[str, ...] = ()
        """which inputs are sequences"""

    is_sequence: ClassVar[bool] = False

    @classmethod
    def plans(cls, config: Config, context: PlanContext) -> list[FeaturePlan]:
        name = config.feature_name
        if config.weighted or config.stub_type:
            raise ConfigError(f"feature {name!r}: {'weighted' if config.weighted else 'stub_type'} isn't supported yet")
        column, side = read_expression(name, config.expression, context)
        default = _default(config, context, cls.is_sequence)
        separator = context.encoded_separator if context.encoded else config.separator
        plan = IdPlan(
            name=context.prefix + name,
            column=column,
            side=side,
            bucketizer=_bucketizer(config, context, default),
            separator=require_separator(name, "separator", separator),
            default=default,
            value_dim=_value_dim(config, cls.is_sequence),
            embedding_dim=config.embedding_dim,
            embedding_name=config.embedding_name or f"{context.prefix}{name}_emb",
            pooling=require_pooling(name, config.pooling),
            is_sequence=cls.is_sequence,
            delimiter=require_separator(name, "sequence_delim", config.sequence_delim),
            sequence_length=(config.sequence_length or 0) if cls.is_sequence else 0,
        )
        return [plan]

    @classmethod
    def examples(cls) -> list[Example]:
        texts, numbers = ["a\x1dbb", None, "", "ccc", "a"], [3, None, 0, 17, 5]
        lists = [["a", "bb"], [], None, ["ccc"], ["a"]]
        return [
            _example(cls, texts, lists, hash_bucket_size=100),
            _example(cls, texts, lists, vocab_list=("bb", "ccc"), default_value="a\x1dx"),
            _example(cls, texts, lists, vocab_dict={"a": 2, "bb": 3}, default_value="x", pooling="mean", value_dim=1),
            _example(cls, numbers, [[3], [], [0], [17], [5]], num_buckets=20),
            _example(cls, numbers, [str(n) if n is not None else "" for n in numbers], hash_bucket_size=100),
        ]


class SequenceIdFeature(IdFeature):
    """One id per step of a sequence; text split by `sequence_delim`, or a list with an element per step.

    An empty step keeps its place and becomes the default. Generated sequences are never empty: a missing one is a
    single step of the default ("0" if there is none). Encoded ones are empty unless fg_encoded_default_value is set.
    The first `sequence_length` steps are kept.
    """

    is_sequence: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> list[Example]:
        texts = ["a;bb;;a\x1dccc;d", None, "", "ccc", ";"]
        lists = [["a", "bb", None, "a\x1dccc", "d"], [], None, ["ccc"], ["", ""]]
        return [
            _example(cls, texts, lists, hash_bucket_size=100),
            _example(cls, texts, lists, vocab_list=("bb", "ccc"), default_value="a", sequence_length=2),
            _example(cls, ["1;2", "", None, "3"], [[1, 2], [], None, [3]], num_buckets=20),
        ]


def _example(kind: type[IdFeature], rows: list[Any], same: list[Any], **fields: Any) -> Example:
    config = kind.Config(feature_name="f", expression="user:c", embedding_dim=4, **fields)
    return Example(config, {"c": pa.array(rows)}, {"c": pa.array(same)})


def _default(config: IdFeature.Config, context: PlanContext, is_sequence: bool) -> str:
    if context.encoded:
        return config.fg_encoded_default_value or ""
    return config.default_value or (SEQUENCE_DEFAULT if is_sequence else "")


def _value_dim(config: IdFeature.Config, is_sequence: bool) -> int:
    if not is_sequence:
        return config.value_dim or 0
    if config.value_dim not in (None, 1):
        raise ConfigError(f"feature {config.feature_name!r}: value_dim {config.value_dim} in a sequence isn't supported yet; use 1")
    return 1


def _bucketizer(config: IdFeature.Config, context: PlanContext, default: str) -> Bucketizer:
    name, oov = config.feature_name, config.default_bucketize_value
    given = [f for f in ("hash_bucket_size", "num_buckets", "vocab_list", "vocab_dict") if getattr(config, f)]
    if len(given) != 1:
        what = f"sets {' and '.join(given)}" if given else "has no bucketiser"
        raise ConfigError(f"feature {name!r} {what}; set one of hash_bucket_size, num_buckets, vocab_list and vocab_dict")
    if config.hash_bucket_size:
        bucketizer = Bucketizer("hash", config.hash_bucket_size)
    elif config.num_buckets:
        bucketizer = Bucketizer("number", config.num_buckets)
    elif config.vocab_list:
        bucketizer = list_bucketizer(config.vocab_list, default, oov)
    else:
        bucketizer = dict_bucketizer(config.vocab_dict, default, oov)
    if min(bucketizer.indices, default=0) < 0 or bucketizer.oov >= bucketizer.num_buckets:
        raise ConfigError(f"feature {name!r}: an index of the vocabulary is outside 0..{bucketizer.num_buckets - 1}")
    # Encoded data hold finished ids: only their number matters.
    return Bucketizer("number", bucketizer.num_buckets) if context.encoded else bucketizer
