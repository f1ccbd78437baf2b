"""Making, validating and refreshing read sessions. A session's row order exists only as long as the session does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tidemill import logs
from tidemill.clock import Clock
from tidemill.data.sources.maxcompute.faults import is_transient, shown
from tidemill.data.sources.maxcompute.session import INIT, NORMAL, Session, TableClient, TableColumns
from tidemill.data.sources.outage import pause_s
from tidemill.errors import DataError, DeadlineError, SourceChangedError
from tidemill.logs import log

T = TypeVar("T")

_FIRST_POLL_S, _LONGEST_POLL_S = 0.1, 2.0
_WAKE_S = 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a new session is to give."""

    partitions: Sequence[str]
    columns: Sequence[str]
    partition_columns: Sequence[str]


def describe_table(client: TableClient, table: str, deadline: float, clock: Clock) -> TableColumns:
    """The columns of a table. Raises DataError naming the table if it isn't there or may not be seen."""
    try:
        return persistently(client.columns, f"{table}: asking for its columns", deadline, clock)
    except DeadlineError:
        raise
    except Exception as error:
        raise DataError(f"{table}: the service doesn't show it: {shown(error)}") from error


def create_session(client: TableClient, name: str, wanted: Wanted, *, timeout_s: float, clock: Clock) -> Session:
    """A new session that can be read. `name`: of the split, for messages.

    Raises DataError if the service refuses it or it fails, DeadlineError if it isn't there in time.
    """
    deadline = clock.monotonic() + timeout_s

    def create() -> Session:
        return client.create(wanted.partitions, wanted.columns, wanted.partition_columns)

    try:
        session = persistently(create, f"{name}: creating a read session", deadline, clock)
        session = _settled(client, session, name, deadline, clock)
    except DeadlineError:
        raise
    except Exception as error:
        raise DataError(f"{name}: the service makes no read session: {shown(error)}") from error
    if session.status != NORMAL or session.rows is None:
        raise DataError(f"{name}: the new read session {session.id} is {session.status}, with {session.rows} rows; try again")
    return session


def validate_session(client: TableClient, name: str, session_id: str, rows: int, *, timeout_s: float, clock: Clock) -> Session:
    """A saved session, refreshed, if its unread rows can still be had.

    Raises SourceChangedError if it can't be read any more or has another number of rows, DeadlineError without an answer.
    """
    deadline = clock.monotonic() + timeout_s

    def refresh() -> Session:
        return client.describe(session_id, refresh=True)

    try:
        session = persistently(refresh, f"{name}: looking for read session {session_id}", deadline, clock)
        session = _settled(client, session, name, deadline, clock)
    except DeadlineError:
        raise
    except Exception as error:
        raise SourceChangedError(_lost(name, session_id, shown(error))) from error
    if session.status != NORMAL:
        raise SourceChangedError(_lost(name, session_id, f"it is {session.status}"))
    if session.rows != rows:
        raise SourceChangedError(_lost(name, session_id, f"it had {rows} rows, and has {session.rows}"))
    return session


def _lost(name: str, session_id: str, why: str) -> str:
    return (
        f"{name}: read session {session_id} can't go on: {why}. It has unread rows, whose order is lost with it: restart from"
        " scratch in an empty model_dir (--fine_tune_checkpoint without --continue_train keeps the weights)"
    )


def persistently(call: Callable[[], T], what: str, deadline: float, clock: Clock) -> T:
    """What the call gives, tried again after faults that can pass. Raises DeadlineError when that would take too long."""
    failures = 0
    while True:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            failures += 1
            pause = pause_s(failures)
            if clock.monotonic() + pause > deadline:
                raise DeadlineError(f"{what}: no answer in time; last: {shown(error)}") from error
            log.warning("%s: %s; trying again", what, shown(error))
            clock.sleep(pause)


def _settled(client: TableClient, session: Session, name: str, deadline: float, clock: Clock) -> Session:
    """The session once it isn't INIT any more."""
    poll = _FIRST_POLL_S
    while session.status == INIT:
        if clock.monotonic() + poll > deadline:
            raise DeadlineError(f"{name}: read session {session.id} is still being made; data_config.maxcompute.session_timeout_s")
        clock.sleep(poll)
        poll = min(2 * poll, _LONGEST_POLL_S)
        look = partial(client.describe, session.id, refresh=False)
        session = persistently(look, f"{name}: waiting for read session {session.id}", deadline, clock)
    return session


