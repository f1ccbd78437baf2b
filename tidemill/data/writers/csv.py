"""A folder of CSV parts that appears as a whole: plain, gzip or zstd by the path's ending."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.csv

from tidemill.clock import Clock
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.folder import PART_BYTES, Folder
from tidemill.data.writers.output import Json, Output, OutputConfig
from tidemill.errors import ConfigError, SchemaError
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

_PATTERN = re.compile(r"^(?P<folder>.*?)(?:/\*\.(?P<suffix>csv(?:\.gz|\.zst)?))?/?$")
_COMPRESSION = {"csv.gz": "gzip", "csv.zst": "zstd"}


class CsvOutputConfig(OutputConfig):
    """CSV files."""

    header: bool = True
    """Begin each part with the names of the columns."""
    delimiter: str = ","
    """What stands between two columns: one character."""


class CsvOutput(Output):
    """Parts named `part-<number>.csv`, committed with `_SUCCESS`, written last.

    `path`: a folder, FOLDER/*.csv, FOLDER/*.csv.gz or FOLDER/*.csv.zst. A null is an empty field, an empty text is `""`.
    """

    kind = "csv"
    Config = CsvOutputConfig

    def __init__(
        self, config: CsvOutputConfig, storage: Storage | None = None, *, part_bytes: int = PART_BYTES, clock: Clock | None = None
    ) -> None:
        if len(config.delimiter) != 1 or not config.delimiter.isascii():
            raise ConfigError(f"CSV output: the delimiter must be one ASCII character, got {config.delimiter!r}")
        self._config = config
        folder, suffix = _parse(config.path)
        self._compression = _COMPRESSION.get(suffix)
        storage = storage or open_storage(folder)
        self.place = storage.url
        self._folder = Folder(
            storage, self.kind, suffix, self._encode, overwrite=config.overwrite, part_bytes=part_bytes, clock=clock
        )

    def check(self, schema: pa.Schema | None) -> None:
        for field in schema or ():
            if pa.types.is_nested(field.type) or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
                raise SchemaError(f"CSV output: column {field.name!r} is {field.type}, which CSV can't hold; write Parquet")
        self._folder.check_free()

    def write(self, table: pa.Table) -> None:
        self._folder.write(table)

    def deliver(self, begun: Json, rank: int) -> Json:
        return self._folder.deliver()

    def commit(self, begun: Json, receipts: Sequence[Json]) -> OutputManifest:
        return self._folder.commit(receipts)

    def abort(self) -> None:
        self._folder.abort()

    def _encode(self, table: pa.Table) -> pa.Buffer:
        options = pa.csv.WriteOptions(include_header=self._config.header, delimiter=self._config.delimiter)
        sink = pa.BufferOutputStream()
        if self._compression is None:
            pa.csv.write_csv(table, sink, options)
        else:
            with pa.CompressedOutputStream(sink, self._compression) as compressed:
                pa.csv.write_csv(table, compressed, options)
        return sink.getvalue()


def _parse(path: str) -> tuple[str, str]:
    """(folder, how names end) of a path."""
    match = _PATTERN.match(path)
    assert match is not None  # every text matches
    folder = match["folder"]
    if folder.endswith((".csv", ".csv.gz", ".csv.zst")) or "*" in folder:
        raise ConfigError(f"{path!r}: CSV is written in parts: name a folder, or FOLDER/*.csv, FOLDER/*.csv.gz, FOLDER/*.csv.zst")
    return folder or ("/" if path.startswith("/") else "."), match["suffix"] or "csv"
