"""The only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.errors import ConfigError

SUCCESSOR_DIR = "ONLINE_LEARNING_SUCCESSOR_DIR"
TOLERANCE_SECS = "ONLINE_LEARNING_HANDOVER_TOLERANCE_SECS"
FARM_HASH = "USE_FARM_HASH_TO_BUCKETIZE"

_FIELDS = {
    SUCCESSOR_DIR: "train_config.handover.successor_dir",
    TOLERANCE_SECS: "train_config.handover.tolerance_s",
    FARM_HASH: "data_config.hash.function",
}


@dataclass(frozen=True, slots=True)
class EnvironmentValue:
    """A config value that comes from the environment."""

    variable: str
    path: str
    value: str


def config_values(environ: Mapping[str, str] | None = None) -> list[EnvironmentValue]:
    """Config fields that the environment sets; an empty variable counts as unset. Raises ConfigError naming the variable."""
    source = os.environ if environ is None else environ
    found = []
    for variable, path in _FIELDS.items():
        text = source.get(variable, "").strip()
        if text:
            value = _hash_function(text) if variable == FARM_HASH else text
            found.append(EnvironmentValue(variable, path, value))
    return found


def _hash_function(text: str) -> str:
    words = {"true": "farm", "1": "farm", "false": "std", "0": "std"}
    try:
        return words[text.lower()]
    except KeyError:
        raise ConfigError(f"{FARM_HASH}: expected true or false, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where torchrun has put this process; a single process without it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None


def process_place(environ: Mapping[str, str] | None = None) -> ProcessPlace:
    """Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Raises ConfigError naming the variable."""
    source = os.environ if environ is None else environ
    place = ProcessPlace(
        rank=_integer(source, "RANK", 0),
        world_size=_integer(source, "WORLD_SIZE", 1),
        local_rank=_integer(source, "LOCAL_RANK", 0),
        local_world_size=_integer(source, "LOCAL_WORLD_SIZE", 1),
        master_addr=source.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_integer(source, "MASTER_PORT", 0) or None,
    )
    if not place.rank < place.world_size:
        raise ConfigError(f"RANK: must be below WORLD_SIZE ({place.world_size}), got {place.rank}")
    return place


def _integer(source: Mapping[str, str], variable: str, default: int) -> int:
    text = source.get(variable, "").strip() or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{variable}: expected an integer >= 0, got {text!r}")
    return int(text)
