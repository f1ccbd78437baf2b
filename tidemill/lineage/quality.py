"""Whether a stream's own windows say that something is wrong with its data or its model: pure, and a watch that remembers (D8)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidemill.contracts.progress import WindowFigures
from tidemill.logs import event, log


@dataclass(frozen=True, slots=True)
class QualityBounds:
    """How much worse than its references a window of at least `min_events` rows may be; see config.train.QualityConfig."""

    min_events: int
    auc: float
    normalized_entropy: float
    calibration: float
    hold_s: float = 0.0


Reference = Mapping[str, float]
"""Metric -> value; what is missing isn't compared."""

_SAMPLE = 2
"""A sample that the daily model has scored counts from `min_events` over this on: it is never all of a window, but fewer rows would
be too few to tell bad from chance."""
_FRESH = 4
"""A model that doesn't learn ages (on the click world by a tenth of AUC a day): only so many of the newest good windows tell
what is usual for it, and it may be worse than that by twice as much as a model that learns."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Some events of a window: the training model's figures (`own`), and the frozen daily model's, on the very same events."""

    rows: int
    own: Reference
    daily: Reference


def problems(window: WindowFigures, references: Mapping[str, Reference], bounds: QualityBounds) -> list[str]:
    """What is wrong with a window, by each reference (its name -> its figures); [] if nothing is. Pure.

    A window without an AUC holds labels of one kind only, which is wrong wherever a reference has one. Exactly at a bound is good.
    """
    found = []
    for name, reference in references.items():
        for metric in ("auc", "normalized_entropy", "calibration"):
            if metric not in reference:
                continue
            if metric not in window.metrics:
                found.append(f"{metric} is undefined: the labels are all alike")
            elif _worse_by(metric, window.metrics[metric], reference[metric]) > getattr(bounds, metric) + 1e-12:
                found.append(f"{metric} is {window.metrics[metric]:.4f}, that of {name} {reference[metric]:.4f}")
    return list(dict.fromkeys(found))


def sample_problems(sample: Sample, usual: Reference, bounds: QualityBounds) -> list[str]:
    """What is wrong with a window by the daily model, which doesn't learn: [] if nothing is. Pure.

    Against it on the same events: the training model has become worse. Against its `usual` figures, of good windows: the data
    have changed, also if the training model has learnt them by now. Calibration isn't held against its past: it follows the rate
    of positives, which a frozen model can't.
    """
    found = []
    for metric in ("auc", "normalized_entropy", "calibration"):
        if metric in sample.own and metric in sample.daily:
            own, daily = sample.own[metric], sample.daily[metric]
            worse = abs(own - 1.0) - abs(daily - 1.0) if metric == "calibration" else _worse_by(metric, own, daily)
            if worse > getattr(bounds, metric) + 1e-12:
                found.append(f"{metric} is {own:.4f}, the daily model's on the same events {daily:.4f}")
    ranked = {metric: value for metric, value in usual.items() if metric != "calibration"}
    wide = replace(bounds, auc=2 * bounds.auc, normalized_entropy=2 * bounds.normalized_entropy)
    window = WindowFigures(start=0.0, stop=0.0, rows=sample.rows, metrics=dict(sample.daily))
    return found + [f"the daily model's {problem}" for problem in problems(window, {"its good windows": ranked}, wide)]


def _worse_by(metric: str, value: float, reference: float) -> float:
    if metric == "auc":
        return reference - value
    if metric == "normalized_entropy":
        return value - reference
    return abs(value - reference)


def mean_figures(windows: Sequence[WindowFigures]) -> dict[str, float]:
    """The mean of each metric over the windows that have it, by rows."""
    names = dict.fromkeys(name for window in windows for name in window.metrics)
    means = {}
    for name in names:
        having = [window for window in windows if name in window.metrics]
        means[name] = sum(window.rows * window.metrics[name] for window in having) / sum(window.rows for window in having)
    return means


