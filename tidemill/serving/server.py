"""One serving process: socket, threads, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from tidemill.clock import SystemClock
from tidemill.errors import ConfigError
from tidemill.logs import log
from tidemill.serving.app import Limits, Service
from tidemill.serving.batcher import Batcher
from tidemill.serving.follower import POLL_INTERVAL_S, Follower, Identity
from tidemill.serving.metrics import Metrics
from tidemill.storage.open import open_storage

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and where."""

    target: str
    """A root (its newest deployment is followed), or one lineage's or snapshot's folder."""
    host: str = "127.0.0.1"
    port: int = 8080
    """0: any free port."""
    model_name: str | None = None
    """None: the snapshot's own."""
    server_name: str | None = None
    """Names the status file; None: host and port."""
    poll_interval_s: float = POLL_INTERVAL_S
    queue_capacity: int = 256
    drain_s: float = 10.0
    """How long requests in flight may take after SIGTERM."""
    torch_threads: int | None = None
    """None: all cores but one."""
    limits: Limits = field(default_factory=Limits)


def serve(options: ServeOptions, *, on_bound: Callable[[str, int], None]) -> None:
    """Serve until SIGTERM or SIGINT; then take no new connection, answer what is in flight, and return.

    `on_bound` gets the host and port once connections are accepted; until a generation is warm they are answered with 503.
    Raises ConfigError if the address can't be bound. To be called on the main thread.
    """
    torch.set_num_threads(options.torch_threads or max(1, (os.cpu_count() or 1) - 1))
    listener = _listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    clock = SystemClock()
    metrics = Metrics(clock)
    name = options.server_name or f"{socket.gethostname()}-{port}"
    identity = Identity(name, f"http://{f'[{host}]' if ':' in host else host}:{port}")
    follower = Follower(open_storage(options.target), identity, metrics, clock, poll_interval_s=options.poll_interval_s)
    metrics.watch(lambda: follower.generation)
    batcher = Batcher(lambda: follower.predictor, metrics, clock, capacity=options.queue_capacity)
    service = Service(follower, batcher, metrics, clock, limits=options.limits, model=options.model_name)
    on_bound(host, port)
    batcher.start()
    follower.start()
    try:
        _run(service, listener, options.drain_s)
    finally:
        batcher.close()
        follower.stop()
        listener.close()
    log.info("serving: stopped")


def write_port_file(path: Path, port: int) -> None:
    """Write the port, whole or not at all, so that whoever waits for the file can read it at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f"{port}\n")
    temporary.replace(path)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error}") from error
    return listener


def _run(service: Service, listener: socket.socket, drain_s: float) -> None:
    config = uvicorn.Config(
        service.app(),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    server = uvicorn.Server(config)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # Ours count before uvicorn has set its own, and after it has stopped: it then raises the signal again, which must not end the
    # process, so that a drained server exits with 0.
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
