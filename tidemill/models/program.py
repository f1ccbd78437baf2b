"""The dense part of a model: from embeddings to scores. A server runs it without the rest, as an exported graph."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tidemill.config.base import Config
from tidemill.models.embedding_groups import GroupPlan

MAX_EXPORTED_ROWS = 8192
_EXAMPLE_ROWS = 50


class Program(nn.Module):
    """A model of the zoo, found by its registry kind. It has a nested `Config` and is made by `(config, plan: GroupPlan)`.

    `forward` takes the tensors that `ProgramInputs` describes and returns named outputs, each with B rows. Its rows don't depend on
    each other, and the graph doesn't depend on values: it must export for any number of rows.
    """

    Config: ClassVar[type[Config]]

    @abstractmethod
    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]: ...


def binary_outputs(logits_b1: Tensor) -> dict[str, Tensor]:
    """`logits` and `probs`, both (B,)."""
    logits_b = logits_b1.squeeze(1)
    return {"logits": logits_b, "probs": torch.sigmoid(logits_b)}


def example_inputs(plan: GroupPlan, num_rows: int) -> dict[str, Tensor]:
    """Zeros of the right names, shapes and types; sequences are full."""
    inputs = plan.inputs
    example: dict[str, Tensor] = {}
    if inputs.num_dense:
        example["dense"] = torch.zeros(num_rows, inputs.num_dense)
    if inputs.pooled:
        example["pooled"] = torch.zeros(num_rows, sum(plan.dims[lookup.table] for lookup in inputs.pooled))
    for sequence in inputs.sequences:
        group, steps = sequence.group, sequence.max_steps
        if sequence.query:
            example[f"{group}.query"] = torch.zeros(num_rows, sum(plan.dims[look.table] for look in sequence.query))
        example[f"{group}.sequence"] = torch.zeros(num_rows, steps, sum(plan.dims[look.table] for look in sequence.steps))
        example[f"{group}.lengths"] = torch.full((num_rows,), steps, dtype=torch.int64)
    return example


def export_program(program: nn.Module, plan: GroupPlan) -> ExportedProgram:
    """The program as a graph on the CPU for 1 to 8192 rows, in eval mode. Works on a copy."""
    copied = copy.deepcopy(program).cpu().eval()
    example = example_inputs(plan, _EXAMPLE_ROWS)
    rows = Dim("rows", min=1, max=MAX_EXPORTED_ROWS)
    return torch.export.export(copied, (example,), dynamic_shapes=({name: {0: rows} for name in example},))
