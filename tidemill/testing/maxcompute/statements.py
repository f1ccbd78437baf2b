"""The statements that the client writes for create_table, create_partition and their kin, carried out."""

from __future__ import annotations

import re
from collections.abc import Callable

from tidemill.clock import Clock
from tidemill.testing.maxcompute.documents import Column, TableDocument, TableName
from tidemill.testing.maxcompute.replies import ApiError
from tidemill.testing.maxcompute.tables import Tables
from tidemill.testing.maxcompute.types import split_outside_brackets

_NAME = r"(?P<name>[\w.`]+)"
_CREATE = re.compile(
    rf"CREATE\s+TABLE\s+(?P<exists>IF\s+NOT\s+EXISTS\s+)?{_NAME}\s*\((?P<columns>.*?)\n?\)\s*"
    r"(?:COMMENT\s+'(?P<comment>(?:[^'\\]|\\.)*)'\s*)?"
    r"(?:PARTITIONED\s+BY\s*\((?P<partitions>.*?)\n?\)\s*)?"
    r"(?:LIFECYCLE\s+(?P<lifecycle>\d+)\s*)?",
    re.IGNORECASE | re.DOTALL,
)
_DROP = re.compile(rf"DROP\s+TABLE\s+(?P<exists>IF\s+EXISTS\s+)?{_NAME}", re.IGNORECASE)
_ADD_PARTITION = re.compile(
    rf"ALTER\s+TABLE\s+{_NAME}\s+ADD\s+(?P<exists>IF\s+NOT\s+EXISTS\s+)?PARTITION\s*\((?P<spec>[^)]*)\)", re.IGNORECASE
)
_DROP_PARTITION = re.compile(
    rf"ALTER\s+TABLE\s+{_NAME}\s+DROP\s+(?P<exists>IF\s+EXISTS\s+)?PARTITION\s*\((?P<spec>[^)]*)\)", re.IGNORECASE
)
_COLUMN = re.compile(
    r"`?(?P<name>\w+)`?\s+(?P<type>.+?)(?P<needed>\s+NOT\s+NULL)?(?:\s+COMMENT\s+'(?P<comment>(?:[^'\\]|\\.)*)')?",
    re.IGNORECASE | re.DOTALL,
)


class Statements:
    """Carries statements out. Thread-safe. Raises ApiError."""

    def __init__(self, tables: Tables, clock: Clock) -> None:
        self._tables = tables
        self._clock = clock
        self._kinds: tuple[tuple[re.Pattern[str], Callable[[TableName, re.Match[str]], None]], ...] = (
            (_CREATE, self._create),
            (_DROP, self._drop),
            (_ADD_PARTITION, self._add_partition),
            (_DROP_PARTITION, self._drop_partition),
        )

    def run(self, text: str, project: str, schema: str) -> None:
        """Carry out one statement; names without a project or schema are in these."""
        text = text.strip().rstrip(";").strip()
        for pattern, action in self._kinds:
            match = pattern.fullmatch(text)
            if match is not None:
                return action(_table_name(match["name"], project, schema), match)
        raise ApiError(400, "ODPS-0130161", f"Parse exception - the emulator doesn't run this statement: {text:.200}")

    def _create(self, name: TableName, match: re.Match[str]) -> None:
        now = self._clock.time()
        document = TableDocument(
            columns=_columns(match["columns"]),
            partition_columns=_columns(match["partitions"] or ""),
            lifecycle=int(match["lifecycle"]) if match["lifecycle"] else None,
            comment=_unescaped(match["comment"]),
            created_at=now,
            modified_at=now,
        )
        self._tables.create(name, document, if_not_exists=bool(match["exists"]))

    def _drop(self, name: TableName, match: re.Match[str]) -> None:
        if match["exists"] and name not in self._tables.names():
            return
        self._tables.drop(name)

    def _add_partition(self, name: TableName, match: re.Match[str]) -> None:
        self._tables.add_partition(name, match["spec"], if_not_exists=bool(match["exists"]))

    def _drop_partition(self, name: TableName, match: re.Match[str]) -> None:
        self._tables.drop_partition(name, match["spec"], if_exists=bool(match["exists"]))


def _table_name(text: str, project: str, schema: str) -> TableName:
    match text.replace("`", "").split("."):
        case [table]:
            return TableName(project=project, schema_name=schema, table=table)
        case [project, table]:
            return TableName(project=project, schema_name=schema, table=table)
        case [project, schema, table]:
            return TableName(project=project, schema_name=schema, table=table)
    raise ApiError(400, "ODPS-0130161", f"Parse exception - not a table name: {text}")


def _columns(text: str) -> tuple[Column, ...]:
    columns = []
    for part in split_outside_brackets(text):
        match = _COLUMN.fullmatch(part.strip())
        if match is None:
            raise ApiError(400, "ODPS-0130161", f"Parse exception - not a column: {part}")
        columns.append(
            Column(
                name=match["name"], type=match["type"].lower(), comment=_unescaped(match["comment"]), nullable=not match["needed"]
            )
        )
    return tuple(columns)


def _unescaped(text: str | None) -> str:
    """What stands between quotes, its escapes undone; "" without quotes."""
    return re.sub(r"\\(.)", r"\1", text or "", flags=re.DOTALL)
