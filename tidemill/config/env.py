"""The only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.errors import ConfigError

SUCCESSOR_DIR = "ONLINE_LEARNING_SUCCESSOR_DIR"
TOLERANCE_SECS = "ONLINE_LEARNING_HANDOVER_TOLERANCE_SECS"
FARM_HASH = "USE_FARM_HASH_TO_BUCKETIZE"
ODPS_REFRESH_INTERVAL = "ODPS_READ_SESSION_REFRESH_INTERVAL"
ODPS_CONFIG_FILE = "ODPS_CONFIG_FILE_PATH"
ODPS_ENDPOINT = "ODPS_ENDPOINT"
ODPS_TABLE_LIFECYCLE = "ODPS_TABLE_LIFECYCLE"
ALIBABA_CLOUD = (
    "ALIBABA_CLOUD_CREDENTIALS_URI",
    "ALIBABA_CLOUD_SECURITY_TOKEN",
    "ALIBABA_CLOUD_CREDENTIALS_FILE",
    "ALIBABA_CLOUD_ECS_METADATA",
)
"""Each says that Alibaba Cloud's own chain of credentials is set up."""

_FIELDS = {
    SUCCESSOR_DIR: "train_config.handover.successor_dir",
    TOLERANCE_SECS: "train_config.handover.tolerance_s",
    FARM_HASH: "data_config.hash.function",
    ODPS_REFRESH_INTERVAL: "data_config.maxcompute.refresh_interval_s",
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


@dataclass(frozen=True, slots=True)
class OdpsCredentials:
    """How to sign requests to MaxCompute. `uses_chain`: by Alibaba Cloud's own chain (RAM roles and the like), without keys here.

    `found_in`: what to look at if they are refused. Keys are never shown.
    """

    endpoint: str
    found_in: str
    access_id: str = field(default="", repr=False)
    access_key: str = field(default="", repr=False)
    uses_chain: bool = False


def odps_credentials(environ: Mapping[str, str] | None = None) -> OdpsCredentials:
    """MaxCompute's credentials from the first place that has some, in tzrec's order; nothing is written anywhere.

    1. the file that ODPS_CONFIG_FILE_PATH names; 2. Alibaba Cloud's own chain, if a variable of ALIBABA_CLOUD is set (the endpoint
    is ODPS_ENDPOINT then); 3. ~/.odps_config.ini. Raises ConfigError naming the file or variable, never a value.
    """
    source = os.environ if environ is None else environ
    named = source.get(ODPS_CONFIG_FILE, "").strip()
    if named:
        return _odps_file(Path(named), f"{ODPS_CONFIG_FILE} ({named})")
    chain = next((variable for variable in ALIBABA_CLOUD if source.get(variable, "").strip()), None)
    if chain:
        endpoint = source.get(ODPS_ENDPOINT, "").strip()
        if not endpoint:
            raise ConfigError(f"{ODPS_ENDPOINT}: needed with {chain}: the address of the MaxCompute service")
        return OdpsCredentials(_address(endpoint, ODPS_ENDPOINT), chain, uses_chain=True)
    home = source.get("HOME", "").strip()
    usual = Path(home) / ".odps_config.ini" if home else None
    if usual is not None and usual.is_file():
        return _odps_file(usual, str(usual))
    raise ConfigError(
        f"no MaxCompute credentials: set {ODPS_CONFIG_FILE} to a file with lines access_id=, access_key= and end_point=,"
        f" or write such a file to ~/.odps_config.ini, or set one of {', '.join(ALIBABA_CLOUD)} and {ODPS_ENDPOINT}"
    )


def odps_table_lifecycle(environ: Mapping[str, str] | None = None) -> int | None:
    """Days that a table made here lives without being touched; None: as long as the project says. Raises ConfigError."""
    source = os.environ if environ is None else environ
    return _integer(source, ODPS_TABLE_LIFECYCLE, 0) or None


def _odps_file(path: Path, found_in: str) -> OdpsCredentials:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{found_in}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{found_in}: isn't text") from None
    values = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith(("#", ";")):
            values[name.strip()] = value.strip()
    missing = [name for name in ("access_id", "access_key", "end_point") if not values.get(name)]
    if missing:
        raise ConfigError(f"{found_in}: has no line {', '.join(f'{name}=...' for name in missing)}")
    endpoint = _address(values["end_point"], f"{found_in}: end_point")
    return OdpsCredentials(endpoint, found_in, values["access_id"], values["access_key"])


def _address(endpoint: str, named_by: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{named_by}: needs to begin with http:// or https://, got {endpoint!r}")
    return endpoint
