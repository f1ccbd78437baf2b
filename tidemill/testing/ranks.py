"""Runs a function on several ranks, each a real process, which find each other through a file."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tidemill.distributed.runtime import Place, Runtime, start_runtime

GROUP_TIMEOUT_S = 30.0


class RankError(AssertionError):
    """A rank raised, died, or took too long; the message holds its traceback."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 90.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Any]:
    """`function(runtime, *args)` on every rank at once; its results in rank order.

    Function, arguments and results are pickled, so the function must stand at the top of a module. Each process has one torch
    thread and a session of its own, and none outlives the call. Raises RankError.
    """
    # Not fork: the parent may have threads of torch in flight.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        pairs = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_run_rank,
                args=(Place(rank, world_size, 0, world_size, store), sender, function, args, group_timeout_s),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pairs)
        ]
        try:
            for process, (_, sender) in zip(processes, pairs, strict=True):
                process.start()
                sender.close()
            return _results([receiver for receiver, _ in pairs], time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
                process.close()


@contextmanager
def single_process(timeout_s: float = GROUP_TIMEOUT_S) -> Iterator[Runtime]:
    """A run of one rank in this process, with one torch thread. One at a time."""
    threads = torch.get_num_threads()
    runtime = start_runtime(timeout_s, num_threads=1)
    try:
        yield runtime
    finally:
        runtime.close()
        torch.set_num_threads(threads)


def _results(receivers: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(receivers)
    waiting = dict(enumerate(receivers))
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RankError(f"ranks {sorted(waiting)} weren't done after {timeout_s:g} s")
        # The first failure ends the wait: the other ranks would only run into their timeout.
        for ready in multiprocessing.connection.wait(list(waiting.values()), timeout=left):
            rank = next(rank for rank, receiver in waiting.items() if receiver is ready)
            results[rank] = _receive(rank, waiting.pop(rank))
    return results


def _receive(rank: int, receiver: Connection) -> Any:
    try:
        ok, value = receiver.recv()
    except EOFError:
        raise RankError(f"rank {rank} died without a result") from None
    if not ok:
        raise RankError(f"rank {rank} raised:\n{value}")
    return value


def _run_rank(place: Place, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
    os.setsid()
    try:
        runtime: Runtime = start_runtime(timeout_s, place, num_threads=1)
        sender.send((True, function(runtime, *args)))
        runtime.close()
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise
