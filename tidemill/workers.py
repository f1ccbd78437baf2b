"""A background thread with a bounded queue, whose errors come back to the caller."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tidemill.clock import Clock, SystemClock
from tidemill.errors import DeadlineError

T = TypeVar("T")


class BackgroundWorker(Generic[T]):
    """Runs `work(item)` on its own thread, in order.

    `submit` waits while `capacity` items are pending (the running one included), up to a deadline. An error in `work` stops the
    worker, drops what is queued, and is raised by the next `submit`, `check`, `drain` or `close`.
    Threading: any thread may call any method but `work` itself.
    """

    def __init__(self, name: str, work: Callable[[T], None], *, capacity: int = 1, clock: Clock | None = None) -> None:
        self._name = name
        self._work = work
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._items: deque[T] = deque()
        self._pending = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether `submit` would return at once."""
        with self._changed:
            return self._error is None and not self._closed and self._pending < self._capacity

    @property
    def busy(self) -> bool:
        """Whether anything is pending."""
        with self._changed:
            return self._pending > 0

    def submit(self, item: T, *, deadline_s: float = 60.0) -> None:
        """Queue an item. Raises the worker's own error, or DeadlineError if no place becomes free in time."""
        with self._changed:
            self._wait(lambda: self._pending < self._capacity, deadline_s)
            if self._closed:
                raise RuntimeError(f"{self._name}: submit after close")
            self._items.append(item)
            self._pending += 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the worker's error, if it has one."""
        with self._changed:
            self._raise_error()

    def drain(self, *, deadline_s: float) -> None:
        """Wait until everything submitted is done. Raises the worker's own error, or DeadlineError."""
        with self._changed:
            self._wait(lambda: self._pending == 0, deadline_s)

    def close(self, *, deadline_s: float) -> None:
        """Finish what is queued and stop the thread. Idempotent."""
        try:
            self.drain(deadline_s=deadline_s)
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what is queued and stop after the running item. Doesn't wait, doesn't raise."""
        with self._changed:
            self._closed = True
            self._pending -= len(self._items)
            self._items.clear()
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> None:
        until = self._clock.monotonic() + deadline_s
        while not condition():
            self._raise_error()
            left = until - self._clock.monotonic()
            if left <= 0:
                raise DeadlineError(f"{self._name}: still busy after {deadline_s:.0f} s")
            self._changed.wait(min(left, 1.0))
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._closed:
                    self._changed.wait()
                if not self._items:
                    return
                item = self._items.popleft()
            try:
                self._work(item)
            except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to the caller
                with self._changed:
                    self._error = error
                    self._pending = 0
                    self._items.clear()
                    self._closed = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
