"""Text for people on stderr; facts for machines as events, one JSON object a line."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import orjson

from tidemill.clock import Clock, SystemClock

log = logging.getLogger("tidemill")

_sink_lock = threading.Lock()
_sink: EventLog | None = None


class EventLog:
    """Appends events to a file; each line is `{"at": unix seconds, "event": name, ...}`, written whole by one call.

    Threading: `write` may be called from any thread.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None, **constant: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._clock = clock or SystemClock()
        self._constant = constant

    def write(self, name: str, fields: dict[str, Any]) -> None:
        line = {"at": self._clock.time(), "event": name, **self._constant, **fields}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))

    def close(self) -> None:
        self._file.close()


def set_up(level: int = logging.INFO, *, rank: int = 0) -> None:
    """Send the log to stderr; ranks above 0 show warnings only."""
    handler = logging.StreamHandler()
    prefix = f"[rank {rank}] " if rank else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {prefix}%(message)s", datefmt="%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(level if rank == 0 else max(level, logging.WARNING))
    log.propagate = False


def send_events_to(sink: EventLog | None) -> None:
    """Where `event` writes from now on in this process; None: events are dropped."""
    global _sink
    with _sink_lock:
        _sink = sink


def event(name: str, **fields: Any) -> None:
    """Record a fact under a documented name ("checkpoint.saved"). Costs one small write; never raises for lack of a sink."""
    sink = _sink
    if sink is not None:
        sink.write(name, fields)
