"""A server in a child process, for tests and the demo: start it, kill it, start it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tidemill
from tidemill.errors import DeadlineError, TidemillError
from tidemill.lineage.orchestrators import launch

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server works, and how it tells that it is ready. `name`: for errors. `address`: a JSON file with its `pid`."""

    name: str
    folder: Path
    log_path: Path
    address: Path


def tied(command: Sequence[str]) -> list[str]:
    """The command, as one whose process the kernel kills when the thread that started it is gone: a killed test leaves nothing.

    The process's id and exit code are the command's own. Linux; elsewhere the process is on its own.
    """
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]


class ChildProcess:
    """One server, in a process and a process group of its own. Not for use by several threads at once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        place.log_path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def pid(self) -> int | None:
        """None while it doesn't run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, module: str, arguments: Sequence[str]) -> dict[str, Any]:
        """Start `python -m module`, and return its address when it is ready.

        Raises TidemillError with the log's last line if it can't start, DeadlineError if it isn't ready in time.
        """
        with self._place.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # So that the child imports this very package, installed or not.
                cwd=Path(tidemill.__file__).parent.parent,
                start_new_session=True,
            )
        try:
            return self._await_address(self._process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End it in good order (SIGTERM); kill it if that takes too long."""
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

    def _await_address(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        place = self._place
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            address = _read_address(place.address)
            if address.get("pid") == process.pid:
                return address
            if process.poll() is not None:
                lines = place.log_path.read_text(errors="replace").splitlines() or ["(its log is empty)"]
                raise TidemillError(f"the {place.name} on {place.folder} did not start: {lines[-1]}")
            time.sleep(_POLL_S)
        raise DeadlineError(f"the {place.name} on {place.folder} was not ready within {_START_TIMEOUT_S:.0f} s")


class ChildServer(ABC):
    """A server on a folder that tests start, kill and start again. Ready when `start` returns; ends with the `with` block."""

    def __init__(self, place: Place) -> None:
        self._child = ChildProcess(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """None while it doesn't run."""
        return self._child.pid

    @abstractmethod
    def start(self) -> None:
        """Start it unless it runs, on the same ports as before; returns when it is ready."""

    def stop(self) -> None:
        """End it in good order (SIGTERM); kill it if that takes too long."""
        self._child.stop()

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self._child.kill()

    def restart(self) -> None:
        """Start again on the same ports, after killing it if it still runs."""
        self.kill()
        self.start()


def _read_address(path: Path) -> dict[str, Any]:
    try:
        address: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return address
