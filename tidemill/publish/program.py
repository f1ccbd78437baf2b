"""The dense graph as a file that a server loads without the model's code."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping

import numpy as np
import torch

from tidemill.errors import PublishError
from tidemill.models.model import RecModel
from tidemill.models.program import example_inputs, export_program

_CHECKED_ROWS = (1, 2, 37)
"""Other numbers than the one that the graph is traced with; 1 is what breaks first."""

_TOLERANCE = 1e-5


def with_dense(model: RecModel, weights: Mapping[str, np.ndarray]) -> torch.nn.Module:
    """A copy of the model's program with a checkpoint's weights, in eval mode. Raises PublishError if they don't fit."""
    program = copy.deepcopy(model.program)
    try:
        program.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
    except RuntimeError as error:
        raise PublishError(f"the checkpoint's dense weights don't fit the model's program: {error}") from error
    return program.eval()


def program_archive(program: torch.nn.Module, model: RecModel) -> tuple[bytes, list[str]]:
    """The torch.export archive of the program, and the names of its outputs.

    Checked: loaded back, it scores random inputs of several sizes as the program itself. Raises PublishError if it doesn't, or if
    its weights have other names than the program's, since releases couldn't replace them then.
    """
    buffer = io.BytesIO()
    torch.export.save(export_program(program, model.plan), buffer)
    archive = buffer.getvalue()
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    if loaded.state_dict.keys() != program.state_dict().keys():
        different = sorted(loaded.state_dict.keys() ^ program.state_dict().keys())
        raise PublishError(f"the exported program's weights aren't the program's: {different} are in one of them only")
    graph = loaded.module()
    with torch.inference_mode():
        for num_rows in _CHECKED_ROWS:
            inputs = _random_inputs(model, num_rows)
            outputs = program(inputs)
            _require_equal(graph(inputs), outputs, num_rows)
    return archive, list(outputs)


def _random_inputs(model: RecModel, num_rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    inputs = example_inputs(model.plan, num_rows)
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            inputs[name] = torch.randn(tensor.shape, generator=generator)
        else:
            # Lengths, from none to all steps.
            inputs[name] = torch.randint(0, int(tensor.max()) + 1, tensor.shape, generator=generator)
    return inputs


def _require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], num_rows: int) -> None:
    if found.keys() != wanted.keys():
        raise PublishError(f"the exported program gives outputs {sorted(found)}, not {sorted(wanted)}")
    for name, tensor in wanted.items():
        if not torch.allclose(found[name], tensor, rtol=_TOLERANCE, atol=_TOLERANCE):
            difference = float((found[name] - tensor).abs().max())
            raise PublishError(f"output {name!r} of the exported program differs by {difference:.3g} for {num_rows} rows")
