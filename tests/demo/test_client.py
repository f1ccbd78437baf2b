from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tidemill.demo.client import Client, HttpError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return await reader.readexactly(int(length))


def answer(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def play(handler: Handler, ask: Callable[[Client], Awaitable[None]], *, timeout_s: float = 5.0) -> int:
    """Serve `handler` while `ask` asks; the number of connections."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            await handler(reader, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", timeout_s)
        try:
            await ask(client)
        finally:
            await client.close()
            server.close()
            await asyncio.sleep(0.01)

    asyncio.run(run())
    return connections


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(answer(await read_body(reader)))


async def echo_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(await read_body(reader)))


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_body(reader)


def test_one_connection_serves_one_request_after_the_other() -> None:
    async def ask(client: Client) -> None:
        for body in (b"one", b"", b"three" * 10_000):
            assert await client.request("POST", "/", body) == (200, body)

    assert play(echo, ask) == 1


def test_requests_at_once_each_have_their_own_connection() -> None:
    async def ask(client: Client) -> None:
        bodies = [str(n).encode() for n in range(8)]
        answers = await asyncio.gather(*(client.request("POST", "/", body) for body in bodies))
        assert answers == [(200, body) for body in bodies]

    assert play(echo, ask) == 8


def test_a_kept_connection_that_the_server_has_closed_is_no_failure() -> None:
    async def ask(client: Client) -> None:
        for _ in range(3):
            assert await client.request("POST", "/", b"x") == (200, b"x")
            await asyncio.sleep(0.02)

    assert play(echo_once, ask) == 3


def test_no_answer_at_all_is_a_failure() -> None:
    async def ask(client: Client) -> None:
        with pytest.raises(HttpError, match="without an answer"):
            await client.request("GET", "/")

    play(hang_up, ask)


def test_half_an_answer_is_a_failure_and_not_asked_again() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_body(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")

    async def ask(client: Client) -> None:
        with pytest.raises(HttpError, match="IncompleteReadError"):
            await client.request("GET", "/")

    assert play(half, ask) == 1


def test_a_late_answer_is_a_failure() -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_body(reader)
        await reader.read()

    async def ask(client: Client) -> None:
        with pytest.raises(HttpError, match="no answer within"):
            await client.request("GET", "/")

    play(late, ask, timeout_s=0.05)


def test_a_port_without_a_server_is_a_failure() -> None:
    async def ask(client: Client) -> None:
        other = Client("http://127.0.0.1:1", 1.0)
        with pytest.raises(HttpError):
            await other.request("GET", "/")

    play(echo, ask)


def test_errors_of_the_server_keep_their_status_and_a_connection_that_it_closes_is_not_kept() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_body(reader)
            writer.write(answer(b"{}", "503 Service Unavailable", "Connection: close\r\n"))

    async def ask(client: Client) -> None:
        assert await client.request("POST", "/", b"") == (503, b"{}")
        assert await client.request("POST", "/", b"") == (503, b"{}")

    assert play(refuse, ask) == 2
