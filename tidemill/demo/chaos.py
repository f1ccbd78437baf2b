"""SIGKILL at random moments, the same ones for the same seed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

_RETRY_S = 0.25
_SOON_S = (0.5, 2.5)


class Chaos:
    """Kills a stream trainer `kills` times: all but the last in the course of the day, each somewhere in its own part of it, and
    the last one, which hits the surviving lineage, after `kill_soon`. A trainer that is down at that moment is awaited.

    `kill` returns None if there was nothing to kill.
    """

    def __init__(self, kill: Callable[[], str | None], seed: int, day_s: float, kills: int) -> None:
        rng = np.random.default_rng([seed, 11])
        parts = np.linspace(0.1, 0.9, kills)
        self.moments_s: list[float] = [float(day_s * rng.uniform(a, b)) for a, b in pairwise(parts)]
        self.last_s = float(rng.uniform(*_SOON_S))
        self._kill = kill
        self._soon = threading.Event()
        self._done = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def start(self) -> None:
        """The day begins now."""
        self._thread.start()

    def kill_soon(self) -> None:
        """Let the last kill come within a few seconds."""
        self._soon.set()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        self._soon.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        began = time.monotonic()
        for moment in self.moments_s:
            self._kill_at(began + moment)
        self._soon.wait()
        self._kill_at(time.monotonic() + self.last_s)
        self._done.set()

    def _kill_at(self, moment: float) -> None:
        if self._stopping.wait(max(0.0, moment - time.monotonic())):
            return
        while self._kill() is None and not self._stopping.wait(_RETRY_S):
            pass
