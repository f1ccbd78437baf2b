"""The emulator's clock: the machine's, set forward by a control call. How far is kept on disk, over restarts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tidemill.testing.maxcompute.files import write_whole


class VirtualClock:
    """Runs as the machine's clock does, `advance` seconds ahead of it. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ahead_s = float(path.read_text()) if path.exists() else 0.0

    def time(self) -> float:
        return time.time() + self._ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass at once. Raises ValueError for negative seconds."""
        if seconds < 0:
            raise ValueError(f"can't advance by {seconds} s")
        with self._lock:
            self._ahead_s += seconds
            write_whole(self._path, repr(self._ahead_s).encode())
