"""A server of another implementation of Kafka's protocol, which has transactions."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.data.kafka_topics import DEADLINE_S
from tidemill.testing.child import tied

PROGRAM = shutil.which("noida-db", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
NOT_INSTALLED = "noida-db isn't installed (it is among the dev dependencies)"


class Noida:
    """A server on a free port, with its data in a folder. It drops messages older than a week."""

    first_ms = int(time.time() * 1000)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.bootstrap = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        command = [PROGRAM, "start", "--data-dir", str(self._directory), "--only", "kafka", "--kafka-port", str(self._port)]
        log = (self._directory.parent / "noida.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                tied(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._signal(signal.SIGKILL)
                    raise
                time.sleep(0.02)

    def stop(self) -> None:
        """It keeps what it has only if it may end by itself; returns when nobody listens any more. Idempotent."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        try:
            self._process.wait(DEADLINE_S)
            while self._listens():
                assert time.monotonic() < deadline, "noida-db doesn't end"
                time.sleep(0.02)
        finally:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """To the program's whole group: the server is a child of the program, and outlives it otherwise."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
        except OSError:
            return False
        return True
