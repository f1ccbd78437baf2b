"""Event time is checked once, at its edge; clocks that tests turn by hand."""

from __future__ import annotations

import math

import pytest

from tidemill.clock import ManualClock, event_time


@pytest.mark.parametrize("value", [0, 1.5, 1_711_929_600.25, -1.0])
def test_numbers_of_unix_seconds_are_event_times(value):
    assert event_time(value) == float(value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, True, False, None, "1711929600", [1], 10**400, 1_711_929_600_000.0, -1e12]
)
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match="event time"):
        event_time(value)


def test_a_manual_clock_stands_still_and_never_goes_back():
    clock = ManualClock(time=100.0)
    start = clock.monotonic()
    clock.sleep(2.5)
    assert (clock.time(), clock.monotonic() - start) == (102.5, 2.5)
    clock.set_time(50.0)
    assert (clock.time(), clock.monotonic() - start) == (50.0, 2.5)
    with pytest.raises(ValueError, match="advance"):
        clock.advance(-1)
