"""Faults that a test asks for, and the means to ask: in process, or through the control call of another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Operation(StrEnum):
    """What a request is, named after the client's method; what faults and the request log go by."""

    CREATE_READ_SESSION = "create_read_session"
    GET_READ_SESSION = "get_read_session"
    REFRESH_READ_SESSION = "refresh_read_session"
    READ_ROWS = "read_rows"
    CREATE_WRITE_SESSION = "create_write_session"
    GET_WRITE_SESSION = "get_write_session"
    WRITE_ROWS = "write_rows"
    COMMIT_WRITE_SESSION = "commit_write_session"
    TUNNEL = "tunnel"
    METADATA = "metadata"
    SQL = "sql"


Kind = Literal["status", "drop", "stall", "lose_answer", "cut", "hang", "end_early", "init", "row_count", "commit"]


class Fault(BaseModel):
    """One fault: after `skip` matching requests it strikes `times` of them. Which fields count depends on `kind`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    operation: Operation
    times: int = Field(default=1, ge=1)
    skip: int = Field(default=0, ge=0)
    status: int = 503
    code: str = "ServiceUnavailable"
    amount: int = 0
    """Bytes before a cut or a hang, batches before an early end, rows added to RecordCount."""
    seconds: float | None = None
    """Until a session is ready or a commit is settled, by the emulator's clock; None: for ever."""
    succeeds: bool = True
    """How the session's creation, or the commit, ends."""


class FaultBook:
    """The faults that are waiting for their request. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()
        self._held = threading.Event()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)

    def clear(self) -> None:
        """Forget the faults that haven't struck, and let go of the connections that are held."""
        with self._lock:
            self._waiting.clear()
            self._held.set()
            self._held = threading.Event()

    def held(self) -> threading.Event:
        """Set by the next `clear`. Ask before `take`: then no fault that was taken misses the `clear` that lets it go."""
        with self._lock:
            return self._held

    def take(self, operation: Operation, *kinds: Kind) -> Fault | None:
        """The first fault of these kinds for this operation, counted down; None without one, or if it skips this request."""
        with self._lock:
            for place, fault in enumerate(self._waiting):
                if fault.operation is not operation or fault.kind not in kinds:
                    continue
                if fault.skip:
                    self._waiting[place] = fault.model_copy(update={"skip": fault.skip - 1})
                    return None
                if fault.times > 1:
                    self._waiting[place] = fault.model_copy(update={"times": fault.times - 1})
                else:
                    del self._waiting[place]
                return fault
        return None


class Faults:
    """Ask for faults: `send` carries each to the emulator; `clear` takes back what hasn't struck, and lets go of what hangs."""

    def __init__(self, send: Callable[[Fault], None], clear: Callable[[], None]) -> None:
        self._send = send
        self.clear = clear

    def refuse(
        self, operation: Operation | str, times: int = 1, status: int = 503, code: str = "ServiceUnavailable", skip: int = 0
    ) -> None:
        """Answer with an error, and do nothing. The client itself repeats GETs that get 502, 503 or 504 (not POSTs)."""
        self._send(Fault(kind="status", operation=Operation(operation), times=times, status=status, code=code, skip=skip))

    def drop(self, operation: Operation | str, times: int = 1, skip: int = 0) -> None:
        """Close the connection without doing or answering anything."""
        self._send(Fault(kind="drop", operation=Operation(operation), times=times, skip=skip))

    def stall(self, operation: Operation | str, times: int = 1, skip: int = 0) -> None:
        """Do nothing and answer nothing; the connection stays open until `clear`, or until the client gives up."""
        self._send(Fault(kind="stall", operation=Operation(operation), times=times, skip=skip))

    def lose_answer(self, operation: Operation | str, times: int = 1, skip: int = 0) -> None:
        """Do what was asked, then close the connection without an answer."""
        self._send(Fault(kind="lose_answer", operation=Operation(operation), times=times, skip=skip))

    def cut(self, after_bytes: int, times: int = 1, skip: int = 0) -> None:
        """Close the connection in the middle of a chunk, after so many bytes of rows."""
        self._send(Fault(kind="cut", operation=Operation.READ_ROWS, amount=after_bytes, times=times, skip=skip))

    def hang(self, after_bytes: int, times: int = 1, skip: int = 0) -> None:
        """Send nothing more after so many bytes of rows; the connection stays open until `clear`."""
        self._send(Fault(kind="hang", operation=Operation.READ_ROWS, amount=after_bytes, times=times, skip=skip))

    def end_early(self, after_batches: int, times: int = 1, skip: int = 0) -> None:
        """End the body cleanly after so many batches: the client takes that for the end of the rows."""
        self._send(Fault(kind="end_early", operation=Operation.READ_ROWS, amount=after_batches, times=times, skip=skip))

    def slow_init(self, seconds: float | None = None, times: int = 1, skip: int = 0) -> None:
        """New read sessions stay INIT for `seconds` of the emulator's clock; None: for ever."""
        self._send(Fault(kind="init", operation=Operation.CREATE_READ_SESSION, seconds=seconds, times=times, skip=skip))

    def fail_init(self, seconds: float = 0.0, times: int = 1, skip: int = 0) -> None:
        """New read sessions become CRITICAL, after `seconds` of INIT."""
        operation = Operation.CREATE_READ_SESSION
        self._send(Fault(kind="init", operation=operation, seconds=seconds, succeeds=False, times=times, skip=skip))

    def wrong_row_count(self, by: int, times: int = 1, skip: int = 0) -> None:
        """New read sessions tell a RecordCount that is wrong by so many rows."""
        self._send(Fault(kind="row_count", operation=Operation.CREATE_READ_SESSION, amount=by, times=times, skip=skip))

    def slow_commit(self, seconds: float | None = None, times: int = 1, skip: int = 0) -> None:
        """Commits stay COMMITTING for `seconds` of the emulator's clock (None: for ever), nothing visible until then."""
        self._send(Fault(kind="commit", operation=Operation.COMMIT_WRITE_SESSION, seconds=seconds, times=times, skip=skip))

    def fail_commit(self, seconds: float = 0.0, times: int = 1, skip: int = 0) -> None:
        """Commits end CRITICAL, after `seconds` of COMMITTING; the old rows stay."""
        operation = Operation.COMMIT_WRITE_SESSION
        self._send(Fault(kind="commit", operation=operation, seconds=seconds, succeeds=False, times=times, skip=skip))
