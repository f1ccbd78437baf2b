"""A recommendation model: embedding groups, and the dense program on top of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidemill.config.model import ModelConfig
from tidemill.errors import ConfigError
from tidemill.features.batch import Batch
from tidemill.features.feature_set import FeatureSet
from tidemill.models.embedding_groups import EmbeddingGroups, GroupPlan, plan_groups
from tidemill.models.program import Program
from tidemill.registry import resolve


class RecModel(nn.Module):
    """Batch -> named outputs. Its tables hold no memory until `distributed.sharding.shard` has placed them."""

    def __init__(self, plan: GroupPlan, program: Program) -> None:
        super().__init__()
        self.plan = plan
        self.embeddings = EmbeddingGroups(plan)
        self.program = program

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Collective: every rank must call, with the same batch size."""
        return self.program(self.embeddings(batch))


def build_model(config: ModelConfig, features: FeatureSet, seed: int) -> RecModel:
    """The model of a config; its dense weights follow from the seed alone, and the process's random state stays as it was.

    Raises ConfigError that names the section.
    """
    if config.num_class != 1:
        raise ConfigError(f"model_config.num_class: {config.num_class} isn't supported yet; use 1, one logit")
    plan = plan_groups(features, config.feature_groups)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RecModel(plan, resolve("model", config.kind)(config.config, plan))
