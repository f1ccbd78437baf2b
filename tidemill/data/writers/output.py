"""The seam that every writer implements: rows kept where no reader sees them, then made visible all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import pyarrow as pa

from tidemill.config.base import Config
from tidemill.contracts.output import OutputManifest
from tidemill.errors import SchemaError

Json = dict[str, Any]


class OutputConfig(Config):
    """What every output takes; a kind with further settings derives its own."""

    path: str
    """Where the rows go: a folder, or the address that the kind understands."""
    overwrite: bool = False
    """Replace what is there. Without it, an output that holds rows is refused."""


class Output(ABC):
    """One rank's end of an output. Built cheaply on every rank from the same config; what to call, in this order:

        check    rank 0      before rows are written: can they be, and is the place free?
        write    every rank  its rows, in order
        begin    rank 0      once all ranks have written everything
        deliver  every rank  its rows become durable; no reader sees them yet
        commit   rank 0      once all ranks have delivered
        settle   every rank  once rank 0 has committed
        abort    every rank  at the end, whatever happened: drop what isn't committed

    Between two of them the caller makes sure that all ranks have done the former; an error anywhere means: abort everywhere. The
    answers of `begin` and `deliver` are JSON, so that they can travel between processes. Rows appear in rank order, each rank's in
    the order written. Every wait has a deadline. Threading: one call at a time, from any thread.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[OutputConfig]] = OutputConfig
    replaces: ClassVar[bool] = True
    """Whether rows that were there can be replaced; a topic only grows."""
    place: str
    """Where the rows go, for people; without secrets."""

    @abstractmethod
    def check(self, schema: pa.Schema | None) -> None:
        """Raise what would stop the commit, before anything is computed; changes nothing. `schema` None: there are no rows.

        Raises ConfigError if the output holds rows and isn't to be overwritten, SchemaError naming a column that can't be stored.
        """

    @abstractmethod
    def write(self, table: pa.Table) -> None:
        """Add rows. Raises SchemaError if their columns aren't those of the rows before."""

    def begin(self, schema: pa.Schema | None) -> Json:
        """What all ranks need to know in order to deliver. `schema`: the columns of all ranks' rows, None if there are no rows."""
        return {}

    @abstractmethod
    def deliver(self, begun: Json, rank: int) -> Json:
        """Make this rank's rows durable; the receipt that `commit` needs, with their number as `rows`. A rank may have none."""

    @abstractmethod
    def commit(self, begun: Json, receipts: Sequence[Json]) -> OutputManifest:
        """Make the rows of all receipts (in rank order) visible, in place of what was there."""

    def settle(self) -> None:
        """What only this rank can make visible."""
        return

    @abstractmethod
    def abort(self) -> None:
        """Drop all of this rank that isn't committed. Idempotent; does nothing after a commit."""


class Columns:
    """The columns of the first rows, which all later ones must have."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.schema: pa.Schema | None = None

    def conform(self, table: pa.Table) -> pa.Table:
        """The table with exactly the first table's columns. Raises SchemaError naming the column that is another."""
        if self.schema is None:
            self.schema = table.schema.remove_metadata()
        if table.column_names != self.schema.names:
            names, before = ", ".join(table.column_names), ", ".join(self.schema.names)
            raise SchemaError(f"{self._kind} output: rows with the columns {names} after rows with {before}")
        for field, wanted in zip(table.schema, self.schema, strict=True):
            if field.type != wanted.type and not pa.types.is_null(field.type):
                types = f"{field.type} after rows where it is {wanted.type}"
                raise SchemaError(f"{self._kind} output: column {field.name!r} is {types}")
        return table.cast(pa.schema([field.with_nullable(True) for field in self.schema]))
