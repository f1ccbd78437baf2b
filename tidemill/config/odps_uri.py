"""tzrec's `odps://project/tables/[schema.]table/pt=a/hr=1&pt=b` addresses, several separated by commas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FORM = "odps://project/tables/[schema.]table/pt=a/hr=1&pt=b"
SCHEME = "odps://"


@dataclass(frozen=True, slots=True)
class OdpsTable:
    """A table. `schema` None: the project's default one."""

    project: str
    schema: str | None
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.project, self.schema, self.name)))

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same table, however it is worded: case doesn't count, and the default schema may be named."""
        return self.project.lower(), (self.schema or "default").lower(), self.name.lower()


@dataclass(frozen=True, slots=True)
class OdpsPath:
    """One address. `text`: as written; `partitions`: specs as written, in their order ("pt=a/hr=1"), none: the whole table."""

    text: str
    table: OdpsTable
    partitions: tuple[str, ...]


def parse_odps_paths(text: str | Iterable[str]) -> tuple[OdpsPath, ...]:
    """The addresses in a text, in its order. Raises ValueError that says what is wrong with which, also if rows are named twice."""
    texts = [text] if isinstance(text, str) else text
    parts = [part.strip() for piece in texts for part in piece.split(",")]
    paths = tuple(parse_odps_path(part) for part in parts if part)
    if not paths:
        raise ValueError(f"names no table; write {FORM}")
    _require_once(paths)
    return paths


def parse_odps_path(text: str) -> OdpsPath:
    """One address. Raises ValueError."""
    if "#" in text:
        raise ValueError(f"{text!r} holds a '#', which separates the parts of a position's key")
    pieces = text.removeprefix(SCHEME).rstrip("/").split("/", 3) if text.startswith(SCHEME) else []
    if len(pieces) < 3 or pieces[1] != "tables" or not pieces[0] or not pieces[2]:
        raise ValueError(f"{text!r} isn't of the form {FORM}")
    schema, dot, name = pieces[2].rpartition(".")
    if not name or (dot and not schema) or "." in schema:
        raise ValueError(f"{text!r}: {pieces[2]!r} isn't a table, or schema.table")
    partitions = tuple(_partition(text, spec) for spec in pieces[3].split("&")) if len(pieces) == 4 else ()
    return OdpsPath(text, OdpsTable(pieces[0], schema or None, name), partitions)


def _partition(text: str, spec: str) -> str:
    columns = [column.partition("=") for column in spec.strip("/").split("/")]
    if any(not name or not equals or not value for name, equals, value in columns):
        raise ValueError(f"{text!r}: {spec!r} isn't a partition; write name=value, and / between the columns of one")
    if any(quote in spec for quote in "'\""):
        raise ValueError(f"{text!r}: write partition {spec!r} without quotes")
    return "/".join(f"{name}={value}" for name, _, value in columns)


def partition_key(spec: str) -> str:
    """The same text for the same partition, in whatever order and case its columns are written."""
    columns = (column.partition("=") for column in spec.split("/"))
    return "/".join(sorted(f"{name.lower()}={value}" for name, _, value in columns))


def _require_once(paths: Iterable[OdpsPath]) -> None:
    seen: dict[tuple[str, str, str], set[str]] = {}
    for path in paths:
        before = seen.setdefault(path.table.key, set())
        keys = [partition_key(spec) for spec in path.partitions] or [""]
        for key in keys:
            if key in before or (before and "" in (key, *before)):
                what = f"partition {key}" if key else "the whole table"
                raise ValueError(f"{path.text!r}: {what} of {path.table} would be read twice; name each once")
            before.add(key)
