"""What can't be used: counted, kept where people can look at it, skipped up to a budget.

The budget is a number of messages and rows among any so many rows read in a row. Rows, not hours: a stream that catches up
with a day in ten minutes meets the day's bad messages in ten minutes, and isn't worse for that. What is counted is part of every
checkpoint, so that a job that starts again every minute has no new budget each time; what was skipped since the checkpoint is met
again by the run that goes on, and counts once.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tidemill.clock import Clock, SystemClock
from tidemill.errors import DataError, SchemaError, StorageError
from tidemill.logs import event, log

_SHOWN = 5
_MOST_REMEMBERED = 100_000
_SHOWN_REASON = 300
_TELL_EVERY_S = 60.0
_MOST_KINDS = 50
# What differs between letters of one kind: numbers and quoted values.
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message, or a row, that can't be used. `place`: names it, by topic, partition, offset and row within the message, or by
    what else the source has; None in `row` is a whole message. `column`: the one at fault, if it is one.

    `payload`: the message as it came (None: a tombstone). `values`: what a row was decoded to; None for a message.
    """

    place: Mapping[str, Any]
    reason: str
    column: str | None = None
    payload: bytes | None = None
    values: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.place.items() if value is not None)
        return f"{where}: {self.reason[:_SHOWN_REASON]}"


class DeadLetterSink(ABC):
    """Where dead letters are kept. `keep` is used by one thread at a time, `close` by any."""

    where: str
    """for people: what to look at"""

    @abstractmethod
    def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Return when they are safe. Raises StorageError or DeadlineError if they can't be kept."""

    def close(self) -> None:
        """Let a `keep` that waits fail. Idempotent."""
        return


