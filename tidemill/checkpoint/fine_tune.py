"""What of another model's checkpoint a model can start from: matched by name and shape, names mapped by a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidemill.config.tree import did_you_mean
from tidemill.errors import CheckpointError, ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's parameters: name -> shape, of its tables and of its dense part."""

    tables: Mapping[str, Shape]
    dense: Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is taken: the model's name -> the checkpoint's.

    `missing`: parameters that the checkpoint doesn't have; `unfit`: those of another shape, each with both; `unused`: what the
    checkpoint has besides. `share`: how much of the model's values is taken.
    """

    tables: Mapping[str, str]
    dense: Mapping[str, str]
    missing: tuple[str, ...]
    unfit: tuple[str, ...]
    unused: tuple[str, ...]
    share: float

    @property
    def is_exact(self) -> bool:
        """Whether both hold the same parameters under the same names."""
        renamed = any(new != old for new, old in (*self.tables.items(), *self.dense.items()))
        return not (self.missing or self.unfit or self.unused or renamed)


def cover(wanted: Shapes, saved: Shapes, renamed: Mapping[str, str]) -> Coverage:
    """What a model can take of a checkpoint. `renamed`: the model's name -> the checkpoint's; others keep their name. Pure.

    Raises ConfigError for a renamed parameter that the model, or the checkpoint, doesn't have, CheckpointError if nothing fits.
    """
    _require_known(renamed.keys(), {*wanted.tables, *wanted.dense}, "the model")
    _require_known(renamed.values(), {*saved.tables, *saved.dense}, "the checkpoint")
    taken: list[dict[str, str]] = []
    missing: list[str] = []
    unfit: list[str] = []
    unused: list[str] = []
    for model, checkpoint in ((wanted.tables, saved.tables), (wanted.dense, saved.dense)):
        sources = {name: renamed.get(name, name) for name in model}
        fitting = {name: old for name, old in sources.items() if checkpoint.get(old) == model[name]}
        taken.append(fitting)
        missing += [name for name, old in sources.items() if old not in checkpoint]
        unfit += [
            f"{name} ({_text(model[name])}, in the checkpoint {_text(checkpoint[old])})"
            for name, old in sources.items()
            if old in checkpoint and name not in fitting
        ]
        unused += [name for name in checkpoint if name not in sources.values()]
    tables, dense = taken
    if not tables and not dense:
        raise CheckpointError(
            f"the checkpoint has none of the model's {len(wanted.tables) + len(wanted.dense)} parameters, at least of their shapes;"
            " is it another model's? train_config.fine_tune_ckpt_param_map maps names"
        )
    held = sum(math.prod(wanted.tables[name]) for name in tables) + sum(math.prod(wanted.dense[name]) for name in dense)
    total = sum(math.prod(shape) for shape in (*wanted.tables.values(), *wanted.dense.values()))
    return Coverage(tables, dense, tuple(missing), tuple(unfit), tuple(unused), held / total)


def parse_parameter_map(text: str, *, where: str) -> dict[str, str]:
    """Lines `new name TAB old name` -> {new: old}; empty lines and those that start with # are passed over.

    Raises ConfigError naming the line.
    """
    renamed: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        names = line.split()
        if len(names) != 2:
            raise ConfigError(f"{where}:{number}: {line.strip()!r} isn't a new name and an old one, separated by a tab")
        if names[0] in renamed:
            raise ConfigError(f"{where}:{number}: {names[0]!r} is there twice")
        renamed[names[0]] = names[1]
    return renamed


def _require_known(names: Iterable[str], known: set[str], owner: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"fine_tune_ckpt_param_map: {owner} has no parameter {name!r}{did_you_mean(name, known)}")


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))