class QualityWatch:
    """Looks at each window that is over: publication pauses at a bad one, with one alarm, and goes on once all have been good for
    `hold_s` of event time. A model may learn a poison within a few windows and then look good while it lasts, so `hold_s` is to be
    longer than what is to be sat out.

    A window is compared with the mean of the newest `reference_windows` good ones, with the daily model's evaluation (`frozen`),
    if there is one, and with what the daily model makes of a sample of the same events (`sample_problems`), if it is asked.
    Windows of fewer rows than the minimum say nothing, and those of a pause don't become the reference. The same on all ranks, if
    they see the same windows; `tells`: rank 0, which writes the alarm. `cadence.Stateful`; belongs to the training thread.
    """

    def __init__(
        self, bounds: QualityBounds, *, reference_windows: int, frozen: Reference | None = None, tells: bool = True
    ) -> None:
        self._bounds = bounds
        self._good: deque[WindowFigures] = deque(maxlen=reference_windows)
        self._good_daily: deque[WindowFigures] = deque(maxlen=_FRESH)
        self._frozen = dict(frozen or {})
        self._tells = tells
        self._bad_since: float | None = None
        self._good_since: float | None = None

    @property
    def paused(self) -> bool:
        """Whether publication is to wait."""
        return self._bad_since is not None

    def observe(self, window: WindowFigures, sample: Sample | None = None) -> None:
        """Take note of a window that is over; in the order of event time."""
        if window.rows < self._bounds.min_events:
            return
        if sample is not None and sample.rows * _SAMPLE < self._bounds.min_events:
            sample = None
        found = problems(window, self._references(), self._bounds)
        if sample is not None:
            found += sample_problems(sample, mean_figures(self._good_daily), self._bounds)
        if not self.paused:
            if found:
                self._bad_since = window.start
                self._tell_bad(window, found)
            else:
                self._good.append(window)
                if sample is not None:
                    daily = WindowFigures(start=window.start, stop=window.stop, rows=sample.rows, metrics=dict(sample.daily))
                    self._good_daily.append(daily)
        elif found:
            self._good_since = None
        else:
            self._resume_if_held(window)

    def _resume_if_held(self, window: WindowFigures) -> None:
        if self._good_since is None:
            self._good_since = window.start
        if window.stop - self._good_since >= self._bounds.hold_s:
            self._tell_good(window)
            self._bad_since = self._good_since = None

    def state(self) -> dict[str, Any]:
        return {
            "good": [window.model_dump(mode="json") for window in self._good],
            "good_daily": [window.model_dump(mode="json") for window in self._good_daily],
            "frozen": self._frozen,
            "bad_since": self._bad_since,
            "good_since": self._good_since,
        }

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """All ranks had the same; every rank takes that of the first."""
        for state in states[:1]:
            self._good.extend(WindowFigures.model_validate(window) for window in state["good"])
            self._good_daily.extend(WindowFigures.model_validate(window) for window in state.get("good_daily", ()))
            self._frozen = dict(state["frozen"])
            self._bad_since, self._good_since = state["bad_since"], state["good_since"]

    def _references(self) -> dict[str, Reference]:
        own: dict[str, Reference] = {"the good windows before it": mean_figures(self._good)} if self._good else {}
        return {**own, "the daily model": self._frozen} if self._frozen else own

    def _tell_bad(self, window: WindowFigures, found: Sequence[str]) -> None:
        if self._tells:
            reason = "; ".join(found)
            log.error("quality: window [%.0f, %.0f) is bad, publication pauses: %s", window.start, window.stop, reason)
            event("quality.alarm", start=window.start, stop=window.stop, rows=window.rows, reason=reason)

    def _tell_good(self, window: WindowFigures) -> None:
        if self._tells and self._bad_since is not None:
            log.info("quality: window [%.0f, %.0f) is good again, publication goes on", window.start, window.stop)
            event("quality.good", start=window.start, stop=window.stop, bad_since=self._bad_since)
