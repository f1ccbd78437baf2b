"""When a stream retires in favour of its successor, and when serving may switch: pure decisions (D8)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tidemill.config.check import same_folder
from tidemill.config.env import SUCCESSOR_DIR, TOLERANCE_SECS
from tidemill.contracts.progress import ProgressReport
from tidemill.errors import ConfigError
from tidemill.lineage.health import NOT_COMPARED, Health, HealthState
from tidemill.lineage.liveness import Liveness

Policy = Literal["caught_up", "served", "healthy"]
POLICIES: tuple[Policy, ...] = ("caught_up", "served", "healthy")

_DATED_FOLDER = re.compile(r"^(?P<root>.*)/lineages/(?P<date>\d{8})/*$")


class Verdict(StrEnum):
    """MARK: the successor has caught up (`healthy`: and is well), and the predecessor fixes its hand-over mark."""

    NONE = "none"
    MARK = "mark"
    HAND_OVER = "hand_over"


@dataclass(frozen=True, slots=True)
class OwnProgress:
    """The deciding run's own state. `data_ts`: the quorum's event time. `handover_mark`: data_ts as it was when the successor
    was first seen within the tolerance; None: that hasn't happened."""

    data_ts: float | None
    run_id: str | None = None
    handover_mark: float | None = None


@dataclass(frozen=True, slots=True)
class SuccessorView:
    """What could be read of another lineage's progress.json. `progress` None: nothing usable, and `problem` says why."""

    progress: ProgressReport | None
    liveness: Liveness = Liveness.UNKNOWN
    problem: str = "no progress.json yet"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Whether the servers serve the successor, and how that is known."""

    confirmed: bool
    reason: str


NOT_CONFIRMED = Confirmation(False, "no server has been looked at")


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one check. `lag_s`: by how much the successor trails; negative: it is ahead; None: unknown."""

    verdict: Verdict
    reason: str
    lag_s: float | None = None


def decide(
    own: OwnProgress,
    successor: SuccessorView,
    policy: Policy,
    tolerance_s: float,
    serving: Confirmation = NOT_CONFIRMED,
    health: Health = NOT_COMPARED,
) -> Decision:
    """The decision of one check. Pure; never raises.

    `caught_up`: hand over once the successor's data_ts >= own - tolerance; a successor that shows a heartbeat must be alive.
    `served`: mark at the first such check (there the heartbeat is required), then hand over once serving is confirmed, also if
    this run was started after the confirmation. `healthy`: as `served`, but mark only a successor that is found healthy, and don't
    hand over to one that is found worse meanwhile.
    """
    lag_s = _lag(own, successor)
    if own.data_ts is None:
        return Decision(Verdict.NONE, "this run has no event time yet")
    if policy == "healthy" and health.state is HealthState.WORSE:
        return Decision(Verdict.NONE, health.reason, lag_s)
    if policy != "caught_up" and serving.confirmed:
        return Decision(Verdict.HAND_OVER, serving.reason, lag_s)
    problem = _not_caught_up(own, successor, policy, tolerance_s, lag_s)
    if policy == "caught_up":
        return Decision(Verdict.NONE, problem, lag_s) if problem else Decision(Verdict.HAND_OVER, "caught up", lag_s)
    if own.handover_mark is not None:
        return Decision(Verdict.NONE, f"marked at {own.handover_mark:.3f}; {serving.reason}", lag_s)
    if not problem and policy == "healthy" and health.state is not HealthState.HEALTHY:
        problem = health.reason
    return Decision(Verdict.NONE, problem, lag_s) if problem else Decision(Verdict.MARK, "caught up; waiting to be served", lag_s)


def _lag(own: OwnProgress, successor: SuccessorView) -> float | None:
    if own.data_ts is None or successor.progress is None:
        return None
    return own.data_ts - successor.progress.data_ts


def _not_caught_up(own: OwnProgress, successor: SuccessorView, policy: Policy, tolerance_s: float, lag_s: float | None) -> str:
    """Why the successor doesn't count as caught up; "" if it does."""
    progress = successor.progress
    if progress is None or lag_s is None:
        return f"successor: {successor.problem}"
    if progress.run_id is not None and progress.run_id == own.run_id:
        return "the successor's progress.json is this run's own"
    if progress.heartbeat is None:
        if policy != "caught_up":
            return f"the successor shows no heartbeat, which policy {policy!r} needs"
    elif successor.liveness is not Liveness.ALIVE:
        return f"the successor isn't known to be alive ({successor.liveness})"
    # Written so that a NaN, which no edge lets through, would mean "behind".
    return "" if lag_s <= tolerance_s else f"the successor trails by {lag_s:.1f} s, more than {tolerance_s:g} s"


