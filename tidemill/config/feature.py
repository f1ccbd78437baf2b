"""The wrapper of features, and the messages that several kinds of features share."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SerializeAsAny

from tidemill.config.base import Config, Positive, Share, Unsigned

SIDES = ("user", "item", "context")
"""What an expression's column belongs to."""
LATER_SIDES = ("feature", "const")
"""What tzrec's expressions can name besides."""


class ParameterConstraints(Config):
    """Limits on how a table is sharded."""

    sharding_types: tuple[str, ...] = ()
    """Allowed shardings (data_parallel, table_wise, column_wise, row_wise, ...)."""
    compute_kernels: tuple[str, ...] = ()
    """Allowed kernels (dense, fused, fused_uvm, fused_uvm_caching, key_value)."""


class LFUEvictionPolicy(Config):
    """Score: hits."""


class LRUEvictionPolicy(Config):
    """Score: 1 / age^exponent."""

    decay_exponent: float = 1.0
    """Exponent of the age."""


class DistanceLFUEvictionPolicy(Config):
    """Score: hits / age^exponent."""

    decay_exponent: float = 1.0
    """Exponent of the age."""


class ZeroCollisionHash(Config):
    """A table whose slots are given to ids on demand."""

    oneofs: ClassVar = {"eviction_policy": ("lfu", "lru", "distance_lfu")}

    zch_size: Positive
    """Slots."""
    eviction_interval: Positive = 5
    """Steps from one eviction to the next."""
    threshold_filtering_func: str = ""
    """Which ids may enter."""
    lfu: LFUEvictionPolicy | None = None
    """Evict by hits."""
    lru: LRUEvictionPolicy | None = None
    """Evict by age."""
    distance_lfu: DistanceLFUEvictionPolicy | None = None
    """Evict by both."""


class AutoDisEmbedding(Config):
    """Learned soft buckets of a number (arXiv:2012.08986)."""

    num_channels: Positive
    """Meta-embeddings."""
    temperature: float = Field(default=0.1, gt=0)
    """Temperature of the softmax."""
    keep_prob: Share = 0.8
    """Factor of the residual."""


class MLPEmbedding(Config):
    """One linear layer without bias a feature."""


class DynamicEmbInitializerArgs(Config):
    """How rows of a dynamic table start."""

    mode: Literal["NORMAL", "TRUNCATED_NORMAL", "UNIFORM", "CONSTANT"] | None = None
    """Distribution."""
    mean: float = 0.0
    """Mean."""
    std_dev: float | None = None
    """Standard deviation; sqrt(1 / dim) if not given."""
    lower: float | None = None
    """Lower bound."""
    upper: float | None = None
    """Upper bound."""
    value: float = 0.0
    """The constant."""


class DynamicEmbFrequencyAdmissionStrategy(Config):
    """Rows are made after so many sightings."""

    threshold: Unsigned
    """Sightings needed."""
    initializer_args: DynamicEmbInitializerArgs | None = None
    """How rows that aren't admitted look."""
    counter_capacity: Unsigned | None = None
    """Size of the table of counters."""
    counter_bucket_capacity: Positive = 1024
    """Bucket of the table of counters."""


class DynamicEmbedding(Config):
    """A table that grows."""

    initializer_args: DynamicEmbInitializerArgs | None = None
    """How rows start."""
    eval_initializer_args: DynamicEmbInitializerArgs | None = None
    """What unknown ids look up outside of training; 0 if not given."""
    score_strategy: Literal["TIMESTAMP", "STEP", "CUSTOMIZED", "LFU", "NO_EVICTION"] = "STEP"
    """What decides about evictions."""
    max_capacity: Positive
    """Most rows."""
    cache_load_factor: Share | None = None
    """Share cached on the device."""
    init_capacity_per_rank: Unsigned | None = None
    """Rows at the start."""
    init_table: str = ""
    """Path of a table to start from."""
    bucket_capacity: Unsigned | None = None
    """Hash bucket."""
    frequency_admission_strategy: DynamicEmbFrequencyAdmissionStrategy | None = None
    """Admission by count."""


class FeatureEntry(Config):
    """One feature: its kind (`id_feature`, `raw_feature`, ...) and the fields of that kind."""

    kind_family: ClassVar[str] = "feature"

    kind: str
    config: SerializeAsAny[Config]

    @property
    def name(self) -> str:
        """The feature's name, or the sequence's of a group of sequence features."""
        return str(getattr(self.config, "feature_name", "") or getattr(self.config, "sequence_name", ""))

    @property
    def members(self) -> tuple[str, ...]:
        """The names that groups may list: the feature's own, or `<sequence>__<feature>` of a group of sequence features."""
        prefix = getattr(self.config, "sequence_name", "")
        if not prefix:
            return (self.name,)
        return tuple(f"{prefix}__{member.name}" for member in getattr(self.config, "features", ()))
