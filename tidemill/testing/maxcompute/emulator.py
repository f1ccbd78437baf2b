"""The emulator in this process: a folder, a server, and what tests ask of it."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

import pyarrow as pa

from tidemill.clock import ManualClock
from tidemill.errors import StorageError
from tidemill.testing.maxcompute.documents import TableName
from tidemill.testing.maxcompute.exchange import LoggedRequest
from tidemill.testing.maxcompute.faults import Faults, Operation
from tidemill.testing.maxcompute.rows import fill_table, table_rows
from tidemill.testing.maxcompute.server import EmulatorServer
from tidemill.testing.maxcompute.service import SESSION_LIFETIME_S, Control, Service
from tidemill.testing.maxcompute.virtual_clock import VirtualClock

AHEAD_FILE = Path(".emulator", "ahead_s")
"""How far the emulator's clock is ahead, below its folder."""


class MaxComputeEmulator:
    """A MaxCompute with the Storage API on loopback, over Parquet files in a folder, with threads in this process.

        with MaxComputeEmulator(tmp_path) as emulator:
            emulator.add_table("prj", "clicks", {"dt=20240319": pa.table({"user": [1, 2]})})
            odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)

    It serves once the constructor has returned. `clock`: its own one runs as the machine's does and can be set forward. A folder
    keeps tables, sessions and the time over restarts. `page` is how many partitions a listing returns at a time.
    Raises StorageError if another emulator works in the folder, ConfigError if the port is taken. Thread-safe.
    """

    def __init__(
        self,
        folder: Path | str,
        port: int = 0,
        clock: ManualClock | None = None,
        session_lifetime_s: float = SESSION_LIFETIME_S,
        page: int = 1000,
    ) -> None:
        self.folder = Path(folder)
        self._lock = _locked(self.folder)
        try:
            self.clock = clock or VirtualClock(self.folder / AHEAD_FILE)
            self._service = Service(self.folder, self.clock, session_lifetime_s, page)
            self.faults = Faults(self._service.faults.add, self._service.faults.clear)
            control = Control(self._service, self.clock.advance)
            self._server = EmulatorServer(port, self._service.handle, control.handle)
        except BaseException:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="maxcompute-emulator", daemon=True)
        self._thread.start()

    def __enter__(self) -> MaxComputeEmulator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """For `ODPS(endpoint=...)`; the tunnel is found behind it."""
        return self._server.endpoint

    @property
    def adopted(self) -> list[str]:
        """Tables found as bare folders of Parquet files when the emulator started."""
        return [str(name) for name in self._service.adopted]

    def close(self) -> None:
        """End the server and its threads; again does nothing."""
        if self._thread.is_alive():
            self._service.faults.clear()
            self._server.close()
            self._thread.join()
            self._lock.close()

    def add_table(
        self,
        project: str,
        table: str,
        partitions: Mapping[str, pa.Table],
        schema: str = "default",
        lifecycle: int | None = None,
        buckets: int | None = None,
    ) -> None:
        """Make a table of these partitions (spec -> rows; "" -> rows: without partitions), or replace partitions of it."""
        name = TableName(project=project, schema_name=schema, table=table)
        fill_table(self._service.tables, name, partitions, lifecycle, buckets)

    def read_table(self, project: str, table: str, partition: str = "", schema: str = "default") -> pa.Table:
        """A partition's rows as they are on disk now. Raises ApiError if it isn't there."""
        return table_rows(self._service.tables, TableName(project=project, schema_name=schema, table=table), partition)

    def advance(self, seconds: float) -> None:
        """Let the emulator's time pass at once."""
        self.clock.advance(seconds)

    def end_session(self, session_id: str, status: Literal["EXPIRED", "CRITICAL"] = "EXPIRED") -> None:
        """End a read session before its time."""
        self._service.reads.force(session_id, status)

    def requests(self, operation: Operation | str | None = None) -> list[LoggedRequest]:
        """The newest requests, oldest first; of one operation only, if it is given."""
        return self._service.requests(Operation(operation) if operation else None)


def _locked(folder: Path) -> TextIO:
    """The folder's lock, held until the file is closed or the process ends."""
    state = folder / ".emulator"
    state.mkdir(parents=True, exist_ok=True)
    file = (state / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StorageError(f"another MaxCompute emulator works in {folder}; stop it, or use another folder") from error
    return file
