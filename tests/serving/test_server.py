from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.serving.conftest import LineageMaker, random_rows, request_of
from tidemill.contracts import layout
from tidemill.contracts.serving import ServingStatus
from tidemill.storage.backends.local import LocalStorage

REPOSITORY = Path(__file__).parents[2]
COMMAND = "import typer; from tidemill.cli.serve import serve; typer.run(serve)"
ROWS = random_rows(np.random.default_rng(3), 20)
INFER = "/v2/models/click/infer"
DEADLINE_S = 60.0


class Server:
    """A server process, and how to reach it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while httpx.get(f"{self.url}/v2/health/ready", timeout=10).status_code != 200:
            assert time.monotonic() < deadline, "never ready"
            time.sleep(0.02)


@pytest.fixture
def start_server(tmp_path: Path, root: LocalStorage) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(*arguments: str) -> Server:
            port_file = tmp_path / "port"
            command = [sys.executable, "-c", COMMAND, str(root.root), "--port", "0", "--port-file", str(port_file), *arguments]
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            deadline = time.monotonic() + DEADLINE_S
            while not port_file.exists():
                assert process.poll() is None, f"the server ended with {process.returncode}"
                assert time.monotonic() < deadline, "no port file"
                time.sleep(0.02)
            return Server(process, int(port_file.read_text()))

        yield start


class Load:
    """Clients that send one request after another until they are stopped; they keep every answer."""

    def __init__(self, url: str, clients: int) -> None:
        self.answers: list[list[httpx.Response]] = [[] for _ in range(clients)]
        self._stopping = threading.Event()
        self._url = url
        self._threads = [threading.Thread(target=self._run, args=(answers,)) for answers in self.answers]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, answers: list[httpx.Response]) -> None:
        body = orjson.dumps(request_of(ROWS))
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stopping.is_set():
                answers.append(client.post(INFER, content=body))


def test_thirty_releases_under_load(start_server, root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    server = start_server("--poll-interval", "0.02", "--server-name", "one")
    server.wait_ready()
    with Load(server.url, 4) as load:
        for _ in range(30):
            lineage.release(everything=True)
            time.sleep(0.05)
        deadline = time.monotonic() + DEADLINE_S
        while status_of(root, "one").sequence != 30:
            assert time.monotonic() < deadline, "release 30 is never served"
            time.sleep(0.02)
    served: set[int] = set()
    for answers in load.answers:
        order = []
        for answer in answers:
            assert answer.status_code == 200, answer.text
            body = answer.json()
            position = body["parameters"]["term"], body["parameters"]["sequence"]
            scores = np.array(body["outputs"][0]["data"], np.float32)
            assert np.array_equal(scores, lineage.states[position].scores(ROWS)), position
            order.append(position)
        assert order == sorted(order)
        served |= {sequence for _, sequence in order}
    assert len(served) > 10


def test_sigterm_answers_what_is_in_flight(start_server, root: LocalStorage, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)
    server = start_server("--server-name", "one", "--poll-interval", "0.05")
    server.wait_ready()
    body = orjson.dumps(request_of(ROWS))
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body[:100])
        # The handler is waiting for the rest of the body once a later request has been answered.
        httpx.get(f"{server.url}/v2/health/live", timeout=DEADLINE_S)
        server.process.send_signal(signal.SIGTERM)
        wait_until_refused(server.port)
        connection.sendall(body[100:])
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.process.wait(DEADLINE_S) == 0
    assert not status_of(root, "one").ready


def test_a_stuck_client_does_not_hold_up_the_end(start_server, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)
    server = start_server("--drain", "1")
    server.wait_ready()
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n".encode())
        httpx.get(f"{server.url}/v2/health/live", timeout=DEADLINE_S)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(DEADLINE_S) == 0


def test_serving_reaches_no_training_code() -> None:
    code = (
        "import sys\n"
        "import tidemill.serving.server\n"
        "parts = ('torchrec', 'fbgemm_gpu', *(f'tidemill.{part}' for part in"
        " ('training', 'checkpoint', 'publish', 'distributed', 'models', 'lineage', 'data')))\n"
        "print([name for name in sys.modules if name.startswith(parts)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_the_command_imports_nothing_heavy() -> None:
    code = "import sys; import tidemill.cli.serve; print([name for name in ('torch', 'uvicorn', 'pyarrow') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def status_of(root: LocalStorage, server: str) -> ServingStatus:
    key = layout.serving_status(server)
    return ServingStatus.parse(root.read(key), where=key)


def wait_until_refused(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError("connections are still accepted")
