"""One short story; `scripts/chaos` tells as many as there is time for."""

from __future__ import annotations

import pytest

from tests.chaos.stories import play


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_story_ends_with_every_row_trained_once(tmp_path, base, broker):
    figures = play(3, tmp_path / "story", base, broker, max_acts=2)
    assert figures.is_clean, figures
