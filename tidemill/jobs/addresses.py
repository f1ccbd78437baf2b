"""What kind of source or output an address means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from tidemill import registry
from tidemill.config.data import SOURCE_KINDS
from tidemill.config.odps_uri import SCHEME, parse_odps_path, parse_odps_paths, partition_key
from tidemill.data.split import Split
from tidemill.data.writers.output import Output
from tidemill.errors import ConfigError

_CSV = re.compile(r"\.(?:csv|tsv|txt)(?:\.(?:gz|zst|zstd|bz2|lz4))?$")
_SCHEMES = {"odps": "maxcompute", "kafka": "kafka"}
WRITER_TYPES = {"ParquetWriter": "parquet", "CsvWriter": "csv", "OdpsWriter": "maxcompute", "KafkaWriter": "kafka"}
"""tzrec's names of outputs (KafkaWriter is ours) -> their kinds."""


def input_kind(address: str, dataset_type: str | None = None) -> str:
    """The kind of a source. Raises ConfigError for an address that means several kinds, or an unknown dataset_type."""
    if dataset_type is None:
        return _kind(address, "source")
    if dataset_type not in SOURCE_KINDS:
        raise ConfigError(f"dataset_type: {dataset_type!r} is none of {', '.join(SOURCE_KINDS)}")
    return SOURCE_KINDS[dataset_type]


def make_output(kind: str, address: str, *, overwrite: bool, settings: Mapping[str, Any]) -> Output:
    """This rank's end of the output at an address. `settings`: further fields of the kind's config; None leaves one alone."""
    output: Any = registry.resolve("output", kind)
    given = {name: value for name, value in settings.items() if value is not None}
    made: Output = output(output.Config(path=address, overwrite=overwrite, **given))
    return made


def output_kind(address: str, writer_type: str | None = None) -> str:
    """The kind of an output. Raises ConfigError for an unknown writer_type, or one that the address contradicts."""
    found = _kind(address, "output")
    if writer_type is None:
        return found
    if writer_type not in WRITER_TYPES:
        raise ConfigError(f"writer_type: {writer_type!r} is none of {', '.join(WRITER_TYPES)}")
    wanted = WRITER_TYPES[writer_type]
    is_folder = found == "parquet" and not address.endswith(".parquet")
    if wanted != found and not (wanted == "csv" and is_folder):
        raise ConfigError(f"writer_type: {writer_type} can't write to an address of {found} output")
    return wanted


def require_apart(input_path: str, splits: Sequence[Split], kind: str, output_path: str, place: str) -> None:
    """Raise ConfigError if an output of this kind would replace what is read.

    `place`: of the output, which for a folder is its URL.
    """
    if kind in ("parquet", "csv"):
        folder = unquote(place.removeprefix("file://")).rstrip("/")
        inside = [split.id.name for split in splits if split.id.name.rpartition("/")[0] == folder]
        if inside:
            raise ConfigError(f"{folder} holds {inside[0]}, which is read: write to another folder")
    elif kind == "maxcompute" and input_path.startswith(SCHEME):
        target = parse_odps_path(output_path)
        wanted = {partition_key(spec) for spec in target.partitions}
        for path in parse_odps_paths(input_path):
            read = {partition_key(spec) for spec in path.partitions}
            if path.table.key == target.table.key and (not read or not wanted or read & wanted):
                raise ConfigError(f"{output_path} is read too: write to another partition or table")


def _kind(address: str, family: str) -> str:
    """By scheme (a registered kind's name means that kind), then by what the last name ends in, else Parquet."""
    if address.startswith("kafka://"):  # brokers are separated by commas
        return _kind_of_one(address, family)
    kinds = {_kind_of_one(part.strip(), family) for part in address.split(",") if part.strip()} or {"parquet"}
    if len(kinds) > 1:
        raise ConfigError(f"{address!r} names {' and '.join(sorted(kinds))} together: name one kind at a time")
    return kinds.pop()


def _kind_of_one(address: str, family: str) -> str:
    scheme, separator, _ = address.partition("://")
    if separator:
        known = _SCHEMES.get(scheme, scheme)
        if known in registry.kinds(family):
            return known
        if scheme in _SCHEMES:
            raise ConfigError(f"{scheme}:// can't be a {family}")
    return "csv" if _CSV.search(address) else "parquet"