class DeadLetters:
    """Takes what can't be used, from any thread.

    `max_poison` of the last `window` rows may be; one more is an error. Without a `sink` they are counted and reported only.
    A message or row that comes again (in another pass) is neither counted nor kept again. The log has one warning a minute for
    each kind. `cadence.Stateful`: what counts against the budget.
    """

    def __init__(self, *, max_poison: int, window: int, sink: DeadLetterSink | None = None, clock: Clock | None = None) -> None:
        self._max_poison = max_poison
        self._window = window
        self._sink = sink
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        # Held for moments only, unlike the other one, so that a checkpoint doesn't wait for a sink.
        self._books = threading.Lock()
        self._read = 0
        self._recent: deque[tuple[int, DeadLetter]] = deque()
        self._seen: set[tuple[Any, ...]] = set()
        self._carried: set[tuple[Any, ...]] = set()
        self._told: dict[str, _Told] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """How many there have been in this process."""
        return self._count

    def passed(self, rows: int) -> None:
        """So many rows were read, good and bad."""
        with self._books:
            self._read += rows

    def add(self, letters: Sequence[DeadLetter]) -> None:
        """Count, keep and report letters. Raises DataError that names the first of them if there are too many (SchemaError if
        they all are for the same column), and what the sink raises."""
        with self._lock:
            new = [letter for letter in letters if self._is_new(letter)]
            if not new:
                return
            if self._sink is not None:
                self._sink.keep(new)
            with self._books:
                self._count += len(new)
                self._recent.extend((self._read, letter) for letter in new if _key(letter) not in self._carried)
            for letter in new:
                self._tell(letter)
                event("source.poison", **letter.place, why=letter.reason, column=letter.column)
            with self._books:
                self._check()

    def close(self) -> None:
        """Nothing more is to be kept: whoever waits for that gives up. Idempotent."""
        if self._sink is not None:
            self._sink.close()
        for kind, told in list(self._told.items()):
            if told.untold:
                log.warning("skipped, can't be used: %d more like: %s", told.untold, told.first)
                del self._told[kind]

    def state(self) -> dict[str, Any]:
        """What counts against the budget: how many rows ago each was, where, and of the first ones why."""
        with self._books:
            recent, read = list(self._recent), self._read
        return {
            "recent": [
                [read - at, dict(letter.place), letter.reason[:_SHOWN_REASON] if number < _SHOWN else "", letter.column]
                for number, (at, letter) in enumerate(recent)
            ]
        }

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Go on with what counted before, of some ranks together. Those that are met again are kept again, but count once."""
        entries = sorted((entry for state in states for entry in state["recent"]), key=lambda entry: -entry[0])
        with self._books:
            self._recent = deque((self._read - ago, DeadLetter(place, why, column)) for ago, place, why, column in entries)
            self._carried = {_key(letter) for _, letter in self._recent}

    def _tell(self, letter: DeadLetter) -> None:
        """Warn of the first of a kind, and once a minute of how many more there were."""
        kind = f"{letter.column}: {_PARTICULARS.sub('', letter.reason[:_SHOWN_REASON])}"
        kind = kind if kind in self._told or len(self._told) < _MOST_KINDS else ""
        now, told = self._clock.monotonic(), self._told.get(kind)
        if told is not None and now - told.at < _TELL_EVERY_S:
            told.untold += 1
            return
        more = f" (and {told.untold} more like the one before)" if told is not None and told.untold else ""
        log.warning("skipped, can't be used: %s%s", letter, more)
        self._told[kind] = _Told(now, str(letter))

    def _is_new(self, letter: DeadLetter) -> bool:
        key = _key(letter)
        if key in self._seen:
            return False
        if len(self._seen) < _MOST_REMEMBERED:
            self._seen.add(key)
        return True

    def _check(self) -> None:
        """Called with the books held."""
        while self._recent and self._recent[0][0] <= self._read - self._window:
            self._recent.popleft()
        if len(self._recent) <= self._max_poison:
            return
        first = [letter for _, letter in list(self._recent)[:_SHOWN]]
        columns = {letter.column for _, letter in self._recent}
        rows = min(max(self._read, self._read - self._recent[0][0]), self._window)
        kept = f"; they are in {self._sink.where}" if self._sink is not None else ""
        error = SchemaError if len(columns) == 1 and None not in columns else DataError
        raise error(
            f"{len(self._recent)} messages or rows among the last {rows:,} can't be used, and max_poison "
            f"allows {self._max_poison}; the first: {'; '.join(map(str, first))}{kept}"
        )


@dataclass(slots=True)
class _Told:
    """When there was a warning of a kind of letters, its first one, and how many came since that nothing was said of."""

    at: float
    first: str
    untold: int = 0


def _key(letter: DeadLetter) -> tuple[Any, ...]:
    return tuple(letter.place.values())


class DeadLetterFile(DeadLetterSink):
    """One JSON object a line, appended; nothing is made before the first. See docs/howto/dead_letters.md for the fields.

    `max_bytes`: what would make the file longer isn't kept, which is said once. `max_payload_bytes`: longer payloads are cut,
    longer rows left out.
    """

    def __init__(self, path: Path, *, max_bytes: int, max_payload_bytes: int, clock: Clock | None = None) -> None:
        self.where = str(path)
        self._path = path
        self._max_bytes = max_bytes
        self._max_payload_bytes = max_payload_bytes
        self._clock = clock or SystemClock()
        self._is_full = False

    def keep(self, letters: Sequence[DeadLetter]) -> None:
        lines = [self._line(letter) for letter in letters]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                room = self._max_bytes - file.tell()
                fitting = [line for line, end in zip(lines, _ends(lines), strict=True) if end <= room]
                # One call, so that a killed process leaves whole lines, but perhaps for the last.
                kept = b"".join(fitting)
                if file.write(kept) < len(kept):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StorageError(f"dead letters can't be kept in {self._path}: {error}") from None
        if len(fitting) < len(lines) and not self._is_full:
            self._is_full = True
            log.warning(
                "%s has its %d bytes (dead_letter.max_bytes); further dead letters aren't kept", self._path, self._max_bytes
            )

    def _line(self, letter: DeadLetter) -> bytes:
        line: dict[str, Any] = {"at": self._clock.time(), **letter.place, "reason": letter.reason, "column": letter.column}
        if letter.values is not None:
            values = row_json(letter.values)
            fits = len(values) <= self._max_payload_bytes
            line |= {"values": orjson.Fragment(values) if fits else None, "truncated": not fits}
        else:
            payload = letter.payload
            size = None if payload is None else len(payload)
            cut = None if payload is None else base64.b64encode(payload[: self._max_payload_bytes]).decode()
            line |= {"payload_base64": cut, "payload_bytes": size, "truncated": (size or 0) > self._max_payload_bytes}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def row_json(values: Mapping[str, Any]) -> bytes:
    """A decoded row as a JSON object; what JSON doesn't have is text."""
    return orjson.dumps(dict(values), default=str, option=orjson.OPT_NON_STR_KEYS)


def _ends(lines: Sequence[bytes]) -> list[int]:
    ends, end = [], 0
    for line in lines:
        end += len(line)
        ends.append(end)
    return ends
