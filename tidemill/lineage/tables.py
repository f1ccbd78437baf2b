"""What a table lacks, by its address: files or MaxCompute partitions, with a marker and without."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill import registry
from tidemill.clock import SystemClock
from tidemill.config.env import odps_credentials
from tidemill.config.odps_uri import SCHEME, parse_odps_paths
from tidemill.data.sources.files import FileSet, FoundFile
from tidemill.errors import ConfigError, DataError, DeadlineError, StorageError

if TYPE_CHECKING:
    from tidemill.data.sources.maxcompute.client import Connection
    from tidemill.data.writers.maxcompute.target import Target

_COMPRESSION = "LZ4_FRAME"
_TIMEOUT_S = 60.0
_CSV = re.compile(r"\.(?:csv|tsv|txt)(?:\.\w+)?$")


def missing(address: str, marker: str = "") -> str:
    """What a table still lacks; "" if it is complete.

    With a marker (a file, a pattern, or a MaxCompute table or partition) it is complete once that is there, and it isn't looked at
    itself. Without, each of its patterns must match a file, each of its partitions be there, and something be in it. A source of
    another kind (`kafka://`, say) lacks nothing. Raises ConfigError for an address that can't be meant, StorageError if a store
    can't be asked.
    """
    wanted = marker or address
    scheme, separator, _ = wanted.partition("://")
    if wanted.startswith(SCHEME):
        return _missing_partition(wanted, needs_rows=not marker)
    if separator and scheme in registry.kinds("source"):
        return ""
    return _missing_files(wanted, needs_rows=not marker)


def _missing_files(patterns: str, *, needs_rows: bool) -> str:
    files = FileSet(patterns, "file", "*")
    try:
        found = files.find()
        return f"{patterns}: {len(found)} files, but no row in them" if needs_rows and not _any_row(files, found) else ""
    except StorageError:
        raise
    except (DataError, FileNotFoundError) as error:
        return str(error)
    except OSError as error:
        raise StorageError(f"{patterns}: {error}") from error


def _any_row(files: FileSet, found: Iterable[FoundFile]) -> bool:
    return any(file.size > 0 and (_CSV.search(file.path) or _rows(files, file.path) > 0) for file in found)


def _rows(files: FileSet, path: str) -> int:
    try:
        with files.place(path).open(path) as file:
            return int(pq.read_metadata(file).num_rows)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a whole Parquet file (yet): {error}") from None


def _missing_partition(address: str, *, needs_rows: bool) -> str:
    """By the service's own figures, which cost no read session."""
    registry.resolve("source", "maxcompute")  # says what to install
    from tidemill.data.sources.maxcompute.client import Connection
    from tidemill.data.writers.maxcompute.target import Target

    try:
        paths = parse_odps_paths(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    connection = Connection(odps_credentials(), quota="", compression=_COMPRESSION)
    has_rows = False
    for path in paths:
        for spec in path.partitions or ("",):
            columns = (column.partition("=") for column in spec.split("/") if column)
            target = Target(path.table, tuple((name, value) for name, _, value in columns))
            holds = _holds_rows(target, connection)
            if holds is None:
                return f"{target} isn't there"
            has_rows |= holds
    return f"{address}: it is there, but nothing is in it" if needs_rows and not has_rows else ""


def _holds_rows(target: Target, connection: Connection) -> bool | None:
    from tidemill.data.writers.maxcompute.target import TargetClient

    client = TargetClient(
        target, connection, quota="", compression=_COMPRESSION, tunnel_endpoint="", timeout_s=_TIMEOUT_S, clock=SystemClock()
    )
    try:
        return client.holds_rows()
    except DeadlineError as error:
        raise StorageError(str(error)) from error
