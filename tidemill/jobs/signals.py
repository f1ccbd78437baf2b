"""SIGTERM and SIGINT as a request to stop in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopSignals:
    """Passes the first request on to whoever is attached, also if it came before there was anyone."""

    def __init__(self) -> None:
        self._on_stop: Callable[[], None] | None = None
        # A plain boolean: an Event's lock can't be taken twice, and one signal may interrupt the handler of another.
        self._asked = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals, and give them back; outside the main thread, which alone may do that, nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def attach(self, on_stop: Callable[[], None]) -> None:
        """`on_stop` is called from the signal handler, once for each signal."""
        self._on_stop = on_stop
        if self._asked:
            on_stop()

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True
        if self._on_stop is not None:
            self._on_stop()
