"""The simulation finds the faults that it is there for."""

from __future__ import annotations

import pytest

import tests.simulation.position_faults  # noqa: F401 - adds its own to FAULTS
from tests.simulation.faults import FAULTS
from tidemill.testing.simulation.story import StoryError, play


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    put_in, stories = FAULTS[name]
    with put_in(), pytest.raises(StoryError, match="story"):
        _play_all(stories)


def _play_all(stories):
    for seed in range(stories):
        play(seed)
