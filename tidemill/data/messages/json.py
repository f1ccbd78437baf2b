"""JSON: one object a message, or an array of them, one a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import orjson
import polars as pl
import pyarrow as pa

from tidemill.data.messages.decoder import BAD_MESSAGE, EMPTY, Decoded, Decoder, Poison, by_halves
from tidemill.logs import event, log


class JsonDecoder(Decoder):
    """Columns that a row lacks are null, those that aren't declared are ignored, and a value of another type, or out of its
    type's range, makes the message poison (but a number is taken as text where text is declared).

    `where`: for the log. `header`: bytes in front of each message that aren't JSON (5 with a schema registry).
    """

    def __init__(self, columns: Mapping[str, pa.DataType], where: str = "messages", *, header: int = 0) -> None:
        self._schema = pa.schema(list(columns.items()))
        self._polars_schema = pl.Schema(pl.DataFrame(self._schema.empty_table()).schema)
        self._where = where
        self._header = header
        self._told: set[str] = set(columns)
        self._missed: set[str] = set()

    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        if self._header:
            messages = [message[self._header :] if message and not message[0] else message for message in messages]
        plain = self._read_plain(messages)
        if plain is not None:
            self._look(messages[0], plain)
            return Decoded(plain, np.ones(len(messages), np.int64), {})
        poison: dict[int, Poison] = {}
        lines, rows = _lines(messages, poison)
        firsts = np.concatenate([[0], np.cumsum(rows)])

        def read(start: int, stop: int) -> pa.Table:
            return self._read(lines[firsts[start] : firsts[stop]])

        def explain(index: int, error: str) -> Poison:
            return self._explain(lines[firsts[index] : firsts[index + 1]], error)

        tables = list(by_halves(read, 0, len(messages), poison, explain=explain)) if messages else []
        rows[list(poison)] = 0
        table = tables[0] if len(tables) == 1 else pa.concat_tables([*tables, self._schema.empty_table()])
        if lines:
            self._look(lines[0], table)
        return Decoded(table, rows, poison)

    def _read_plain(self, messages: Sequence[bytes | None]) -> pa.Table | None:
        """One row a message, which is nearly always so; None if it isn't, or if a message is poison."""
        if not messages or not all([message and message[:1] == b"{" for message in messages]):  # noqa: C419 - faster as a list
            return None
        try:
            return self._read(messages)  # type: ignore[arg-type]
        except BAD_MESSAGE:
            return None

    def _read(self, lines: Sequence[bytes]) -> pa.Table:
        if not lines:
            return self._schema.empty_table()
        # Each begins with a brace, so each gives at least one row or an error, whatever line breaks it holds, and equal numbers
        # mean one row each.
        frame = pl.read_ndjson(b"\n".join(lines), schema=self._polars_schema)
        if frame.height != len(lines):
            raise ValueError(f"{len(lines)} JSON objects were expected, {frame.height} found")
        return frame.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(self._schema)

    def _explain(self, lines: Sequence[bytes], error: str) -> Poison:
        """Which column of a message is at fault."""
        for name, kind in self._polars_schema.items():
            one = partial(pl.read_ndjson, b"\n".join(lines), schema={name: kind})
            try:
                one().to_arrow().cast(pa.schema([self._schema.field(name)]))
            except BAD_MESSAGE:
                if _is_json(lines):
                    return Poison(f"column {name!r} holds {_shown(lines, name)}, not {self._schema.field(name).type}", name)
        return Poison(error)

    def _look(self, line: bytes | None, table: pa.Table) -> None:
        """Say once what has changed, as far as the first row of a read shows it: all rows would cost too much to look at."""
        if not table.num_rows:
            return
        nulls = [name for name, column in zip(table.column_names, table.columns, strict=True) if column.null_count == len(column)]
        keys = orjson.loads(line) if line and _is_json([line]) else {}
        for name in keys:
            if name not in self._told and len(self._told) < 10_000:
                self._told.add(name)
                self._tell(f"{name} came")
        for name in nulls:
            if name not in keys and name not in self._missed:
                self._missed.add(name)
                self._tell(f"{name} isn't there, and is taken as null")

    def _tell(self, change: str) -> None:
        log.info("%s: %s", self._where, change)
        event("source.schema_changed", source=self._where, change=change)


def _lines(messages: Sequence[bytes | None], poison: dict[int, Poison]) -> tuple[list[bytes], np.ndarray]:
    """One line a row, and the number of lines of each message."""
    lines: list[bytes] = []
    rows = np.zeros(len(messages), np.int64)
    for index, message in enumerate(messages):
        try:
            own = _one_line_each(message)
        except ValueError as error:
            poison[index] = Poison(str(error))
            continue
        lines.extend(own)
        rows[index] = len(own)
    return lines, rows


def _one_line_each(message: bytes | None) -> list[bytes]:
    if not message or not message.strip():
        raise ValueError(EMPTY)
    value = orjson.loads(message)
    objects = value if isinstance(value, list) else [value]
    for item in objects:
        if not isinstance(item, dict):
            raise ValueError(f"it holds {type(item).__name__} where a JSON object is expected")
    return [orjson.dumps(item) for item in objects]


def _is_json(lines: Sequence[bytes]) -> bool:
    try:
        return all(isinstance(orjson.loads(line), dict) for line in lines)
    except ValueError:
        return False


def _shown(lines: Sequence[bytes], name: str) -> str:
    text = repr([orjson.loads(line).get(name) for line in lines][0 if len(lines) == 1 else slice(None)])
    return text if len(text) <= 120 else text[:117] + "..."
