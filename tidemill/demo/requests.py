"""How the server answered: totals, failures, and the least in any second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """`during_switch`: sent from the successor's first progress report until the predecessor had retired; None: no switch."""

    total: int
    failed: int
    during_switch: int | None
    failed_during_switch: int | None
    min_per_s: float | None
    """The fewest answered in one whole second; None for less than three seconds."""
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None


def count_requests(requests: pa.Table, switch: tuple[float, float] | None) -> RequestCounts:
    """Count the players' requests. `switch`: begin and end in wall time."""
    sent, latency = requests["sent_at"].to_numpy(), requests["latency_s"].to_numpy()
    good = requests["status"].to_numpy() == 200
    inside = None if switch is None else (sent >= switch[0]) & (sent <= switch[1])
    p50, p99, highest = np.quantile(latency[good], (0.5, 0.99, 1.0)) * 1000 if good.any() else (None, None, None)
    return RequestCounts(
        total=len(sent),
        failed=int(np.count_nonzero(~good)),
        during_switch=None if inside is None else int(np.count_nonzero(inside)),
        failed_during_switch=None if inside is None else int(np.count_nonzero(inside & ~good)),
        min_per_s=_least_per_second((sent + latency)[good]),
        p50_ms=None if p50 is None else float(p50),
        p99_ms=None if p99 is None else float(p99),
        max_ms=None if highest is None else float(highest),
    )


def _least_per_second(answered_at: np.ndarray) -> float | None:
    """Over the whole seconds between the first and the last answer."""
    if not len(answered_at):
        return None
    seconds = (answered_at - answered_at.min()).astype(np.int64)
    counts = np.bincount(seconds)[:-1]
    return float(counts.min()) if len(counts) >= 3 else None
