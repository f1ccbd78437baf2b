"""How the server answered: totals, failures, and the least in any second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

WINDOW_S = 5.0
_STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """`during_switch`: sent from the successor's first progress report until the predecessor had retired; None: no switch."""

    total: int
    failed: int
    during_switch: int | None
    failed_during_switch: int | None
    min_per_s: float | None
    """Answered ones, the least over any `WINDOW_S` seconds; None for less time than that."""
    min_in_one_s: int | None
    """The least in a whole second."""
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    reasons: tuple[str, ...] = ()
    """Why requests failed: for each status, how many, when the first was sent, and what it was told."""

    @property
    def verdict(self) -> str | None:
        """What isn't good about them, with the reasons; None if all were answered."""
        if self.total and not self.failed:
            return None
        return "; ".join([f"{self.failed} of {self.total} requests failed", *self.reasons])


def count_requests(requests: pa.Table, switch: tuple[float, float] | None) -> RequestCounts:
    """Count the players' requests. `switch`: begin and end in wall time."""
    sent, latency = requests["sent_at"].to_numpy(), requests["latency_s"].to_numpy()
    good = requests["status"].to_numpy() == 200
    inside = None if switch is None else (sent >= switch[0]) & (sent <= switch[1])
    answered_at = (sent + latency)[good]
    least = least_in(answered_at, WINDOW_S)
    p50, p99, highest = np.quantile(latency[good], (0.5, 0.99, 1.0)) * 1000 if good.any() else (None, None, None)
    return RequestCounts(
        total=len(sent),
        failed=int(np.count_nonzero(~good)),
        during_switch=None if inside is None else int(np.count_nonzero(inside)),
        failed_during_switch=None if inside is None else int(np.count_nonzero(inside & ~good)),
        min_per_s=None if least is None else least / WINDOW_S,
        min_in_one_s=least_in(answered_at, 1.0),
        p50_ms=None if p50 is None else float(p50),
        p99_ms=None if p99 is None else float(p99),
        max_ms=None if highest is None else float(highest),
        reasons=_reasons(requests.filter(pa.array(~good)), float(sent.min()) if len(sent) else 0.0, switch),
    )


def _reasons(failed: pa.Table, begin: float, switch: tuple[float, float] | None) -> tuple[str, ...]:
    """A line for each status among failed requests, the most frequent one first. `begin`: when the first of all was sent."""
    rows = sorted(failed.select(["status", "sent_at", "error"]).to_pylist(), key=lambda row: row["sent_at"])
    told = []
    for status, times in Counter(row["status"] for row in rows).most_common():
        first = next(row for row in rows if row["status"] == status)
        what = f"status {status}" if status else "without an answer"
        during = ", during the switch" if switch is not None and switch[0] <= first["sent_at"] <= switch[1] else ""
        told.append(f"{times} {what}, first {first['sent_at'] - begin:.1f} s after the first request{during}: {first['error']}")
    return tuple(told)


def least_in(at: np.ndarray, window_s: float) -> int | None:
    """The fewest of these moments in any window of so many seconds that lies between the first and the last; None if none does."""
    if not len(at) or at.max() - at.min() < window_s:
        return None
    ordered = np.sort(at)
    starts = np.arange(ordered[0], ordered[-1] - window_s + 1e-9, _STEP_S)
    return int((np.searchsorted(ordered, starts + window_s) - np.searchsorted(ordered, starts)).min())
