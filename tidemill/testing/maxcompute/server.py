"""HTTP: sockets, threads, chunked bodies, and connections that break when a fault says so."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tidemill.errors import ConfigError
from tidemill.testing.maxcompute.exchange import Exchange
from tidemill.testing.maxcompute.replies import Reply, new_id
from tidemill.testing.maxcompute.service import CONTROL, Outcome

LOOPBACK = "127.0.0.1"


class EmulatorServer(ThreadingHTTPServer):
    """A server on loopback with a thread for each connection; all of them have ended once `close` returns.

    `handle` answers the client, `control` the control call.
    Raises ConfigError if the port is taken.
    """

    # server_close then waits for the threads of connections.
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, port: int, handle: Callable[[Exchange], Outcome], control: Callable[[Exchange], Outcome]) -> None:
        self.handle_exchange = handle
        self.control = control
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"can't listen on {LOOPBACK}:{port}: {error.strerror or error}") from error

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._connections_lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the game; anything else is told."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop listening, break the connections that are open, and wait for their threads."""
        self.shutdown()
        with self._connections_lock:
            for connection in self._connections:
                _break(connection)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: EmulatorServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Quiet: the service keeps its own log of requests."""

    def do_GET(self) -> None:
        self._exchange()

    def do_POST(self) -> None:
        self._exchange()

    def do_PUT(self) -> None:
        self._exchange()

    def do_DELETE(self) -> None:
        self._exchange()

    def _exchange(self) -> None:
        parts = urlsplit(self.path)
        body = self._body()
        exchange = Exchange(
            method=self.command,
            path=unquote(parts.path),
            query={key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            body=body,
            parts={},
        )
        answer = self.server.control if exchange.path.startswith(CONTROL) else self.server.handle_exchange
        outcome = answer(exchange)
        if outcome.reply is None:
            self._break()
        elif outcome.reply.stream is None:
            self._send_head(outcome.reply, {"Content-Length": str(len(outcome.reply.body))})
            self.wfile.write(outcome.reply.body)
        else:
            self._send_head(outcome.reply, {"Transfer-Encoding": "chunked"})
            self._send_stream(outcome)

    def _body(self) -> bytes:
        """The request's body. Raises ConnectionError if the client goes away before its end."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self._read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while True:
            line = self.rfile.readline()
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the client went away within its body")
            size = int(line.split(b";")[0], 16)
            chunks.append(self._read(size))
            self._read(2)
            if size == 0:
                return b"".join(chunks)

    def _read(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionResetError("the client went away within its body")
        return data

    def _send_head(self, reply: Reply, lengths: dict[str, str]) -> None:
        self.send_response(reply.status)
        for name, value in {"Content-Type": reply.content_type, "x-odps-request-id": new_id(), **reply.headers, **lengths}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_stream(self, outcome: Outcome) -> None:
        """Send pieces as chunks, until a fault ends them: cleanly, or in the midst of a chunk."""
        assert outcome.reply is not None
        assert outcome.reply.stream is not None
        fault, sent = outcome.fault, 0
        for place, piece in enumerate(outcome.reply.stream):
            # The first piece is the schema.
            if fault is not None and fault.kind == "end_early" and place > fault.amount:
                break
            if fault is not None and fault.kind in ("cut", "hang") and sent + len(piece) > fault.amount:
                self.wfile.write(b"%x\r\n" % len(piece) + piece[: fault.amount - sent])
                if fault.kind == "hang" and outcome.held is not None:
                    outcome.held.wait()
                self._break()
                return
            if piece:
                # One after the other: a piece of megabytes isn't copied for its frame.
                self.wfile.write(b"%x\r\n" % len(piece))
                self.wfile.write(piece)
                self.wfile.write(b"\r\n")
            sent += len(piece)
        self.wfile.write(b"0\r\n\r\n")

    def _break(self) -> None:
        self.close_connection = True
        _break(self.connection)


def _break(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The other side was faster.
        return
