"""A MaxCompute emulator in a child process, for tests of several processes: start it, kill it, start it again."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pyarrow as pa

from tidemill.errors import TidemillError
from tidemill.testing.child import ChildServer, Place
from tidemill.testing.maxcompute.documents import TableName
from tidemill.testing.maxcompute.emulator import AHEAD_FILE
from tidemill.testing.maxcompute.exchange import LoggedRequest
from tidemill.testing.maxcompute.faults import Fault, Faults, Operation
from tidemill.testing.maxcompute.rows import fill_table, table_rows
from tidemill.testing.maxcompute.run import ADDRESS_FILE
from tidemill.testing.maxcompute.service import CONTROL
from tidemill.testing.maxcompute.tables import Tables
from tidemill.testing.maxcompute.virtual_clock import VirtualClock

_CONTROL_TIMEOUT_S = 10.0


class MaxComputeProcess(ChildServer):
    """An emulator on a folder, in a process (and process group) of its own that ends with this one at the latest.

        with MaxComputeProcess(tmp_path) as emulator:
            subprocess.run([..., emulator.endpoint])

    It is ready when the constructor returns, and is asked for faults and time as MaxComputeEmulator is. A port that was 0 is
    chosen once and stays the same over `restart`. Its log is emulator.log in `.emulator` below the folder. Raises TidemillError
    with the log's last line if it can't start, DeadlineError if it isn't ready in time. Not for several threads at once.
    """

    def __init__(self, folder: Path | str, port: int = 0) -> None:
        self.folder = Path(folder).absolute()
        self.faults = Faults(lambda fault: self._send("POST", "faults", fault), lambda: self._send("DELETE", "faults"))
        self._port = port
        super().__init__(Place("MaxCompute emulator", self.folder, self.log_path, self.folder / ADDRESS_FILE))
        self.start()

    @property
    def endpoint(self) -> str:
        """For `ODPS(endpoint=...)`; the tunnel is found behind it."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def log_path(self) -> Path:
        return self.folder / ".emulator" / "emulator.log"

    def start(self) -> None:
        """Start the emulator unless it runs; returns when it is ready."""
        if self.pid is not None:
            return
        arguments = [str(self.folder), str(self._port), str(os.getpid())]
        address = self._child.start("tidemill.testing.maxcompute", arguments)
        self._port = urlsplit(str(address["endpoint"])).port or 0

    def add_table(
        self,
        project: str,
        table: str,
        partitions: Mapping[str, pa.Table],
        schema: str = "default",
        lifecycle: int | None = None,
        buckets: int | None = None,
    ) -> None:
        """As MaxComputeEmulator.add_table; written from this process, so not while anyone else writes to this table."""
        fill_table(self._tables(), TableName(project=project, schema_name=schema, table=table), partitions, lifecycle, buckets)

    def read_table(self, project: str, table: str, partition: str = "", schema: str = "default") -> pa.Table:
        """A partition's rows as they are on disk now. Raises ApiError if it isn't there."""
        return table_rows(self._tables(), TableName(project=project, schema_name=schema, table=table), partition)

    def advance(self, seconds: float) -> None:
        """Let the emulator's time pass at once."""
        self._send("POST", "clock", {"advance_s": seconds})

    def end_session(self, session_id: str, status: Literal["EXPIRED", "CRITICAL"] = "EXPIRED") -> None:
        """End a read session before its time."""
        self._send("POST", f"sessions/{session_id}", {"status": status})

    def requests(self, operation: Operation | str | None = None) -> list[LoggedRequest]:
        """The newest requests since the start, oldest first; of one operation only, if it is given."""
        query = f"?operation={Operation(operation)}" if operation else ""
        return [LoggedRequest.model_validate(request) for request in self._send("GET", f"requests{query}")]

    def _tables(self) -> Tables:
        return Tables(self.folder, VirtualClock(self.folder / AHEAD_FILE))

    def _send(self, method: str, path: str, document: Fault | dict[str, Any] | None = None) -> Any:
        """One control call's answer; raises TidemillError if it is refused."""
        body = document.model_dump_json() if isinstance(document, Fault) else json.dumps(document)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_CONTROL_TIMEOUT_S)
        try:
            connection.request(method, f"{CONTROL}/{path}", body)
            answer = connection.getresponse()
            content = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise TidemillError(f"MaxCompute emulator, control call {method} {path}: {content['Message']}")
        return content
