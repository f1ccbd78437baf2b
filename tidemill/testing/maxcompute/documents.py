"""What the emulator keeps on disk beside Parquet files: one table document, one document a session."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from tidemill.testing.maxcompute.replies import invalid_argument
from tidemill.testing.maxcompute.types import DEFAULT_UNITS, TimeUnits, arrow_type

_VALUE = re.compile(r"[^/=,'\"\x00-\x1f]+")


class Document(BaseModel):
    """A frozen document."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableName(Document):
    """A table's full name. Its text is `project.schema.table`."""

    project: str
    schema_name: str = "default"
    table: str

    def __str__(self) -> str:
        return f"{self.project}.{self.schema_name}.{self.table}"


class Column(Document):
    """A column as the service describes it; `type` is MaxCompute's text."""

    name: str
    type: str
    comment: str = ""
    nullable: bool = True


class DataFile(Document):
    """One immutable Parquet file: its path below the table's folder, rows and bytes on disk."""

    path: str
    rows: int
    bytes: int


class PartitionDocument(Document):
    """One partition's files, in the order of its rows. Times are Unix seconds."""

    files: tuple[DataFile, ...] = ()
    created_at: float
    modified_at: float

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class TableDocument(Document):
    """All that is known of a table. Replacing it as a whole is what makes a change visible.

    `partitions` maps a spec (`pt=a/hr=1`; "" in a table without partition columns) to its files. `replaced` are files that no
    partition holds any more, kept for read sessions that were created before.
    """

    columns: tuple[Column, ...]
    partition_columns: tuple[Column, ...] = ()
    lifecycle: int | None = None
    comment: str = ""
    buckets: int | None = None
    created_at: float
    modified_at: float
    partitions: dict[str, PartitionDocument] = {}
    replaced: tuple[str, ...] = ()


def normal_spec(text: str, partition_columns: Sequence[Column]) -> str:
    """A partition spec in the form `pt=a/hr=1`, from that form or the client's (`pt='a',hr='1'`).

    Raises ApiError unless it gives each partition column one value, in the table's order.
    """
    pairs = spec_pairs(text)
    names = [column.name for column in partition_columns]
    if [name for name, _ in pairs] != names:
        raise invalid_argument(f"partition spec {text!r} must give a value to each of {names}, in this order")
    return "/".join(f"{name}={value}" for name, value in pairs)


def spec_pairs(text: str) -> list[tuple[str, str]]:
    """The names and values of a partition spec in either form; of part of one, too. Raises ApiError if it is malformed."""
    pairs = []
    for part in re.split(r"[/,]", text) if text.strip() else []:
        name, equals, value = part.partition("=")
        value = value.strip().strip("'\"")
        if not equals or not _VALUE.fullmatch(value):
            raise invalid_argument(f"malformed partition spec {text!r}")
        pairs.append((name.strip(), value))
    return pairs


def arrow_schema(columns: Sequence[Column], units: TimeUnits = DEFAULT_UNITS) -> pa.Schema:
    return pa.schema([(column.name, arrow_type(column.type, units)) for column in columns])
