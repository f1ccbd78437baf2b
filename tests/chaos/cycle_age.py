"""How old what is served may be, and which lineage it may be of: pure functions of what clients were answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.cycle_clients import Answer

Generation = tuple[str, int, int]
"""Lineage, term, sequence."""


@dataclass(frozen=True, slots=True)
class Outage:
    """From a fault to the restarted process's first step, Unix seconds."""

    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class EventClock:
    """Event time `speed` times as fast as the clock, from `first` at the Unix time `began_at`."""

    began_at: float
    first: float
    speed: float

    def wall(self, event_time: float) -> float:
        """When an event time came."""
        return self.began_at + (event_time - self.first) / self.speed


@dataclass(frozen=True, slots=True)
class Ages:
    """Seconds of wall time. `worst_s`: the oldest that was served; `beyond_s`: the most by which one was older than the outage
    alone explains."""

    worst_s: float
    beyond_s: float


def ages(
    answers: Iterable[Answer], watermarks: Mapping[Generation, float], clock: EventClock, outage: Outage | None, bound_s: float
) -> Ages:
    """How old what was served was.

    What is served at t must have reached the events of t - bound; of an outage, those of its beginning until it has been over
    for `bound_s`.
    """
    worst = beyond = 0.0
    for answer in answers:
        reached = clock.wall(watermarks[answer.lineage, answer.term, answer.sequence])
        age, due = answer.sent_at - reached, answer.sent_at - bound_s
        if outage is not None and outage.began_at < due < outage.ended_at:
            due = outage.began_at
        worst, beyond = max(worst, age), max(beyond, due - reached + bound_s)
    return Ages(worst, beyond)


def wrong_lineages(answers: Sequence[Answer], deployed_at: Mapping[str, float], retired_at: Mapping[str, float]) -> list[str]:
    """What was answered by a lineage before its deployment, after its retirement, or after a later one by the same server."""
    found, newest = [], {}
    for answer in sorted(answers, key=lambda answer: answer.answered_at):
        lineage, told = answer.lineage, f"{answer.server} answered from {answer.lineage}"
        if answer.answered_at < deployed_at[lineage]:
            found.append(f"{told} {deployed_at[lineage] - answer.answered_at:.2f} s before it was deployed")
        if answer.sent_at > retired_at.get(lineage, answer.sent_at):
            found.append(f"{told} {answer.sent_at - retired_at[lineage]:.2f} s after it had retired")
        if lineage < newest.get(answer.server, ""):
            found.append(f"{told} after {newest[answer.server]}")
        newest[answer.server] = max(lineage, newest.get(answer.server, ""))
    return found
