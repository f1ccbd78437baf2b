"""multi_tower_din: multi_tower with attention towers over sequence groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidemill.config import model as messages
from tidemill.config.base import Config as BaseConfig
from tidemill.errors import ConfigError
from tidemill.models.embedding_groups import GroupPlan
from tidemill.models.layers.groups import DINTower, Tower
from tidemill.models.layers.mlp import MLP
from tidemill.models.program import Program, binary_outputs


class MultiTowerDIN(Program):
    """logit = w · MLP([MLP_i(E(g_i)) ..., DIN(g_j) ...]) + b"""

    class Config(BaseConfig):
        """Towers on feature groups and attention towers on sequence groups, joined by a last MLP."""

        towers: tuple[messages.Tower, ...] = ()
        """Plain towers."""
        din_towers: tuple[messages.DINTower, ...] = ()
        """Attention towers."""
        final: messages.MLP
        """Last MLP."""

    def __init__(self, config: Config, plan: GroupPlan) -> None:
        super().__init__()
        if not config.towers and not config.din_towers:
            raise ConfigError("multi_tower_din: towers and din_towers are empty")
        towers: list[Tower | DINTower] = [Tower(plan, tower) for tower in config.towers]
        towers += [DINTower(plan, tower) for tower in config.din_towers]
        self.towers = nn.ModuleList(towers)
        self.final = MLP(sum(tower.out_features for tower in towers), config.final, "multi_tower_din: final")
        self.head = nn.Linear(self.final.out_features, 1)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        joined_bf = torch.cat([tower(inputs) for tower in self.towers], dim=1)
        return binary_outputs(self.head(self.final(joined_bf)))
