"""What a demo knows of itself while it runs: one object that the director's threads write and a live view reads."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """A committed release. `rows`: changed embedding rows, all tables."""

    sequence: int
    step: int
    rows: int
    committed_at: float


@dataclass(slots=True)
class LineageState:
    """One lineage, as its documents show it. Event times are Unix seconds, lags are event time behind the players."""

    name: str
    status: str = "preparing"
    """preparing, running, down (its trainer doesn't run), retired, ended."""
    step: int | None = None
    watermark: float | None = None
    released_watermark: float | None = None
    lag_s: float | None = None
    sequence: int | None = None
    """Newest committed release."""
    releases: deque[ReleaseState] = field(default_factory=lambda: deque(maxlen=8))
    """The newest ones, the newest last."""
    restarts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Progressive metrics of the last window."""
    first_progress_at: float | None = None
    """Wall time at which its progress.json was first seen."""


@dataclass(slots=True)
class ServerState:
    """What the server says it serves."""

    url: str | None = None
    ready: bool = False
    lineage: str | None = None
    sequence: int | None = None
    watermark: float | None = None
    behind_s: float | None = None
    """Wall seconds between the newest event and the newest that is served, about."""
    error: str | None = None


@dataclass(slots=True)
class DemoState:
    """Everything that a live view shows.

    Threading: one watcher thread replaces values, the director adds notes; readers may see a mixture of two moments, never a torn
    value.
    """

    speed: float
    started_at: float = field(default_factory=time.time)
    phase: str = "beginning"
    event_time: float | None = None
    boundary: float | None = None
    """Midnight at the end of day T, in event time."""
    lineages: dict[str, LineageState] = field(default_factory=dict)
    server: ServerState = field(default_factory=ServerState)
    requests: int = 0
    failed: int = 0
    impressions: int = 0
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    last_error: str | None = None
    auc_served: float | None = None
    """On the random impressions of about the last hours, of the model as it was served."""
    auc_frozen: float | None = None
    """On the same, of the snapshot of day T-1."""
    kills: int = 0
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    samples: list[dict[str, float | str | None]] = field(default_factory=list)
    """One a second and lineage, for plots: at, event_time, lineage, watermark, released_watermark, lag_s."""

    def line(self) -> str:
        """How it stands, in one line."""
        shown = "" if self.event_time is None else f"event time {datetime.fromtimestamp(self.event_time, UTC):%m-%d %H:%M}, "
        parts = [f"{shown}{self.requests} requests, {self.failed} failed"]
        for lineage in list(self.lineages.values()):
            if lineage.status not in ("preparing", "retired"):
                lag = "" if lineage.lag_s is None else f" {lineage.lag_s / self.speed:.1f} s behind, release {lineage.sequence}"
                parts.append(f"{lineage.name.rpartition('/')[2]} {lineage.status}{lag}")
        if self.auc_served is not None and self.auc_frozen is not None:
            parts.append(f"AUC served {self.auc_served:.3f}, frozen {self.auc_frozen:.3f}")
        return "; ".join(parts)

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.started_at
