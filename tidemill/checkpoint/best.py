"""Which checkpoint is the best, by the evaluations that training has written beside its checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

import orjson

from tidemill.contracts import layout
from tidemill.errors import NotFoundError
from tidemill.storage.base import Storage

log = logging.getLogger(__name__)


def best_step(storage: Storage, metric: str, *, larger: bool, steps: Collection[int]) -> int | None:
    """The step, among those given, whose evaluation is best; the newest of equals; None if none was evaluated.

    Of several evaluations of a step the last counts. Lines that can't be read, of other steps, and values that aren't numbers
    are passed over.
    """
    try:
        lines = storage.read(layout.BEST_EVALUATIONS).splitlines()
    except NotFoundError:
        return None
    values: dict[int, float] = {}
    for line in lines:
        found = _value(line, metric)
        if found is not None and found[0] in steps:
            values[found[0]] = found[1] if larger else -found[1]
    usable = {step: value for step, value in values.items() if not math.isnan(value)}
    return max(usable, key=lambda step: (usable[step], step), default=None)


def evaluation_of(storage: Storage, step: int) -> dict[str, float]:
    """The metrics of a step's last evaluation by training; without undefined ones. Empty if there is none."""
    try:
        lines = storage.read(layout.BEST_EVALUATIONS).splitlines()
    except NotFoundError:
        return {}
    found: dict[str, float] = {}
    for line in lines:
        try:
            body = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(body, dict) and body.pop("global_step", None) == step:
            found = {name: float(value) for name, value in body.items() if isinstance(value, int | float)}
    return found


def record_evaluation(storage: Storage, line: bytes) -> None:
    """Append an evaluation's line (`{"global_step": N, metric: value, ...}`). One writer at a time."""
    try:
        before = storage.read(layout.BEST_EVALUATIONS)
    except NotFoundError:
        before = b""
    storage.write(layout.BEST_EVALUATIONS, before, line)


def _value(line: bytes, metric: str) -> tuple[int, float] | None:
    """(step, value) of a line; NaN for a metric that is undefined or missing there."""
    try:
        body = orjson.loads(line)
        value = body.get(metric)
        return int(body["global_step"]), math.nan if value is None else float(value)
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("%s: a line isn't an evaluation: %.80r", layout.BEST_EVALUATIONS, line)
        return None
