"""Sample component configs, and one pipeline in three syntaxes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from pydantic import Field

from tidemill.config.base import Config, Resolver
from tidemill.config.feature import FeatureEntry
from tidemill.config.load import Loaded, load_pipeline
from tidemill.config.model import MLP, DINTower, Tower
from tidemill.errors import ConfigError


class SampleId(Config):
    feature_name: str
    """Unique name."""
    expression: str = ""
    embedding_name: str = ""
    embedding_dim: int
    hash_bucket_size: int | None = None
    num_buckets: int | None = None
    vocab_list: tuple[str, ...] = ()
    vocab_dict: dict[str, int] = Field(default_factory=dict)
    separator: str = "\x1d"
    pooling: str = "sum"
    zch: dict[str, Any] | None = None
    sequence_length: int | None = None
    sequence_delim: str = ";"


class SampleRaw(Config):
    feature_name: str
    expression: str = ""
    embedding_dim: int | None = None
    boundaries: tuple[float, ...] = ()
    value_dim: int = 1


class SampleSequence(Config):
    idle_fields: ClassVar[frozenset[str]] = frozenset(("sequence_pk",))

    sequence_name: str
    sequence_length: int
    sequence_pk: str = ""
    features: tuple[FeatureEntry, ...] = ()


class SampleTower(Config):
    towers: tuple[Tower, ...] = ()
    din_towers: tuple[DINTower, ...] = ()
    final: MLP


KINDS: dict[tuple[str, str], type[Config]] = {
    ("feature", "id_feature"): SampleId,
    ("feature", "sequence_id_feature"): SampleId,
    ("feature", "raw_feature"): SampleRaw,
    ("feature", "sequence_feature"): SampleSequence,
    ("model", "multi_tower_din"): SampleTower,
}

# Written from the field tables, in the manner of a Taobao display-advertising pipeline.
TAOBAO_PROTO = r"""
# clicks of Taobao display advertising
train_input_path: "data/taobao/train/*.parquet"
eval_input_path: 'data/taobao/test/*.parquet'
model_dir: "experiments/"
    "multi_tower_din_taobao"
