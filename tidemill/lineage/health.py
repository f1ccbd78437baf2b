"""Whether a successor is as good as its predecessor, on the same events: a pure comparison of their progressive metrics (D8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidemill.contracts.progress import WindowFigures

_SAME_EVENTS = 0.02
"""Two windows hold the same events if their numbers of rows differ by no more than this share: late rows may. More means that one
lineage began, or lost a run, in the middle of the window."""
COMPARED = ("auc", "normalized_entropy", "calibration")


class HealthState(StrEnum):
    """UNKNOWN: not enough events that both have scored."""

    HEALTHY = "healthy"
    WORSE = "worse"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Health:
    """What a comparison found. `num_events`: over how many events."""

    state: HealthState
    reason: str
    num_events: int = 0


NOT_COMPARED = Health(HealthState.UNKNOWN, "not compared")


@dataclass(frozen=True, slots=True)
class HealthBounds:
    """How much worse a successor may be, over at least `min_events` events; see config.train.HealthConfig."""

    min_events: int = 10000
    auc: float = 0.005
    normalized_entropy: float = 0.01
    calibration: float = 0.05


def compare(own: Iterable[WindowFigures], successor: Iterable[WindowFigures], bounds: HealthBounds) -> Health:
    """How the successor does on the newest windows that both lineages have, just as many as give the minimum of events. Pure.

    Windows are matched by start and stop; each one counts by its rows. Exactly at a bound is healthy.
    """
    pairs = _newest(_same_events(own, successor), bounds.min_events)
    num_events = sum(_rows(pair) for pair in pairs)
    if num_events < bounds.min_events or not pairs:
        return Health(HealthState.UNKNOWN, f"only {num_events} of {bounds.min_events} events to compare by", num_events)
    ours, theirs = _means([mine for mine, _ in pairs], pairs), _means([other for _, other in pairs], pairs)
    worse_by = {
        "auc": ours["auc"] - theirs["auc"],
        "normalized_entropy": theirs["normalized_entropy"] - ours["normalized_entropy"],
        "calibration": theirs["miscalibration"] - ours["miscalibration"],
    }
    for name in COMPARED:
        # Written so that a NaN, which no document can hold, would mean "worse".
        if not worse_by[name] <= getattr(bounds, name) + 1e-12:
            reason = f"its {name} over {num_events} events is {theirs[name]:.4f}, this run's {ours[name]:.4f}: worse than allowed"
            return Health(HealthState.WORSE, f"successor: {reason}", num_events)
    return Health(HealthState.HEALTHY, f"not worse over {num_events} events", num_events)


Pair = tuple[WindowFigures, WindowFigures]


def _same_events(own: Iterable[WindowFigures], successor: Iterable[WindowFigures]) -> list[Pair]:
    """Windows that both have, with all that is compared, over the same events; oldest first."""
    theirs = {(window.start, window.stop): window for window in successor if _is_whole(window)}
    pairs = [(mine, theirs[mine.start, mine.stop]) for mine in own if _is_whole(mine) and (mine.start, mine.stop) in theirs]
    return sorted((pair for pair in pairs if _are_same(pair)), key=lambda pair: pair[0].start)


def _is_whole(window: WindowFigures) -> bool:
    return window.rows > 0 and all(name in window.metrics for name in COMPARED)


def _are_same(pair: Pair) -> bool:
    mine, other = pair
    return abs(mine.rows - other.rows) <= _SAME_EVENTS * max(mine.rows, other.rows)


def _rows(pair: Pair) -> int:
    return min(pair[0].rows, pair[1].rows)


def _newest(pairs: Sequence[Pair], min_events: int) -> list[Pair]:
    chosen: list[Pair] = []
    for pair in reversed(pairs):
        if sum(map(_rows, chosen)) >= min_events:
            break
        chosen.append(pair)
    return chosen


def _means(windows: Sequence[WindowFigures], pairs: Sequence[Pair]) -> dict[str, float]:
    """Means over the windows, each by its rows. `miscalibration`: how far the calibration lies from 1."""
    weights = [_rows(pair) for pair in pairs]
    values = {name: [window.metrics[name] for window in windows] for name in COMPARED}
    values["miscalibration"] = [abs(value - 1.0) for value in values["calibration"]]
    return {name: sum(w * v for w, v in zip(weights, column, strict=True)) / sum(weights) for name, column in values.items()}
