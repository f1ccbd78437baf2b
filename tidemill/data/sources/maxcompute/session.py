"""What the service says of a read session, and what it says of a table. Values only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

NORMAL = "NORMAL"
INIT = "INIT"


@dataclass(frozen=True, slots=True)
class Session:
    """A read session as the service last described it. `rows`: how many it has, None while it is being made.

    `expires_at`: Unix seconds by the service's clock, None if it doesn't say.
    """

    id: str
    status: str
    rows: int | None
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Name -> type as MaxCompute writes it ("bigint", "array<string>")."""

    data: dict[str, str]
    partition: dict[str, str]


class TableClient(Protocol):
    """The calls on one table that reading takes. Errors come as the client raises them; `faults.is_transient` tells them apart."""

    def columns(self) -> TableColumns:
        """The table's columns."""
        ...

    def create(self, partitions: Sequence[str], columns: Sequence[str], partition_columns: Sequence[str]) -> Session:
        """A new session over the partitions, in that order; none: over all."""
        ...

    def describe(self, session_id: str, *, refresh: bool) -> Session:
        """The session as it stands; `refresh`: its day begins anew."""
        ...

    def read(self, session_id: str, start: int, count: int) -> Generator[pa.RecordBatch, None, None]:
        """Rows [start, start + count) of a session. It may end early without an error: count what comes."""
        ...
