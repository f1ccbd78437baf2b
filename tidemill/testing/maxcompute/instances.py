"""Instances: how the client runs a statement and asks how it ended. Each has ended when its answer is sent."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from collections import OrderedDict
from dataclasses import dataclass
from email.utils import formatdate
from xml.sax.saxutils import escape

from tidemill.clock import Clock
from tidemill.testing.maxcompute.exchange import Exchange
from tidemill.testing.maxcompute.replies import ApiError, Reply, invalid_argument, new_id, no_such_object, xml_reply
from tidemill.testing.maxcompute.statements import Statements

# The client asks for an instance's outcome right after it ran.
_KEPT = 1000


@dataclass(frozen=True, slots=True)
class _Ended:
    task: str
    error: str | None
    at: float


class Instances:
    """Answers the requests about instances; the newest are remembered. Thread-safe. Raises ApiError."""

    def __init__(self, statements: Statements, clock: Clock) -> None:
        self._statements = statements
        self._clock = clock
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._lock = threading.Lock()

    def create(self, exchange: Exchange) -> Reply:
        task, statement = _task(exchange.body)
        error = None
        try:
            self._statements.run(statement, exchange.parts["project"], exchange.query.get("curr_schema") or "default")
        except ApiError as refusal:
            error = _failure_text(refusal)
        instance = new_id()
        with self._lock:
            self._ended[instance] = _Ended(task, error, self._clock.time())
            while len(self._ended) > _KEPT:
                self._ended.popitem(last=False)
        # An empty body: the client then asks for the status, as it does for a statement that takes time.
        return Reply(201, content_type="application/xml", headers={"Location": f"{exchange.path}/{instance}"})

    def get(self, exchange: Exchange) -> Reply:
        """The status, each task's status (`?taskstatus`), or each task's result (`?result`)."""
        with self._lock:
            ended = self._ended.get(exchange.parts["instance"])
        if ended is None:
            raise no_such_object(f"instance {exchange.parts['instance']}")
        when = formatdate(ended.at, usegmt=True)
        headers = {"x-odps-owner": "emulator", "x-odps-start-time": when, "x-odps-end-time": when}
        name, outcome = f"<Name>{escape(ended.task)}</Name>", "Failed" if ended.error else "Success"
        if "result" in exchange.query:
            result = f"<Result Format='text'>{escape(ended.error or '')}</Result>"
            return xml_reply(f"<Instance><Tasks><Task Type='SQL'>{name}{result}</Task></Tasks></Instance>", headers=headers)
        tasks = f"<Tasks><Task Type='SQL'>{name}<Status>{outcome}</Status></Task></Tasks>" if "taskstatus" in exchange.query else ""
        return xml_reply(f"<Instance><Status>Terminated</Status>{tasks}</Instance>", headers=headers)


def _task(body: bytes) -> tuple[str, str]:
    """The name and the statement of the one SQL task in a request to run an instance."""
    try:
        root = ET.fromstring(body)
    except ET.ParseError as error:
        raise invalid_argument(f"not an instance: {error}") from error
    name, query = root.findtext(".//SQL/Name"), root.findtext(".//SQL/Query")
    if name is None or query is None:
        raise invalid_argument("the emulator runs instances of one SQL task only")
    return name, query


def _failure_text(error: ApiError) -> str:
    """A refusal as a failed task's result, in which the client looks for an ODPS number."""
    numbers = {"NoSuchTable": "ODPS-0130131", "InvalidArgument": "ODPS-0420411"}
    number = error.code if error.code.startswith("ODPS-") else numbers.get(error.code, "ODPS-0110061")
    return f"{number}:{error.code} - {error.message}"
