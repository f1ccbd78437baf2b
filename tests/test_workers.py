"""The background worker: order, bounds, deadlines, errors that reach the caller."""

from __future__ import annotations

import threading

import pytest

from tidemill.errors import DeadlineError
from tidemill.workers import BackgroundWorker


def test_items_are_worked_on_in_order_and_drained():
    done: list[int] = []
    worker = BackgroundWorker("w", done.append, capacity=4)
    for n in range(20):
        worker.submit(n)
    worker.close(deadline_s=5)
    assert done == list(range(20))


def test_submit_waits_for_a_place_and_gives_up_at_its_deadline():
    gate = threading.Event()
    worker = BackgroundWorker[int]("slow", lambda _: gate.wait(), capacity=1)
    worker.submit(1)
    assert not worker.ready
    with pytest.raises(DeadlineError, match="slow: still busy"):
        worker.submit(2, deadline_s=0.02)
    gate.set()
    worker.drain(deadline_s=5)
    assert worker.ready
    worker.abort()


def test_an_error_stops_the_worker_and_is_raised_to_the_caller():
    def work(item: int) -> None:
        raise ValueError(f"item {item}")

    worker = BackgroundWorker("w", work, capacity=2)
    worker.submit(7)
    with pytest.raises(ValueError, match="item 7"):
        worker.drain(deadline_s=5)
    with pytest.raises(ValueError, match="item 7"):
        worker.submit(8)
    with pytest.raises(ValueError, match="item 7"):
        worker.check()


def test_abort_drops_what_is_queued():
    gate, done = threading.Event(), []

    def work(item: int) -> None:
        gate.wait()
        done.append(item)

    worker = BackgroundWorker("w", work, capacity=3)
    for n in range(3):
        worker.submit(n)
    worker.abort()
    gate.set()
    worker.drain(deadline_s=5)
    assert done in ([], [0])
    with pytest.raises(RuntimeError, match="after close"):
        worker.submit(9)