train_config {
  sparse_optimizer {
    adagrad_optimizer { lr: 0.001 }
    constant_learning_rate {}
  }
  dense_optimizer {
    adam_optimizer { lr: 1e-3 beta2: .99 };
    exponential_decay_learning_rate < decay_size: 0x10, decay_factor: 0.5f staircase: False >
  }
  num_epochs: 1
  save_checkpoints_timestamps: [1700000000, 1700003600]
}
eval_config {}
data_config {
  batch_size: 8192
  dataset_type: ParquetDataset
  fg_mode: FG_DAG
  label_fields: "clk"
  input_fields { input_name: "clk" input_type: INT32 }
  input_fields { input_name: "price" input_type: DOUBLE }
}
feature_configs {
  id_feature {
    feature_name: "user_id"
    expression: "user:user_id"
    num_buckets: 1141730
    embedding_dim: 16
  }
}
feature_configs {
  id_feature {
    feature_name: "adgroup_id"
    expression: "item:adgroup_id"
    hash_bucket_size: 846812
    embedding_dim: 16
    embedding_name: "adgroup"
    separator: "\035"
  }
}
feature_configs {
  id_feature {
    feature_name: "pid"
    vocab_dict { key: "430548_1007" value: 2 }
    vocab_dict { key: "\xe5\xba\x97\u0041" value: 3 }
    embedding_dim: 4
  }
}
feature_configs {
  raw_feature {
    feature_name: "price"
    expression: "item:price"
    boundaries: [-1.5, 2.2, 30]
    boundaries: 40
    embedding_dim: 8
  }
}
feature_configs: [{
  sequence_id_feature {
    feature_name: "click_50_seq__adgroup_id"
    expression: "user:click_50_seq"
    sequence_length: 50
    sequence_delim: "|"
    hash_bucket_size: 846812
    embedding_dim: 16
    embedding_name: "adgroup"
  }
}]
model_config {
  feature_groups {
    group_name: "deep"
    feature_names: "user_id"
    feature_names: "adgroup_id"
    feature_names: ["pid", "price"]
    group_type: DEEP
  }
  feature_groups {
    group_name: "seq"
    feature_names: "adgroup_id"
    feature_names: "click_50_seq__adgroup_id"
    group_type: SEQUENCE
  }
  multi_tower_din {
    towers { input: "deep" mlp { hidden_units: [512, 256] activation: "nn.ReLU" } }
    din_towers { input: "seq" attn_mlp { hidden_units: 36 hidden_units: 18 } }
    final { hidden_units: [64, 32] }
  }
  metrics { auc { thresholds: 1000 } }
  metrics { grouped_auc { grouping_key: "user_id" } }
  losses { binary_cross_entropy {} }
}
"""

TAOBAO_YAML = """
train_input_path: data/taobao/train/*.parquet
eval_input_path: 'data/taobao/test/*.parquet'
model_dir: experiments/multi_tower_din_taobao
train_config:
  sparse_optimizer:
    adagrad_optimizer: {lr: 0.001}
    constant_learning_rate:
  dense_optimizer:
    adam_optimizer: {lr: 1e-3, beta2: 0.99}
    exponential_decay_learning_rate: {decay_size: 16, decay_factor: 0.5, staircase: false}
  num_epochs: 1
  save_checkpoints_timestamps: [1700000000, 1700003600]
eval_config: {}
data_config:
  batch_size: 8192
  dataset_type: ParquetDataset
  fg_mode: FG_DAG
  label_fields: [clk]
  input_fields:
    - {input_name: clk, input_type: INT32}
    - {input_name: price, input_type: DOUBLE}
feature_configs:
  - id_feature:
      feature_name: user_id
      expression: user:user_id
      num_buckets: 1141730
      embedding_dim: 16
  - id_feature:
      feature_name: adgroup_id
      expression: item:adgroup_id
      hash_bucket_size: 846812
      embedding_dim: 16
      embedding_name: adgroup
      separator: "\\x1d"
  - id_feature:
      feature_name: pid
      vocab_dict: {430548_1007: 2, 店A: 3}
      embedding_dim: 4
  - raw_feature:
      feature_name: price
      expression: item:price
      boundaries: [-1.5, 2.2, 30, 40]
      embedding_dim: 8
  - sequence_id_feature:
      feature_name: click_50_seq__adgroup_id
      expression: user:click_50_seq
      sequence_length: 50
      sequence_delim: "|"
      hash_bucket_size: 846812
      embedding_dim: 16
      embedding_name: adgroup
model_config:
  feature_groups:
    - group_name: deep
      feature_names: [user_id, adgroup_id, pid, price]
      group_type: DEEP
    - group_name: seq
      feature_names: [adgroup_id, click_50_seq__adgroup_id]
      group_type: SEQUENCE
  multi_tower_din:
    towers:
      - input: deep
        mlp: {hidden_units: [512, 256], activation: nn.ReLU}
    din_towers:
      - input: seq
        attn_mlp: {hidden_units: [36, 18]}
    final: {hidden_units: [64, 32]}
  metrics:
    - auc: {thresholds: 1000}
    - grouped_auc: {grouping_key: user_id}
  losses:
    - binary_cross_entropy:
"""

SMALL: dict[str, Any] = {
    "train_input_path": "day.parquet",
    "eval_input_path": "",
    "model_dir": "model",
    "train_config": {
        "sparse_optimizer": {"adagrad_optimizer": {"lr": 0.01}},
        "dense_optimizer": {"adam_optimizer": {"lr": 0.001}},
        "num_epochs": 1,
    },
    "data_config": {"dataset_type": "ParquetDataset", "label_fields": ["click"]},
    "feature_configs": [{"id_feature": {"feature_name": "user", "embedding_dim": 4, "hash_bucket_size": 10}}],
    "model_config": {
        "feature_groups": [{"group_name": "deep", "feature_names": ["user"]}],
        "multi_tower_din": {"towers": [{"input": "deep"}], "final": {"hidden_units": [4]}},
        "losses": [{"binary_cross_entropy": {}}],
    },
}


def _resolve(family: str, kind: str) -> type[Config]:
    try:
        return KINDS[family, kind]
    except KeyError:
        raise ConfigError(f"unknown {family} {kind!r}") from None


@pytest.fixture(scope="session")
def resolver() -> Resolver:
    return _resolve


@pytest.fixture(scope="session")
def taobao() -> dict[str, str]:
    return {"proto": TAOBAO_PROTO, "yaml": TAOBAO_YAML}


@pytest.fixture
def small() -> dict[str, Any]:
    """The smallest config that loads without a warning, to be changed by a test."""
    return json.loads(json.dumps(SMALL))


@pytest.fixture(scope="session")
def load() -> Callable[..., Loaded]:
    """load_pipeline with the sample kinds and, unless given, an empty environment. A dict is written as JSON first."""

    def run(text: Any, **options: Any) -> Loaded:
        if isinstance(text, dict):
            text = json.dumps(text, indent=1)
        return load_pipeline(text, _resolve, **{"environ": {}, **options})

    return run


@pytest.fixture(scope="session")
def errors(load: Callable[..., Loaded]) -> Callable[..., list[str]]:
    """The lines of the ConfigError that loading raises."""

    def run(text: Any, **options: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, **options)
        return str(caught.value).splitlines()

    return run
