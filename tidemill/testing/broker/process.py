"""A development broker in a child process, for tests and the demo: start it, kill it, start it again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

import tidemill
from tidemill.errors import DeadlineError, TidemillError
from tidemill.testing.broker.server import ADDRESS_FILE, LOOPBACK
from tidemill.testing.broker.state import BrokerOptions

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_CONTROL_TIMEOUT_S = 10.0
_POLL_S = 0.01


class DevelopmentBroker:
    """A broker on a folder, in a process (and process group) of its own that ends with this one at the latest.

        with DevelopmentBroker(tmp_path) as broker:
            producer = Producer({"bootstrap.servers": broker.bootstrap})

    It is ready when the constructor returns. Ports that were 0 are chosen once and stay the same over `restart`.
    Its log is broker.log in the folder. Raises TidemillError with the log's last line if the broker can't start (the folder
    is in use, a port is taken), DeadlineError if it isn't ready in time. Not for use by several threads at once.
    """

    def __init__(
        self,
        directory: Path | str,
        port: int = 0,
        control_port: int = 0,
        fsync: bool = False,
        auto_create: int = 0,
        max_request_bytes: int = 100_000_000,
    ) -> None:
        self._options = BrokerOptions(
            directory=Path(directory).absolute(),
            host=LOOPBACK,
            port=port,
            control_port=control_port,
            fsync=fsync,
            auto_create=auto_create,
            max_request_bytes=max_request_bytes,
            parent=os.getpid(),
        )
        self._options.directory.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> DevelopmentBroker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    @property
    def bootstrap(self) -> str:
        """For `bootstrap.servers`."""
        return f"{LOOPBACK}:{self._options.port}"

    @property
    def port(self) -> int:
        return self._options.port

    @property
    def control_port(self) -> int:
        return self._options.control_port or 0

    @property
    def directory(self) -> Path:
        return self._options.directory

    @property
    def log_path(self) -> Path:
        return self.directory / "broker.log"

    @property
    def pid(self) -> int | None:
        """None while no broker runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the broker unless it runs; returns when it is ready."""
        if self.pid is not None:
            return
        arguments = {**asdict(self._options), "directory": str(self.directory)}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tidemill.testing.broker", json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # So that the child imports this very package, installed or not.
                cwd=Path(tidemill.__file__).parent.parent,
                start_new_session=True,
            )
        try:
            address = self._await_address(self._process)
        except BaseException:
            self.kill()
            raise
        self._options = replace(self._options, port=address["port"], control_port=address["control_port"])

    def stop(self) -> None:
        """End the broker in good order (SIGTERM); kill it if that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def restart(self) -> None:
        """Start again on the same ports, after killing the broker if it still runs."""
        self.kill()
        self.start()

    def control(self, command: str) -> str:
        """Send one command to the control port and return its answer; raises TidemillError if it is refused.

        rtt MS | err API CODE COUNT (CODE -1: drop the request, -2: drop the answer) | down | up
        | clear | gap TOPIC PARTITION COUNT | marker TOPIC PARTITION commit/abort | stats
        """
        with socket.create_connection((LOOPBACK, self.control_port), timeout=_CONTROL_TIMEOUT_S) as connection:
            connection.sendall(f"{command}\n".encode())
            with connection.makefile() as answers:
                answer = answers.readline().strip()
        if answer.startswith("error"):
            raise TidemillError(f"development broker, control command {command!r}: {answer}")
        return answer

    def _await_address(self, process: subprocess.Popen[bytes]) -> dict[str, int]:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            address = _read_address(self.directory / ADDRESS_FILE)
            if address.get("pid") == process.pid:
                return address
            if process.poll() is not None:
                lines = self.log_path.read_text(errors="replace").splitlines() or ["(its log is empty)"]
                raise TidemillError(f"the development broker on {self.directory} did not start: {lines[-1]}")
            time.sleep(_POLL_S)
        raise DeadlineError(f"the development broker on {self.directory} was not ready within {_START_TIMEOUT_S:.0f} s")


def _read_address(path: Path) -> dict[str, int]:
    try:
        address: dict[str, int] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return address
