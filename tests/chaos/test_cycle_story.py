"""One story of the daily cycle; `scripts/chaos --cycle` tells all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cycle_stories import play
from tidemill.testing.broker import DevelopmentBroker


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_days_with_a_successor_killed_at_the_switch(tmp_path: Path, broker: DevelopmentBroker) -> None:
    """Issue 5, proof: real processes, one lineage on two ranks, two servers, clients that fail over. A2-A8, A16, W31, W36."""
    figures = play("successor_killed", 1, tmp_path / "story", broker)
    assert figures.is_clean, figures
    assert figures.requests > 100
