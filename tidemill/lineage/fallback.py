"""Whether serving goes back to the lineage before, after a switch, and forward again: pure decisions over deployments (D8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidemill.contracts.lineage import Deployment

MAX_RETURNS = 1
"""After so many returns to a lineage that serving had left, the next time it stays away: two turns there and back aren't news, but
a lineage that can't be relied on, and it takes a person to trust it again."""


WELL = "nothing is wrong"


class Way(StrEnum):
    """KEEP what is served. BACK: to the predecessor's last release. FORWARD: to the lineage that was left."""

    KEEP = "keep"
    BACK = "back"
    FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class FallbackBounds:
    """Wall time, in seconds. `watch_s`: how long after the switch a lineage may be left; `dead_s`, `bad_s`: for how long it must
    have been dead, or its publication paused by the quality gate; `well_s`: for how long well, to be returned to."""

    watch_s: float
    dead_s: float
    bad_s: float
    well_s: float


@dataclass(frozen=True, slots=True)
class Condition:
    """How a lineage's stream does, as its watcher has seen it: for how many seconds it has been dead, has been paused by its
    quality gate, has been well; None: it isn't. `gone`: it ended, and nobody starts it again. All None: not known yet."""

    dead_s: float | None = None
    bad_s: float | None = None
    well_s: float | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class ServingState:
    """What is served, as deployments tell. `followed`: the lineage whose releases were followed last; `before`: the one before it;
    `left`: the cycle has gone back from `followed`; `by_person`: a person deployed last; `returns`: how often the cycle has gone
    forward to `followed` again."""

    followed: str
    before: str | None
    left: bool
    by_person: bool
    returns: int
    switched_at: float


def serving_state(history: Sequence[Deployment]) -> ServingState | None:
    """What all deployments, in order, come to; None if no lineage was ever followed."""
    followed = [deployment for deployment in history if deployment.pin_sequence is None]
    if not followed:
        return None
    lineage, newest = followed[-1].lineage, history[-1]
    before = [deployment.lineage for deployment in followed if deployment.lineage < lineage]
    own = [deployment for deployment in followed if deployment.lineage == lineage]
    return ServingState(
        followed=lineage,
        before=before[-1] if before else None,
        left=newest.pin_sequence is not None,
        by_person=newest.run_id is None,
        returns=sum(deployment.run_id is not None for deployment in own[1:]),
        switched_at=own[0].created_at,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be done with serving, and why."""

    way: Way
    reason: str


def decide_turn(state: ServingState, condition: Condition, bounds: FallbackBounds, now: float) -> Turn:
    """Whether serving leaves the lineage that it follows, or returns to it. Pure.

    What a person deployed stays. It goes back if the lineage is dead or bad within `watch_s` of its switch (later its own last good
    release, which servers keep, is the fresher one), and forward once it has been well for `well_s`, `MAX_RETURNS` times.
    `now`: by the clock that stamps deployments.
    """
    if state.by_person:
        return Turn(Way.KEEP, "a person deployed what is served")
    if state.left:
        return _forward(state, condition, bounds)
    problem = _problem(condition, bounds)
    if not problem:
        return Turn(Way.KEEP, WELL)
    problem = f"{state.followed} {problem}"
    if state.before is None:
        return Turn(Way.KEEP, f"{problem}, but no lineage was served before it")
    if now - state.switched_at > bounds.watch_s:
        return Turn(Way.KEEP, f"{problem}, but later than {bounds.watch_s:g} s after its switch: its own last release stays")
    return Turn(Way.BACK, f"{problem}: back to the last release of {state.before}")


def _problem(condition: Condition, bounds: FallbackBounds) -> str:
    if condition.gone:
        return "has ended, and isn't started again"
    if condition.dead_s is not None and condition.dead_s >= bounds.dead_s:
        return f"has been dead for {bounds.dead_s:g} s"
    if condition.bad_s is not None and condition.bad_s >= bounds.bad_s:
        return f"has been paused by its quality gate for {bounds.bad_s:g} s"
    return ""


def _forward(state: ServingState, condition: Condition, bounds: FallbackBounds) -> Turn:
    if state.returns >= MAX_RETURNS:
        return Turn(
            Way.KEEP, f"{state.followed} was left again after it had been returned to: promote it by hand, or run the next date"
        )
    if condition.well_s is None or condition.well_s < bounds.well_s:
        return Turn(Way.KEEP, f"{state.followed} has not been well for {bounds.well_s:g} s")
    return Turn(Way.FORWARD, f"{state.followed} has been well for {bounds.well_s:g} s: forward again")
