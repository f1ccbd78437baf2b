"""What the cycle's stories judge by: each of these must be able to find a fault."""

from __future__ import annotations

import pytest

from tests.chaos.cycle_age import EventClock, Outage, ages, wrong_lineages
from tests.chaos.cycle_clients import Answer

FIRST, SECOND = "lineages/20260303", "lineages/20260304"
CLOCK = EventClock(began_at=1000.0, first=0.0, speed=4.0)
BOUND_S = 10.0


def answer(at: float, lineage: str = FIRST, sequence: int = 1, server: str = "a") -> Answer:
    return Answer(at, at, server, lineage, 1, sequence, 0)


@pytest.mark.parametrize(
    ("at", "outage", "beyond_s"),
    [
        (1030.0, None, 10.0),
        (1035.0, None, 15.0),
        pytest.param(1035.0, Outage(1020.0, 1050.0), 10.0, id="what the outage explains"),
        pytest.param(1059.0, Outage(1020.0, 1050.0), 10.0, id="right after it there is time to come back"),
        pytest.param(1061.0, Outage(1020.0, 1050.0), 41.0, id="but no longer"),
        pytest.param(1055.0, Outage(1040.0, 1060.0), 30.0, id="it was too old before"),
    ],
)
def test_the_age_of_what_is_served(at: float, outage: Outage | None, beyond_s: float) -> None:
    """Issue 5, proof. Event time 80 came at 1020."""
    found = ages([answer(1021.0), answer(at)], {(FIRST, 1, 1): 80.0}, CLOCK, outage, BOUND_S)
    assert (found.worst_s, found.beyond_s) == (at - 1020.0, beyond_s)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([answer(2.0), answer(5.0, SECOND), answer(6.0, SECOND)], []),
        ([answer(5.5), answer(5.0, SECOND, server="b")], []),
        ([answer(3.5, SECOND)], ["a answered from lineages/20260304 0.50 s before it was deployed"]),
        ([answer(8.0)], ["a answered from lineages/20260303 1.00 s after it had retired"]),
        ([answer(5.0, SECOND), answer(6.0)], ["a answered from lineages/20260303 after lineages/20260304"]),
    ],
)
def test_one_lineage_is_served(answers: list[Answer], told: list[str]) -> None:
    assert wrong_lineages(answers, {FIRST: 1.0, SECOND: 4.0}, {FIRST: 7.0}) == told
