"""Clients of two servers: each request goes to one of them, and to the other one if that doesn't answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from tidemill.data.click_world import World
from tidemill.demo.client import Client, HttpError
from tidemill.demo.players import INPUT_TYPES

INPUTS = ("user_id", "hour", "item_id", "price", "click_seq")
_CANDIDATES = 20
_ATTEMPT_S = 10.0
_PATIENCE_S = 60.0
"""A machine under load is slow; a request fails when no server answers for so long."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was answered: when it was sent, by which server's which generation, after how many failed attempts."""

    sent_at: float
    answered_at: float
    server: str
    lineage: str
    term: int
    sequence: int
    attempts: int


class Clients:
    """Ask all the while, from construction to the end of the block; each client prefers another server.

    `port_files`: by server's name, where it writes its port. Threading: `answers` and `failed` may be read from any thread.
    """

    def __init__(self, port_files: dict[str, Path], requests_per_s: float) -> None:
        self.answers: list[Answer] = []
        self.failed: list[str] = []
        self._port_files = port_files
        self._pause_s = len(port_files) / requests_per_s
        self._body = _request_body()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="clients", daemon=True)

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(2 * _PATIENCE_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        names = list(self._port_files)
        await asyncio.gather(*(self._client([*names[n:], *names[:n]]) for n in range(len(names))))

    async def _client(self, servers: Sequence[str]) -> None:
        connections: dict[int, Client] = {}
        while not self._stopping.is_set():
            await self._ask(servers, connections)
            await asyncio.sleep(self._pause_s)
        for connection in connections.values():
            await connection.close()

    async def _ask(self, servers: Sequence[str], connections: dict[int, Client]) -> None:
        sent_at, attempts, errors = time.time(), 0, []
        while time.time() < sent_at + _PATIENCE_S:
            server = servers[attempts % len(servers)]
            try:
                port = int(self._port_files[server].read_text())
                client = connections.setdefault(port, Client(f"http://127.0.0.1:{port}", _ATTEMPT_S))
                began = time.time()
                status, answer = await client.request("POST", "/v2/models/clicks/infer", self._body)
                if status == 200:
                    named = orjson.loads(answer)["parameters"]
                    where = named["lineage"], named["term"], named["sequence"]
                    self.answers.append(Answer(began, time.time(), server, *where, attempts))
                    return
                errors.append(f"{server}: {status} {answer[:200]!r}")
            except (HttpError, FileNotFoundError, ValueError) as error:
                errors.append(f"{server}: {error}")
            attempts += 1
            if attempts % len(servers) == 0:
                await asyncio.sleep(_PAUSE_S)
        self.failed.append(f"{sent_at}: {errors[-4:]}")


def _request_body() -> bytes:
    rows = World(7).day_table(2, _CANDIDATES)
    inputs = [
        {"name": name, "shape": [_CANDIDATES], "datatype": INPUT_TYPES[rows[name].type], "data": rows[name].to_pylist()}
        for name in INPUTS
    ]
    return orjson.dumps({"inputs": inputs})
