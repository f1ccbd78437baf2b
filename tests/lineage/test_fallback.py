"""Whether serving goes back after a switch, and forward again: a table of histories and conditions (issue 5, D8)."""

from __future__ import annotations

import pytest

from tidemill.contracts.lineage import Deployment
from tidemill.lineage.fallback import WELL, Condition, FallbackBounds, ServingState, Way, decide_turn, serving_state

DAY1, DAY2 = "lineages/20240101", "lineages/20240102"
BOUNDS = FallbackBounds(watch_s=3600.0, dead_s=300.0, bad_s=600.0, well_s=900.0)
SWITCHED_AT = 1000.0


def history(*moves: str) -> list[Deployment]:
    """Moves as "<day><follow f or pin p><cycle c or person h>": "1fc" is day 1, followed, by the cycle."""
    return [
        Deployment(
            number=number,
            lineage=f"lineages/2024010{move[0]}",
            snapshot_digest="d",
            pin_term=1 if move[1] == "p" else None,
            pin_sequence=7 if move[1] == "p" else None,
            created_at=SWITCHED_AT + 100 * (number - 2),
            nonce="n",
            reason="r",
            run_id="run" if move[2] == "c" else None,
        )
        for number, move in enumerate(moves, start=1)
    ]


DEAD = Condition(dead_s=300.0)
WELL_AGAIN = Condition(well_s=900.0)
SWITCHED = ("1fc", "2fc")
LEFT = (*SWITCHED, "1pc")
RETURNED = (*LEFT, "2fc")

TURNS = [
    pytest.param(SWITCHED, Condition(), 1010.0, Way.KEEP, WELL, id="nothing known of it yet"),
    pytest.param(SWITCHED, Condition(well_s=5.0), 1010.0, Way.KEEP, WELL, id="well"),
    pytest.param(SWITCHED, Condition(dead_s=299.9), 1010.0, Way.KEEP, WELL, id="dead, not for long enough"),
    pytest.param(SWITCHED, DEAD, 1010.0, Way.BACK, "dead for 300 s: back to the last release of lineages/20240101", id="dead"),
    pytest.param(SWITCHED, Condition(dead_s=0.0, gone=True), 1010.0, Way.BACK, "isn't started again", id="gone for good"),
    pytest.param(SWITCHED, Condition(bad_s=599.9), 1010.0, Way.KEEP, WELL, id="bad, not for long enough"),
    pytest.param(SWITCHED, Condition(bad_s=600.0), 1010.0, Way.BACK, "paused by its quality gate for 600 s", id="bad"),
    pytest.param(SWITCHED, DEAD, 4600.0, Way.BACK, "dead", id="at the end of the watch exactly"),
    pytest.param(SWITCHED, DEAD, 4600.1, Way.KEEP, "its own last release stays", id="long after its switch"),
    pytest.param(("1fc",), DEAD, 1010.0, Way.KEEP, "no lineage was served before it", id="the first lineage"),
    pytest.param(("1fc", "2fh"), DEAD, 1010.0, Way.KEEP, "a person", id="promoted by hand"),
    pytest.param((*SWITCHED, "1ph"), WELL_AGAIN, 1010.0, Way.KEEP, "a person", id="rolled back by hand, and well"),
    pytest.param((*SWITCHED, "2ph"), DEAD, 1010.0, Way.KEEP, "a person", id="pinned to its own release by hand, and dead"),
    pytest.param((*LEFT, "1ph"), WELL_AGAIN, 1010.0, Way.KEEP, "a person", id="pinned by hand after the cycle had left it"),
    pytest.param(("1fh", "2fc"), DEAD, 1010.0, Way.BACK, "dead", id="the one before was promoted by hand, this one was not"),
    pytest.param(LEFT, DEAD, 1110.0, Way.KEEP, "has not been well", id="left, and dead still"),
    pytest.param(LEFT, Condition(well_s=899.9), 1110.0, Way.KEEP, "has not been well", id="left, not well for long enough"),
    pytest.param(LEFT, WELL_AGAIN, 1110.0, Way.FORWARD, "well for 900 s: forward again", id="left, and well"),
    pytest.param(LEFT, WELL_AGAIN, 9e9, Way.FORWARD, "forward again", id="left, and well after the watch"),
    pytest.param(RETURNED, DEAD, 1210.0, Way.BACK, "dead", id="dead again after a return"),
    pytest.param((*RETURNED, "1pc"), WELL_AGAIN, 1310.0, Way.KEEP, "promote it by hand", id="no second return"),
    pytest.param((*RETURNED, "1pc", "2fh"), DEAD, 1410.0, Way.KEEP, "a person", id="promoted by hand after that"),
    pytest.param((*LEFT, "3fc"), DEAD, 1210.0, Way.BACK, "last release of lineages/20240102", id="the next date took over"),
]


@pytest.mark.parametrize(("moves", "condition", "now", "way", "reason"), TURNS)
def test_turns(moves: tuple[str, ...], condition: Condition, now: float, way: Way, reason: str) -> None:
    state = serving_state(history(*moves))
    assert state is not None
    turn = decide_turn(state, condition, BOUNDS, now)
    assert turn.way is way
    assert reason in turn.reason


def test_a_lineage_that_dies_for_ever_makes_four_deployments_and_no_more() -> None:
    """No flapping: whatever the stream does, serving leaves it twice and returns once."""
    moves = list(SWITCHED)
    for _ in range(20):
        for condition in (DEAD, WELL_AGAIN):
            state = serving_state(history(*moves))
            assert state is not None
            way = decide_turn(state, condition, BOUNDS, 1010.0).way
            if way is not Way.KEEP:
                moves.append("1pc" if way is Way.BACK else "2fc")
    assert moves == [*SWITCHED, "1pc", "2fc", "1pc"]


def test_the_state_of_serving() -> None:
    assert serving_state([]) is None
    assert serving_state(history("1ph")) is None, "pinned from the beginning"
    assert serving_state(history(*SWITCHED)) == ServingState(DAY2, DAY1, False, False, 0, SWITCHED_AT)
    assert serving_state(history(*LEFT)) == ServingState(DAY2, DAY1, True, False, 0, SWITCHED_AT)
    assert serving_state(history(*RETURNED)) == ServingState(DAY2, DAY1, False, False, 1, SWITCHED_AT)