def validate_handover(successor_dir: str, own_dir: str, tolerance_s: object) -> float:
    """Check the hand-over's settings at start-up, on every rank (A7); the tolerance as a float.

    Raises ConfigError that names the variable: a successor folder that is the run's own or an older lineage of its root, or a
    tolerance that isn't a finite number >= 0 (texts of numbers count as numbers). `successor_dir` empty: hand-over is off.
    """
    tolerance = _tolerance(tolerance_s)
    if successor_dir and same_folder(successor_dir, own_dir):
        raise ConfigError(f"{SUCCESSOR_DIR}: {successor_dir} is this run's own folder ({own_dir}); name the next day's")
    if successor_dir and _is_older(successor_dir, own_dir):
        raise ConfigError(f"{SUCCESSOR_DIR}: {successor_dir} is of an earlier date than this run's {own_dir}; name the next day's")
    return tolerance


def _is_older(successor_dir: str, own_dir: str) -> bool:
    """Whether both are lineages of one root, and the successor's date is the earlier one."""
    successor, own = _DATED_FOLDER.match(successor_dir), _DATED_FOLDER.match(own_dir)
    if successor is None or own is None or not same_folder(successor["root"], own["root"]):
        return False
    return successor["date"] < own["date"]


def _tolerance(value: object) -> float:
    message = f"{TOLERANCE_SECS}: must be a finite number of seconds >= 0, not {value!r:.60}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(message)
    try:
        tolerance = float(value)
    except (ValueError, OverflowError):
        raise ConfigError(message) from None
    if not math.isfinite(tolerance) or tolerance < 0:
        raise ConfigError(message)
    return tolerance


@dataclass(frozen=True, slots=True)
class PredecessorView:
    """The lineage that is served now: whether it has retired, whether its stream is alive, and its last progress."""

    retired: bool
    liveness: Liveness
    progress: ProgressReport | None


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether serving may switch to the successor now, and why (not)."""

    due: bool
    reason: str


def switch_due(predecessor: PredecessorView | None, successor: SuccessorView, policy: Policy, tolerance_s: float) -> Switch:
    """Whether the deployer may switch (D8). Pure. `predecessor` None: nothing is served yet.

    `caught_up` follows the predecessor's record: it must have retired. `served` and `healthy`: the successor's released watermark
    has reached the predecessor's hand-over mark. A predecessor that is dead doesn't block a live successor that has caught up with
    what it last reported.
    """
    if predecessor is None:
        return Switch(True, "nothing is served yet")
    if predecessor.retired:
        return Switch(True, "the predecessor has retired")
    if predecessor.liveness is Liveness.UNKNOWN:
        return Switch(False, "not known yet whether the predecessor is alive")
    if predecessor.liveness is Liveness.DEAD:
        return _switch_from_dead(predecessor.progress, successor, policy, tolerance_s)
    if policy == "caught_up":
        return Switch(False, "the predecessor has not retired yet")
    mark = predecessor.progress.handover_mark if predecessor.progress else None
    if mark is None:
        return Switch(False, "the predecessor has set no hand-over mark yet")
    if successor.progress is None or successor.liveness is not Liveness.ALIVE:
        return Switch(False, f"the successor isn't known to be alive ({successor.liveness})")
    return _released_up_to(mark, successor.progress)


def _switch_from_dead(last: ProgressReport | None, successor: SuccessorView, policy: Policy, tolerance_s: float) -> Switch:
    """`last`: what the dead predecessor reported last. Under `caught_up` what is served may go back; else as
    much must be released as was before."""
    if successor.progress is None or successor.liveness is not Liveness.ALIVE:
        return Switch(False, f"the predecessor is dead, but the successor isn't known to be alive ({successor.liveness})")
    lag_s = 0.0 if last is None else last.data_ts - successor.progress.data_ts
    if lag_s > tolerance_s:
        return Switch(False, f"the predecessor is dead, but the successor still trails by {lag_s:.1f} s")
    if policy != "caught_up" and last is not None and last.released_watermark is not None:
        return _released_up_to(last.released_watermark - tolerance_s, successor.progress)
    return Switch(True, "the predecessor is dead and the successor has caught up with its last report")


def _released_up_to(event_time: float, successor: ProgressReport) -> Switch:
    released = successor.released_watermark
    shown = "nothing" if released is None else f"{released:.3f}"
    return Switch(released is not None and released >= event_time, f"the successor has released {shown} of {event_time:.3f}")
