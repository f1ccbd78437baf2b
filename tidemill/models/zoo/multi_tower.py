"""multi_tower: an MLP for each feature group, their outputs side by side into a last MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidemill.config import model as messages
from tidemill.config.base import Config as BaseConfig
from tidemill.errors import ConfigError
from tidemill.models.embedding_groups import GroupPlan
from tidemill.models.layers.groups import Tower
from tidemill.models.layers.mlp import MLP
from tidemill.models.program import Program, binary_outputs


class MultiTower(Program):
    """logit = w · MLP([MLP_1(E(g_1)), MLP_2(E(g_2)), ...]) + b"""

    class Config(BaseConfig):
        """Towers on feature groups, joined by a last MLP."""

        towers: tuple[messages.Tower, ...] = ()
        """Plain towers."""
        final: messages.MLP
        """Last MLP."""

    def __init__(self, config: Config, plan: GroupPlan) -> None:
        super().__init__()
        if not config.towers:
            raise ConfigError("multi_tower: towers is empty")
        towers = [Tower(plan, tower) for tower in config.towers]
        self.towers = nn.ModuleList(towers)
        self.final = MLP(sum(tower.out_features for tower in towers), config.final, "multi_tower: final")
        self.head = nn.Linear(self.final.out_features, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        joined_bf = torch.cat([tower(inputs) for tower in self.towers], dim=1)
        return binary_outputs(self.head(self.final(joined_bf)))
