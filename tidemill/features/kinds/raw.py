"""Raw features: numbers, either as dense values or cut by boundaries into ids."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa

from tidemill.config import base
from tidemill.config.base import Positive, not_yet
from tidemill.config.feature import AutoDisEmbedding, MLPEmbedding, ParameterConstraints
from tidemill.errors import ConfigError
from tidemill.features.feature import Example, Feature, read_expression, require_pooling, require_separator
from tidemill.features.kinds.id import SEQUENCE_DEFAULT
from tidemill.features.normalize import parse_normalizer
from tidemill.features.plan import Bucketizer, DensePlan, FeaturePlan, IdPlan, PlanContext


class RawFeature(Feature):
    """`value_dim` numbers a row: dense, or with `boundaries` an id for each.

    null, "" and NaN are missing: `default_value` stands for them, which is not normalised but is bucketised; a single
    default is repeated `value_dim` times. Infinity is a DataError.
    """

    class Config(base.Config):
        oneofs: ClassVar = {"dense_emb": ("autodis", "mlp")}
        idle_fields: ClassVar[frozenset[str]] = frozenset(
            (
                "init_fn",
                "use_mask",
                "trainable",
                "data_type",
                "autodis",
                "mlp",
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
        embedding_dim: Positive | None = None
        """width of the embedding; needed with boundaries"""
        boundaries: tuple[float, ...] = ()
        """sorted cut points; id = how many are <= the value, in float32"""
        value_dim: Positive = 1
        """numbers per row"""
        normalizer: str | None = None
        """`method=log10,threshold=,default=`, `method=zscore,mean=,standard_deviation=` or `method=minmax,min=,max=`"""
        pooling: str = "sum"
        """sum or mean, with boundaries"""
        default_value: str = "0"
        """stands for null and empty, before bucketising; "" = nothing"""
        separator: str = "\x1d"
        """between values in text"""
        init_fn: str | None = None
        """table initialiser"""
        use_mask: bool | None = None
        """eligible for random masking"""
        fg_encoded_default_value: str | None = None
        """stands for null when data are encoded"""
        trainable: bool = True
        """false: frozen table"""
        stub_type: bool = not_yet(False)
        """intermediate only, not fed to the model"""
        data_type: str = "FP32"
        """type of the table's weights"""
        autodis: AutoDisEmbedding | None = None
        """AutoDis numeric embedding"""
        mlp: MLPEmbedding | None = None
        """one bias-free linear per feature"""
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
        if config.stub_type:
            raise ConfigError(f"feature {name!r}: stub_type isn't supported yet")
        parse_normalizer(name, config.normalizer or "")
        if config.boundaries:
            return [_ids(config, context, cls.is_sequence)]
        if cls.is_sequence:
            raise ConfigError(f"feature {name!r}: a raw sequence needs boundaries; dense ones aren't supported yet")
        return [_dense(config, context)]

    @classmethod
    def examples(cls) -> list[Example]:
        texts, numbers = ["0.5", None, "", "-2", "1e3"], [0.5, None, None, -2.0, 1000.0]
        pairs, lists = ["1\x1d2", "", None, "\x1d4"], [[1, 2], [], None, [None, 4]]
        return [
            _example(cls, texts, numbers),
            _example(cls, numbers, texts, default_value="0.1", normalizer="method=zscore,mean=1,standard_deviation=4"),
            _example(cls, numbers, texts, normalizer="method=log10,threshold=0.1,default=-1"),
            _example(cls, pairs, lists, value_dim=2, default_value="0.5", normalizer="method=minmax,min=0,max=8"),
            _example(cls, texts, numbers, boundaries=(-1, 0, 0.5), embedding_dim=4),
            _example(cls, texts, numbers, boundaries=(-1, 0, 0.5), embedding_dim=4, default_value=""),
        ]


class SequenceRawFeature(RawFeature):
    """A number per step, cut by `boundaries` into an id; steps and missing values as in a sequence of ids."""

    is_sequence: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> list[Example]:
        texts, lists = ["0.1;0.2;;9", "", None, "0.3"], [[0.1, 0.2, None, 9], [], None, [0.3]]
        return [
            _example(cls, texts, lists, boundaries=(0.05, 0.15), embedding_dim=4),
            _example(cls, texts, lists, boundaries=(0.05, 0.15), embedding_dim=4, default_value="", sequence_length=2),
        ]


def _example(kind: type[RawFeature], rows: list[Any], same: list[Any], **fields: Any) -> Example:
    config = kind.Config(feature_name="f", expression="user:c", **fields)
    return Example(config, {"c": pa.array(rows)}, {"c": pa.array(same)})


def _dense(config: RawFeature.Config, context: PlanContext) -> DensePlan:
    name = config.feature_name
    column, side = read_expression(name, config.expression, context)
    separator = require_separator(name, "separator", context.encoded_separator if context.encoded else config.separator)
    default = (config.fg_encoded_default_value or "") if context.encoded else config.default_value
    return DensePlan(
        name=context.prefix + name,
        column=column,
        side=side,
        dim=config.value_dim,
        separator=separator,
        default=_dense_default(name, default, separator, config.value_dim),
        normalizer="" if context.encoded else config.normalizer or "",
    )


def _ids(config: RawFeature.Config, context: PlanContext, is_sequence: bool) -> IdPlan:
    name = config.feature_name
    if list(config.boundaries) != sorted(set(config.boundaries)):
        raise ConfigError(f"feature {name!r}: boundaries aren't sorted and distinct")
    if config.embedding_dim is None:
        raise ConfigError(f"feature {name!r}: boundaries need an embedding_dim")
    column, side = read_expression(name, config.expression, context)
    default = config.default_value or (SEQUENCE_DEFAULT if is_sequence else "")
    if context.encoded:
        default = config.fg_encoded_default_value or ""
    rows = len(config.boundaries) + 1
    boundaries = Bucketizer("boundaries", rows, boundaries=tuple(config.boundaries))
    return IdPlan(
        name=context.prefix + name,
        column=column,
        side=side,
        bucketizer=Bucketizer("number", rows) if context.encoded else boundaries,
        separator=require_separator(name, "separator", context.encoded_separator if context.encoded else config.separator),
        default=default,
        value_dim=config.value_dim,
        embedding_dim=config.embedding_dim,
        embedding_name=config.embedding_name or f"{context.prefix}{name}_emb",
        pooling=require_pooling(name, config.pooling),
        is_sequence=is_sequence,
        delimiter=require_separator(name, "sequence_delim", config.sequence_delim),
        sequence_length=(config.sequence_length or 0) if is_sequence else 0,
        normalizer="" if context.encoded else config.normalizer or "",
    )


def _dense_default(name: str, text: str, separator: str, dim: int) -> tuple[float, ...] | None:
    if not text:
        return None
    try:
        values = [float(item) for item in text.split(separator)]
    except ValueError:
        raise ConfigError(f"feature {name!r}: default_value {text!r} isn't a number") from None
    if len(values) not in (1, dim):
        raise ConfigError(f"feature {name!r}: default_value {text!r} holds {len(values)} numbers, value_dim is {dim}")
    return tuple(values * dim if len(values) == 1 else values)
