"""A small HTTP/1.1 client: kept connections, bodies with a known length, nothing else, at a tenth of the cost of a full one.

The load of a demo must not take the cores that the trainer and the server need.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(Exception):
    """No answer, or none that can be read."""


class Client:
    """Requests to one server. On one event loop; any number at once, each on a connection of its own."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer. Raises HttpError.

        A kept connection that the server has closed in the meantime is replaced by a new one.
        """
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        message = head.encode() + body
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._idle:
                    answer = await self._ask(self._idle.pop(), message)
                    if answer is not None:
                        return answer
                answer = await self._ask(await asyncio.open_connection(self._host, self._port), message)
        except TimeoutError:
            raise HttpError(f"no answer within {self._timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, KeyError) as error:
            raise HttpError(repr(error)) from error
        if answer is None:
            raise HttpError("the server has closed the connection without an answer")
        return answer

    async def close(self) -> None:
        """Close all connections that are kept."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _ask(self, connection: _Connection, message: bytes) -> tuple[int, bytes] | None:
        """None: the connection was closed before any byte of an answer."""
        reader, writer = connection
        kept = False
        try:
            writer.write(message)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
                return None
            status, fields = _parse_head(head)
            body = await reader.readexactly(int(fields["content-length"]))
            kept = fields.get("connection", "").lower() != "close"
        finally:
            if not kept:
                writer.close()
        if kept:
            self._idle.append(connection)
        return status, body


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines if line)
    return int(first.split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in fields}
