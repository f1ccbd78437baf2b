"""The dense graph as a function of its weights and inputs, so that new weights never touch a request in flight."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from tidemill.errors import CorruptError, ServingError


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """An exported graph and one set of weights. Immutable: any thread may run it."""

    graph: torch.nn.Module
    """Takes weights and constants, then inputs, all as positional tensors; returns a tuple."""
    weight_names: tuple[str, ...]
    """Parameters and buffers that a dense file must hold."""
    arguments: tuple[tuple[str, bool], ...]
    """The graph's positional arguments: a name, and whether it is a weight or constant."""
    outputs: dict[str, int]
    """Output name -> its place in the graph's result."""
    constants: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All outputs by name. Raises ServingError for an input that the graph wants and isn't there."""
        try:
            arguments = [self._held(name) if held else inputs[name] for name, held in self.arguments]
        except KeyError as error:
            raise ServingError(f"the program wants input {error}, but the snapshot declares {', '.join(inputs)}") from None
        results = self.graph(*arguments)
        return {name: results[at] for name, at in self.outputs.items()}

    def with_weights(self, arrays: Mapping[str, np.ndarray]) -> Program:
        """The same graph with other weights, copied. Raises CorruptError unless names and shapes are exactly the program's."""
        if arrays.keys() != set(self.weight_names):
            missing = sorted(set(self.weight_names) - arrays.keys())
            raise CorruptError(
                f"dense weights don't fit the program: missing {missing}, unknown {sorted(arrays.keys() - set(self.weight_names))}"
            )
        weights = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        for name, before in self.weights.items():
            if weights[name].shape != before.shape or weights[name].dtype != before.dtype:
                raise CorruptError(
                    f"dense weight {name!r} is {weights[name].dtype} {tuple(weights[name].shape)},"
                    f" the program wants {before.dtype} {tuple(before.shape)}"
                )
        return replace(self, weights=weights)

    def _held(self, name: str) -> torch.Tensor:
        return self.weights[name] if name in self.weights else self.constants[name]


def load_program(archive: bytes) -> Program:
    """The program in a torch.export archive, with the archive's own weights.

    The exported module takes one dict of tensors and returns a dict of tensors. Raises CorruptError for anything else.
    """
    exported = torch.export.load(io.BytesIO(archive))
    signature = exported.graph_signature
    places = _places(exported.call_spec.in_spec)
    outputs = _places(exported.call_spec.out_spec)
    if not isinstance(places, tuple) or len(places[0]) != 1 or not isinstance(places[0][0], dict) or not isinstance(outputs, dict):
        raise CorruptError("the program doesn't take one dict of tensors and return a dict of tensors")
    user_names = {place: name for name, place in places[0][0].items()}
    arguments: list[tuple[str, bool]] = []
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append((user_names[sum(not held for _, held in arguments)], False))
        else:
            arguments.append((str(spec.target), True))
    first = len(signature.output_specs) - len(signature.user_outputs)
    return Program(
        graph=exported.graph_module,
        weight_names=tuple(exported.state_dict),
        arguments=tuple(arguments),
        outputs={name: first + place for name, place in outputs.items()},
        constants={name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)},
        weights={name: tensor.detach() for name, tensor in exported.state_dict.items()},
    )


def _places(spec: pytree.TreeSpec) -> object:
    """The structure that a spec describes, holding each leaf's place in the flat list."""
    return pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
