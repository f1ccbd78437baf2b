"""Which handler answers which request, and what becomes of it when a fault strikes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from tidemill.clock import Clock
from tidemill.testing.maxcompute.exchange import Exchange, LoggedRequest
from tidemill.testing.maxcompute.faults import Fault, FaultBook, Operation
from tidemill.testing.maxcompute.instances import Instances
from tidemill.testing.maxcompute.metadata import Metadata
from tidemill.testing.maxcompute.read_sessions import ReadSessions
from tidemill.testing.maxcompute.replies import ApiError, Reply, error_reply, invalid_argument, json_reply, no_such_object
from tidemill.testing.maxcompute.statements import Statements
from tidemill.testing.maxcompute.storage_api import StorageApi
from tidemill.testing.maxcompute.tables import Tables
from tidemill.testing.maxcompute.write_sessions import WriteSessions

SESSION_LIFETIME_S = 24 * 3600.0
CONTROL = "/_emulator"
_TABLE = r"/api/storage/v1/projects/(?P<project>[^/]+)/schemas/(?P<schema>[^/]+)/tables/(?P<table>[^/]+)"
_PROJECT = r"/projects/(?P<project>[^/]+)"
# Requests that tests can look into; a long-running emulator forgets the oldest.
_LOGGED = 10_000


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request: a method, a pattern of the path, query keys that must be there, and who answers."""

    operation: Operation
    method: str
    path: re.Pattern[str]
    query: Mapping[str, str]
    answer: Callable[[Exchange], Reply]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the server does: send the reply, or close the connection (None) at once, or in the midst of it (`fault`).

    A fault that hangs ends when `held` is set.
    """

    reply: Reply | None
    fault: Fault | None = None
    held: threading.Event | None = None


class Service:
    """The emulator without its sockets. Thread-safe."""

    def __init__(self, folder: Path, clock: Clock, session_lifetime_s: float = SESSION_LIFETIME_S, page: int = 1000) -> None:
        state = folder / ".emulator"
        self.clock = clock
        self.faults = FaultBook()
        self.tables = Tables(folder, clock)
        self.reads = ReadSessions(state / "read_sessions", self.tables, clock, session_lifetime_s)
        self.writes = WriteSessions(state / "write_sessions", self.tables, clock, session_lifetime_s)
        self.adopted = self.tables.adopt()
        self.tables.sweep(self.reads.files_in_use())
        storage = StorageApi(self.reads, self.writes, self.faults)
        metadata = Metadata(self.tables, page)
        self._routes = _routes(storage, metadata, Instances(Statements(self.tables, clock), clock))
        self._log: deque[LoggedRequest] = deque(maxlen=_LOGGED)
        self._log_lock = threading.Lock()

    def requests(self, operation: Operation | None = None) -> list[LoggedRequest]:
        """The newest requests, oldest first; of one operation only, if it is given."""
        with self._log_lock:
            return [request for request in self._log if operation in (None, request.operation)]

    def handle(self, exchange: Exchange) -> Outcome:
        """Answer one request. Nothing is raised."""
        try:
            route, exchange = self._route(exchange)
        except ApiError as error:
            return Outcome(error_reply(error))
        outcome = self._answer(route, exchange)
        self._record(route.operation, exchange, outcome.reply.status if outcome.reply else 0)
        return outcome

    def _route(self, exchange: Exchange) -> tuple[Route, Exchange]:
        for route in self._routes:
            match = route.path.fullmatch(exchange.path)
            wanted = all(exchange.query.get(key) == value for key, value in route.query.items())
            if match is not None and route.method == exchange.method and wanted:
                return route, replace(exchange, parts={key: part for key, part in match.groupdict().items() if part is not None})
        raise no_such_object(f"{exchange.method} {exchange.path}")

    def _answer(self, route: Route, exchange: Exchange) -> Outcome:
        held = self.faults.held()
        fault = self.faults.take(route.operation, "status", "drop", "stall", "lose_answer")
        if fault is not None and fault.kind == "stall":
            held.wait()
        if fault is not None and fault.kind in ("drop", "stall"):
            return Outcome(None)
        try:
            if fault is not None and fault.kind == "status":
                raise ApiError(fault.status, fault.code, "a fault that was asked for")
            self.writes.settle()
            _check_digest(exchange)
            reply = route.answer(exchange)
        except ApiError as error:
            return Outcome(error_reply(error))
        if fault is not None:
            return Outcome(None)
        return Outcome(reply, self.faults.take(route.operation, "cut", "hang", "end_early"), held)

    def _record(self, operation: Operation, exchange: Exchange, status: int) -> None:
        text = exchange.body.decode() if exchange.headers.get("content-type", "").endswith(("json", "xml")) else ""
        logged = LoggedRequest(
            operation=operation,
            method=exchange.method,
            path=exchange.path,
            query=dict(exchange.query),
            body=text,
            status=status,
            at=self.clock.time(),
        )
        with self._log_lock:
            self._log.append(logged)


class Control:
    """The control call: faults, the clock, sessions' ends and the request log, for tests in other processes.

    POST /_emulator/faults FAULT | DELETE /_emulator/faults | POST /_emulator/clock {"advance_s": S} |
    POST /_emulator/sessions/ID {"status": "EXPIRED" or "CRITICAL"} | GET /_emulator/requests[?operation=O] | GET /_emulator/clock
    """

    def __init__(self, service: Service, advance: Callable[[float], None]) -> None:
        self._service = service
        self._advance = advance

    def handle(self, exchange: Exchange) -> Outcome:
        try:
            return Outcome(self._answer(exchange))
        except ApiError as error:
            return Outcome(error_reply(error))
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            return Outcome(error_reply(invalid_argument(f"control call {exchange.path}: {error}")))

    def _answer(self, exchange: Exchange) -> Reply:
        match exchange.method, exchange.path.removeprefix(CONTROL).strip("/").split("/"):
            case "POST", ["faults"]:
                self._service.faults.add(Fault.model_validate_json(exchange.body))
            case "DELETE", ["faults"]:
                self._service.faults.clear()
            case "POST", ["clock"]:
                self._advance(float(json.loads(exchange.body)["advance_s"]))
            case "POST", ["sessions", session]:
                status = json.loads(exchange.body)["status"]
                if status not in ("EXPIRED", "CRITICAL"):
                    raise invalid_argument(f"a session can be made EXPIRED or CRITICAL, not {status!r}")
                self._service.reads.force(session, status)
            case "GET", ["requests"]:
                operation = exchange.query.get("operation")
                found = self._service.requests(Operation(operation) if operation else None)
                return json_reply([request.model_dump() for request in found])
            case "GET", ["clock"]:
                pass
            case _:
                raise no_such_object(f"control call {exchange.method} {exchange.path}")
        return json_reply({"time": self._service.clock.time()})


def _check_digest(exchange: Exchange) -> None:
    digest = exchange.headers.get("content-md5")
    if digest is not None and digest != hashlib.md5(exchange.body, usedforsecurity=False).hexdigest():
        raise invalid_argument("Content-MD5 isn't the body's")


def _routes(storage: StorageApi, metadata: Metadata, instances: Instances) -> tuple[Route, ...]:
    session = rf"{_TABLE}/sessions/(?P<session>[^/]+)"
    read, write = {"session_type": "batch_read"}, {"session_type": "batch_write"}
    refresh = {**read, "session_refresh": "true"}
    table = rf"{_PROJECT}(?:/schemas/(?P<schema>[^/]+))?/tables/(?P<table>[^/]+)"
    rows: tuple[tuple[Operation, str, str, dict[str, str], Callable[[Exchange], Reply]], ...] = (
        (Operation.CREATE_READ_SESSION, "POST", f"{_TABLE}/sessions", read, storage.create_read_session),
        (Operation.REFRESH_READ_SESSION, "GET", session, refresh, storage.refresh_read_session),
        (Operation.GET_READ_SESSION, "GET", session, read, storage.get_read_session),
        (Operation.READ_ROWS, "GET", f"{_TABLE}/data", {}, storage.read_rows),
        (Operation.CREATE_WRITE_SESSION, "POST", f"{_TABLE}/sessions", write, storage.create_write_session),
        (Operation.GET_WRITE_SESSION, "GET", session, write, storage.get_write_session),
        (Operation.WRITE_ROWS, "POST", f"{session}/data", {}, storage.write_rows),
        (Operation.COMMIT_WRITE_SESSION, "POST", f"{_TABLE}/commit", {}, storage.commit_write_session),
        (Operation.TUNNEL, "GET", f"{_PROJECT}/tunnel", {}, metadata.tunnel),
        (Operation.METADATA, "GET", _PROJECT, {}, metadata.project),
        (Operation.METADATA, "GET", rf"{_PROJECT}/schemas/(?P<schema>[^/]+)", {}, metadata.schema),
        (Operation.METADATA, "GET", rf"{_PROJECT}(?:/schemas/(?P<schema>[^/]+))?/tables", {}, metadata.list_tables),
        (Operation.METADATA, "GET", table, {}, metadata.table),
        # The client's survey of its own deprecated calls.
        (Operation.METADATA, "PUT", f"{_PROJECT}/logs", {}, lambda _: Reply()),
        (Operation.SQL, "POST", f"{_PROJECT}/instances", {}, instances.create),
        (Operation.SQL, "GET", rf"{_PROJECT}/instances/(?P<instance>[^/]+)", {}, instances.get),
    )
    return tuple(Route(operation, method, re.compile(path), query, answer) for operation, method, path, query, answer in rows)
