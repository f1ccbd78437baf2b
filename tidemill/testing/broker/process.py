"""A development broker in a child process, for tests and the demo: start it, kill it, start it again."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path

from tidemill.errors import TidemillError
from tidemill.testing.broker.server import ADDRESS_FILE, LOOPBACK
from tidemill.testing.broker.state import BrokerOptions
from tidemill.testing.child import ChildServer, Place

_CONTROL_TIMEOUT_S = 10.0


class DevelopmentBroker(ChildServer):
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
        super().__init__(Place("development broker", self.directory, self.log_path, self.directory / ADDRESS_FILE))
        self.start()

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

    def start(self) -> None:
        """Start the broker unless it runs; returns when it is ready."""
        if self.pid is not None:
            return
        arguments = {**asdict(self._options), "directory": str(self.directory)}
        address = self._child.start("tidemill.testing.broker", [json.dumps(arguments)])
        self._options = replace(self._options, port=address["port"], control_port=address["control_port"])

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
