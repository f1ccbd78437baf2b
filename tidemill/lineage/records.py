"""What runs and lineages write down about themselves: orchestrators read these records, not exit codes (D7)."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from tidemill.cadence import ENDINGS, StopReason
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import LineageRecord, RunKind, RunRecord, RunStatus
from tidemill.errors import CorruptError, LineageError, NotFoundError, RetiredError, StorageError, TidemillError
from tidemill.lineage.terms import require_unfenced
from tidemill.logs import event, log
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once

HEARTBEAT_S = 2.0
_FINAL_TRIES = 8
_FINAL_PAUSE_S = 0.25


def new_run_id(clock: Clock | None = None) -> str:
    """A run's name: its start in UTC and a random part, so that names sort by start ("20240102T030405678-9f1c2a")."""
    now = datetime.fromtimestamp((clock or SystemClock()).time(), UTC)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}-{secrets.token_hex(3)}"


def snapshot_digest(folder: Storage, lineage: str = "") -> str:
    """SHA-256 of a lineage's snapshot.json, by which deployments, releases and cursors name it.

    `lineage`: the lineage's folder inside the store, "" for a store rooted at it. Raises NotFoundError without a snapshot.
    """
    return hashlib.sha256(folder.read(f"{lineage}/{layout.SNAPSHOT}".lstrip("/"))).hexdigest()


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known of a run when it starts."""

    run_id: str
    kind: RunKind
    date: str | None = None
    term: int | None = None
    boundary: float | None = None
    world_size: int = 1
    resumed: tuple[int, int] | None = None
    """(term, step) of the own checkpoint that the run goes on from"""
    details: Mapping[str, Any] = field(default_factory=dict)


class RunRecorder:
    """Keeps `runs/<run>/record.json` of one run; rank 0 only.

    The constructor writes the first record (and raises StorageError if it can't: a run that nobody can see must not start);
    a thread of its own then writes what `update` told it, and the heartbeat, every `heartbeat_s`. A store that is slow or
    failing never reaches the caller of `update`. `finish` writes the final record; a run that dies before it leaves "running"
    and a heartbeat that stands still. Threading: any thread may call `update`; `finish` once.
    """

    def __init__(self, storage: Storage, start: RunStart, *, heartbeat_s: float = HEARTBEAT_S, clock: Clock | None = None) -> None:
        self._storage = storage
        self._key = record_key(start.run_id)
        self._clock = clock or SystemClock()
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._record = RunRecord(
            run_id=start.run_id,
            kind=start.kind,
            date=start.date,
            status="running",
            pid=os.getpid(),
            world_size=start.world_size,
            term=start.term,
            boundary=start.boundary,
            resumed_term=start.resumed[0] if start.resumed else None,
            resumed_step=start.resumed[1] if start.resumed else None,
            started_at=self._clock.time(),
            details=dict(start.details),
        )
        self._write()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-record", daemon=True)
        self._thread.start()

    @property
    def record(self) -> RunRecord:
        """The record as it will be written next."""
        with self._lock:
            return self._record

    def update(
        self,
        *,
        step: int | None = None,
        examples: int | None = None,
        watermark: float | None = None,
        checkpoint: str | None = None,
        sequence: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Take note of progress; what is None stays as it was, `details` are merged. Doesn't wait."""
        given = {"step": step, "examples": examples, "watermark": watermark, "checkpoint": checkpoint, "sequence": sequence}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with self._lock:
            if details:
                changes["details"] = {**self._record.details, **details}
            self._record = self._record.model_copy(update=changes)

    def finish(self, reason: StopReason, *, error: BaseException | None = None, successor: str | None = None) -> RunRecord:
        """Write the final record, as the reason's row of D7 says. Tries again for a few seconds; raises StorageError after that."""
        self._stopping.set()
        ending = ENDINGS[reason]
        status: RunStatus = ending.record  # type: ignore[assignment]
        with self._lock:
            self._record = self._record.model_copy(
                update={
                    "status": status,
                    "reason": reason.name.lower(),
                    "error": None if error is None else f"{type(error).__name__}: {error}",
                    "exit_code": _exit_code(error) if ending.exit_code is None else ending.exit_code,
                    "successor": successor,
                    "ended_at": self._clock.time(),
                }
            )
        for attempt in range(1, _FINAL_TRIES + 1):
            try:
                return self._write()
            except StorageError:
                if attempt == _FINAL_TRIES:
                    raise
                self._clock.sleep(_FINAL_PAUSE_S * attempt)
        raise AssertionError("the last try returns or raises")

    def _write(self) -> RunRecord:
        # One writer at a time, each with the newest record: a heartbeat under way can't overwrite the final record.
        with self._writing:
            with self._lock:
                self._record = self._record.model_copy(update={"heartbeat": self._record.heartbeat + 1})
                record = self._record
            self._storage.write(self._key, record.to_bytes())
            return record

    def _beat(self) -> None:
        problem: str | None = None
        while not self._stopping.wait(self._heartbeat_s):
            try:
                self._write()
                problem = None
            except (StorageError, OSError) as error:
                if problem is None:
                    log.warning("the run's record can't be written, trying again: %s", error)
                problem = str(error)


def _exit_code(error: BaseException | None) -> int:
    return error.exit_code if isinstance(error, TidemillError) else 1


def record_key(run_id: str) -> str:
    """Key of a run's record, inside the folder of its lineage or daily job."""
    return f"{layout.run(run_id)}/{layout.RECORD}"


def run_records(storage: Storage, *, prefix: str = "") -> list[RunRecord]:
    """All runs of a folder (`prefix` inside the store), oldest first; a record that can't be read is logged and left out.

    Runs that have a term are in the order of their terms: by their names, a run on a machine whose clock is behind would come
    before the one that it follows.
    """
    folder = f"{prefix}/runs/" if prefix else "runs/"
    records = []
    for info in storage.list(folder):
        if info.key.count("/") != folder.count("/") + 1 or not info.key.endswith(f"/{layout.RECORD}"):
            continue
        try:
            records.append(RunRecord.parse(storage.read(info.key), where=f"{storage.url}/{info.key}"))
        except NotFoundError:
            continue
        except CorruptError as error:
            log.warning("a run's record is left out: %s", error)
    return _in_order(records)


def _in_order(records: list[RunRecord]) -> list[RunRecord]:
    """By term; runs without one keep their places by name."""
    by_name = sorted(records, key=lambda record: record.run_id)
    with_term = [(record.term, record) for record in by_name if record.term is not None]
    by_term = iter([record for _, record in sorted(with_term, key=itemgetter(0))])
    return [record if record.term is None else next(by_term) for record in by_name]


@dataclass(frozen=True, slots=True)
class Retirement:
    """How a lineage ended: its successor's folder, by how much that trailed, and the last release."""

    successor: str | None
    lag_s: float | None
    last_sequence: int | None


def read_lineage(storage: Storage, *, prefix: str = "") -> LineageRecord | None:
    """A lineage's record; None if no stream has opened it. Raises CorruptError."""
    key = f"{prefix}/{layout.LINEAGE}" if prefix else layout.LINEAGE
    try:
        return LineageRecord.parse(storage.read(key), where=f"{storage.url}/{key}")
    except NotFoundError:
        return None


def open_lineage(storage: Storage, date: str | None, boundary: float | None) -> LineageRecord:
    """Open a lineage, or open it again: before a stream reads any checkpoint. Idempotent.

    Raises RetiredError if it has retired, LineageError if it was opened for another date or boundary (its rows would be trained
    twice, or never).
    """
    record = LineageRecord(date=date, status="open", boundary=boundary)
    if create_once(storage, layout.LINEAGE, record.to_bytes()):
        return record
    found = require_open(storage)
    if found is None or (found.date, found.boundary) != (date, boundary):
        opened = f"date {found.date}, boundary {found.boundary}" if found else "nothing readable"
        message = f"{storage.url}: this lineage was opened for {opened}, not for date {date}, boundary {boundary}"
        raise LineageError(f"{message}: keep its settings, or start a new lineage in another folder")
    return found


def require_open(storage: Storage) -> LineageRecord | None:
    """The lineage's record; None if it was never opened. Raises RetiredError that names the successor."""
    record = read_lineage(storage)
    if record is not None and record.status == "retired":
        message = f"{storage.url}: this lineage has retired in favour of {record.successor or 'a successor'} and never starts again"
        raise RetiredError(message)
    return record


def retire(storage: Storage, term: int, retirement: Retirement, *, clock: Clock | None = None) -> LineageRecord:
    """Retire a lineage for good, after its final release. Idempotent: a retired one stays as it is.

    Raises FencedError if a newer run than `term` writes the lineage: it decides by itself then.
    """
    record = read_lineage(storage) or LineageRecord(status="open")
    if record.status == "retired":
        return record
    require_unfenced(storage, term)
    retired = record.model_copy(
        update={
            "status": "retired",
            "successor": retirement.successor,
            "retired_at": (clock or SystemClock()).time(),
            "handover_lag_s": retirement.lag_s,
            "last_sequence": retirement.last_sequence,
        }
    )
    storage.write(layout.LINEAGE, retired.to_bytes())
    event("lineage.retired", successor=retirement.successor, lag_s=retirement.lag_s, last_sequence=retirement.last_sequence)
    return retired
