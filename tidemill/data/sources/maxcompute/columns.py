"""Which of a table's columns are read, and whether their types can be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.data.sources.maxcompute.session import TableColumns
from tidemill.errors import SchemaError

_SIMPLE = (
    r"(tinyint|smallint|int|bigint|float|double|boolean|string|binary|date|datetime|timestamp|timestamp_ntz"
    r"|(varchar|char)\(\d+\)|decimal(\(\d+(,\s*\d+)?\))?)"
)
_SUPPORTED = re.compile(rf"{_SIMPLE}|array<\s*({_SIMPLE}|array<\s*{_SIMPLE}\s*>)\s*>|map<\s*{_SIMPLE}\s*,\s*{_SIMPLE}\s*>")


@dataclass(frozen=True, slots=True)
class Projection:
    """What a session is asked for. `types`: name -> MaxCompute's type, in the order in which rows are given."""

    data: tuple[str, ...]
    partition: tuple[str, ...]
    types: dict[str, str]


def project(table: str, columns: TableColumns, wanted: Sequence[str] | None) -> Projection:
    """The wanted columns of a table; None: all. Raises SchemaError naming a column that isn't there, or can't be read."""
    known = {**columns.data, **columns.partition}
    names = list(known) if wanted is None else list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SchemaError(f"{table}: no column {name!r}{hint} It has {', '.join(known)}".replace("?. It", "? It"))
        if not _SUPPORTED.fullmatch(known[name].lower()):
            raise SchemaError(f"{table}: column {name!r} is of type {known[name]}, which can't be read; leave it out")
    return Projection(
        tuple(name for name in names if name in columns.data),
        tuple(name for name in names if name in columns.partition),
        {name: known[name].lower() for name in names},
    )


def require_agreement(table: str, types: dict[str, str], first_table: str, first: dict[str, str]) -> None:
    """Raises SchemaError naming a column whose type differs between tables."""
    for name, kind in types.items():
        if first.get(name, kind) != kind:
            raise SchemaError(f"{table}: column {name!r} is {kind}, but {first[name]} in {first_table}; all tables must agree")
