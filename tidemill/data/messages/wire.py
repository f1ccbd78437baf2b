"""Rows of one message each, in one of several schemas: by a registry's number in front of each message, or all in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.data.messages.columns import Fitting
from tidemill.data.messages.decoder import EMPTY, ColumnError, Decoded, Decoder, Poison, by_halves
from tidemill.data.messages.registry import HEADER_BYTES


class RowFormat(ABC):
    """Reads messages that were written with one schema, one row a message."""

    schema: pa.Schema
    """of the columns that `read` gives"""

    @abstractmethod
    def read(self, payloads: Sequence[bytes]) -> pa.Table:
        """As many rows as payloads, in their order. Raises one of BAD_MESSAGE if any of them can't be read."""

    def explain(self, payload: bytes, error: str) -> str:
        """Why a payload that can't be read can't be."""
        return error


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """A schema whose messages all can't be read."""

    poison: Poison


class RowDecoder(Decoder):
    """Messages of one row each.

    `local`: the format of all messages, if they carry no number; else `registered` makes one of a message's header, None if the
    registry has no such schema. `header`: where a message's header ends; raises ValueError for one that has none.
    """

    def __init__(
        self,
        fitting: Fitting,
        *,
        local: RowFormat | None = None,
        registered: Callable[[bytes], RowFormat | None] | None = None,
        header: Callable[[bytes], int] = lambda message: HEADER_BYTES,
    ) -> None:
        self._fitting = fitting
        self._local = local
        self._registered = registered
        self._header = header
        self._formats: dict[bytes, RowFormat | _Unreadable] = {}

    def decode(self, messages: Sequence[bytes | None]) -> Decoded:
        poison: dict[int, Poison] = {}
        rows = np.zeros(len(messages), np.int64)
        parts: list[tuple[np.ndarray, pa.Table]] = []
        for head, indices in self._by_header(messages, poison).items():
            format_ = self._format(head)
            if isinstance(format_, _Unreadable):
                poison |= dict.fromkeys(indices, format_.poison)
                continue
            skip = len(head)
            payloads = [messages[index][skip:] for index in indices] if skip else [messages[index] for index in indices]  # type: ignore[index]
            good, table = self._read(format_, payloads, indices, poison)  # type: ignore[arg-type]
            rows[good] = 1
            parts.append((good, table))
        return Decoded(self._in_order(parts), rows, poison)

    def _by_header(self, messages: Sequence[bytes | None], poison: dict[int, Poison]) -> dict[bytes, list[int]]:
        """Header -> the messages that have it."""
        groups: dict[bytes, list[int]] = {}
        if self._local is not None and all(messages):
            return {b"": list(range(len(messages)))} if messages else {}
        for index, message in enumerate(messages):
            if not message:
                poison[index] = Poison(EMPTY)
                continue
            try:
                head = b"" if self._local is not None else message[: self._header(message)]
            except ValueError as error:
                poison[index] = Poison(str(error))
                continue
            groups.setdefault(head, []).append(index)
        return groups

    def _format(self, head: bytes) -> RowFormat | _Unreadable:
        if head not in self._formats:
            try:
                format_ = self._local or (self._registered and self._registered(head))
                if format_ is None:
                    return _Unreadable(Poison(f"the registry has no schema {schema_number(head)}"))
                self._fitting.check(format_.schema)
                self._formats[head] = format_
            except ColumnError as error:
                self._formats[head] = _Unreadable(error.poison)
            except ValueError as error:
                self._formats[head] = _Unreadable(Poison(f"its schema can't be read: {error}"))
        return self._formats[head]

    def _read(
        self, format_: RowFormat, payloads: list[bytes], indices: list[int], poison: dict[int, Poison]
    ) -> tuple[np.ndarray, pa.Table]:
        """(which messages gave a row, their rows)"""
        bad: dict[int, Poison] = {}

        def read(start: int, stop: int) -> pa.Table:
            table = format_.read(payloads[start:stop])
            if table.num_rows != stop - start:
                raise ValueError(f"{stop - start} rows were expected, {table.num_rows} found")
            return self._fitting.fit(table)

        def explain(index: int, error: str) -> Poison:
            return Poison(format_.explain(payloads[index], error))

        tables = list(by_halves(read, 0, len(payloads), bad, explain=explain))
        poison |= {indices[index]: why for index, why in bad.items()}
        good = np.delete(np.asarray(indices, np.int64), list(bad))
        return good, pa.concat_tables(tables) if tables else self._fitting.empty()

    def _in_order(self, parts: list[tuple[np.ndarray, pa.Table]]) -> pa.Table:
        if len(parts) <= 1:
            return parts[0][1] if parts else self._fitting.empty()
        table = pa.concat_tables([table for _, table in parts])
        return table.take(np.argsort(np.concatenate([good for good, _ in parts]), kind="stable"))


def registry_header(message: bytes) -> int:
    """Where the header ends that serializers of a registry's clients write. Raises ValueError if there is none."""
    if len(message) < HEADER_BYTES or message[0] != 0:
        raise ValueError("it doesn't begin with a registry's header (a zero byte and the schema's number)")
    return HEADER_BYTES


def schema_number(head: bytes) -> int:
    return int.from_bytes(head[1:HEADER_BYTES], "big")