@dataclass(slots=True)
class _Held:
    name: str
    client: TableClient
    due_at: float
    good_at: float
    """When it was last known to be well; both by the monotonic clock."""
    failures: int = 0
    alarmed_at: float | None = None
    expires_at: float | None = None
    is_lost: bool = False


class SessionKeeper:
    """Refreshes the sessions that this rank reads, from the moment they are opened until `close`, on a thread of its own.

    Every rank keeps its own: a session then lives as long as any rank that needs it, whatever becomes of rank 0's thread, and a
    range that is opened hours later finds its session alive. A refresh costs one small call in ten minutes.
    A fault of any kind is tried again sooner, with growing pauses. When a session couldn't be refreshed for `alarm_after_s`, is no
    longer good, or doesn't live longer for being refreshed, that is logged as an error and as the event
    `maxcompute.session_alarm`, while hours of its day are left. It never raises: reading says what fails.
    Threading: `hold`, `start` and `close` from any thread; `tick` belongs to the thread that `start` starts.
    """

    def __init__(self, *, interval_s: float, alarm_after_s: float, clock: Clock) -> None:
        self._interval_s = interval_s
        self._alarm_after_s = alarm_after_s
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def sessions(self) -> list[str]:
        """The refresh set."""
        with self._lock:
            return list(self._held)

    def hold(self, session_id: str, name: str, client: TableClient) -> None:
        """Put a session into the refresh set; it is refreshed at once. `name`: of its split."""
        with self._lock:
            if session_id in self._held or self._closed.is_set():
                return
            now = self._clock.monotonic()
            self._held[session_id] = _Held(name, client, due_at=now, good_at=now)

    def start(self) -> None:
        """Begin to refresh. Again does nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="maxcompute-refresh", daemon=True)
                self._thread.start()

    def tick(self) -> None:
        """Refresh all that are due."""
        now = self._clock.monotonic()
        with self._lock:
            due = [(session_id, held) for session_id, held in self._held.items() if held.due_at <= now and not held.is_lost]
        for session_id, held in due:
            if self._closed.is_set():
                return
            self._refresh(session_id, held)

    def close(self) -> None:
        """Stop. The thread ends after the call it is in. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self.tick()
            self._closed.wait(_WAKE_S)

    def _refresh(self, session_id: str, held: _Held) -> None:
        started = self._clock.monotonic()
        try:
            session = held.client.describe(session_id, refresh=True)
        except Exception as error:  # noqa: BLE001 - the worker edge: whatever it is, the next try may succeed
            held.failures += 1
            now = self._clock.monotonic()
            held.due_at = now + min(self._interval_s, pause_s(held.failures))
            log.warning("%s: session %s wasn't refreshed: %s", held.name, session_id, shown(error))
            if now - held.good_at >= self._alarm_after_s:
                self._alarm(session_id, held, f"couldn't be refreshed for {now - held.good_at:.0f} s: {shown(error)}")
            return
        self._judge(session, held, started)

    def _judge(self, session: Session, held: _Held, started: float) -> None:
        """Take in an answer to a call that began at `started`, when the session's day may have begun anew."""
        held.failures = 0
        held.due_at = started + self._interval_s
        if session.status not in (NORMAL, INIT):
            held.is_lost = True
            self._alarm(session.id, held, f"is {session.status}; unread rows of it are lost")
            return
        before, held.expires_at = held.expires_at, session.expires_at
        if before is not None and session.expires_at is not None and session.expires_at <= before:
            if started - held.good_at >= self._alarm_after_s:
                left = session.expires_at - self._clock.time()
                self._alarm(session.id, held, f"is refreshed and still ends in {left:.0f} s")
            return
        held.good_at = started
        held.alarmed_at = None

    def _alarm(self, session_id: str, held: _Held, why: str) -> None:
        """At most once in `alarm_after_s`."""
        now = self._clock.monotonic()
        if held.alarmed_at is not None and now - held.alarmed_at < self._alarm_after_s:
            return
        held.alarmed_at = now
        log.error("%s: read session %s %s", held.name, session_id, why)
        logs.event("maxcompute.session_alarm", split=held.name, session=session_id, why=why, expires_at=held.expires_at)
