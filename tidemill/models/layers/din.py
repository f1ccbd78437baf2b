"""Attention of a query over a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tidemill.config import model as messages
from tidemill.errors import ConfigError
from tidemill.models.layers.mlp import MLP


class DINAttention(nn.Module):
    """Deep interest network (Zhou et al., arXiv:1706.06978): with q zero-padded to the width of a step,

        a_t = w · MLP([q, s_t, q - s_t, q * s_t]) + b        out = Σ_t softmax_t(a_t) s_t   over the row's own steps

    A row without steps gives zeros.
    """

    def __init__(self, query_dim: int, step_dim: int, config: messages.MLP, where: str) -> None:
        super().__init__()
        if query_dim > step_dim:
            raise ConfigError(f"{where}: the query has {query_dim} columns, more than the {step_dim} of a sequence step")
        self._missing = step_dim - query_dim
        self.mlp = MLP(4 * step_dim, config, f"{where}: attn_mlp")
        self.score = nn.Linear(self.mlp.out_features, 1)

    def forward(self, query_bq: Tensor, steps_btd: Tensor, lengths_b: Tensor) -> Tensor:
        """(B, D)"""
        num_steps = steps_btd.shape[1]
        query_btd = functional.pad(query_bq, (0, self._missing)).unsqueeze(1).expand(-1, num_steps, -1)
        pairs = torch.cat([query_btd, steps_btd, query_btd - steps_btd, query_btd * steps_btd], dim=2)
        scores_bt = self.score(self.mlp(pairs)).squeeze(2)
        present_bt = torch.arange(num_steps, device=lengths_b.device).unsqueeze(0) < lengths_b.unsqueeze(1)
        # The smallest finite value, not -inf: a row without steps would be 0/0. Its weights are even, over steps of zeros.
        scores_bt = scores_bt.masked_fill(~present_bt, torch.finfo(scores_bt.dtype).min)
        return torch.bmm(torch.softmax(scores_bt, dim=1).unsqueeze(1), steps_btd).squeeze(1)
