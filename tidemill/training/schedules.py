"""Learning rates as pure functions of how far training has come, so that resuming needs nothing but the step."""

from __future__ import annotations

import math
from typing import Any

from tidemill.config.optimizer import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestartsLR,
    ExponentialDecayLR,
    ManualStepLR,
    Scheduled,
)


def learning_rate(config: Scheduled, steps: int, passes: int) -> float:
    """The rate of the step that follows `steps` steps and `passes` whole passes. A base rate of 0 stays 0."""
    base = float(config.optimizer[1].lr)
    schedule = config.schedule[1]
    if base == 0:
        return 0.0
    return _rate(schedule, base, passes if getattr(schedule, "by_epoch", False) else steps)


def _rate(schedule: Any, base: float, t: int) -> float:
    match schedule:
        case ExponentialDecayLR():
            return _exponential(schedule, base, t)
        case ManualStepLR():
            return _manual(schedule, base, t)
        case CosineAnnealingLR():
            return _cosine(schedule, base, t)
        case CosineAnnealingWarmRestartsLR():
            return _restarts(schedule, base, t)
        case _:
            return base


def _exponential(schedule: ExponentialDecayLR, base: float, t: int) -> float:
    if t < schedule.warmup_size:
        return _between(schedule.warmup_learning_rate, base, t / schedule.warmup_size)
    exponent = (t - schedule.warmup_size) / schedule.decay_size
    if schedule.staircase:
        exponent = math.floor(exponent)
    return max(base * schedule.decay_factor**exponent, schedule.min_learning_rate)


def _manual(schedule: ManualStepLR, base: float, t: int) -> float:
    passed = sum(1 for size in schedule.schedule_sizes if t > size)
    if passed:
        return schedule.learning_rates[passed - 1]
    if schedule.warmup and schedule.schedule_sizes and schedule.schedule_sizes[0] > 0:
        return _between(base, schedule.learning_rates[0], t / schedule.schedule_sizes[0])
    return base


def _cosine(schedule: CosineAnnealingLR, base: float, t: int) -> float:
    if t < schedule.warmup_size:
        return _between(schedule.warmup_learning_rate, base, t / schedule.warmup_size)
    return _half_cosine(base, schedule.min_learning_rate, min((t - schedule.warmup_size) / schedule.T_max, 1.0))


def _restarts(schedule: CosineAnnealingWarmRestartsLR, base: float, t: int) -> float:
    if t < schedule.warmup_size:
        return _between(schedule.warmup_learning_rate, base, t / schedule.warmup_size)
    rest, period = t - schedule.warmup_size, schedule.T_0
    if schedule.T_mult == 1:
        rest %= period
    while rest >= period:
        rest -= period
        period *= schedule.T_mult
    return _half_cosine(base, schedule.min_learning_rate, rest / period)


def _between(first: float, last: float, share: float) -> float:
    return first + (last - first) * share


def _half_cosine(base: float, minimum: float, share: float) -> float:
    return minimum + (base - minimum) * (1 + math.cos(math.pi * share)) / 2
