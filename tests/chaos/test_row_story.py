"""One short story of each kind of source; `scripts/chaos` tells as many as there is time for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.row_stories import KINDS, play


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_every_id_is_trained_once(kind, tmp_path, broker):
    figures = play(11, tmp_path / "story", kind, broker, max_acts=4)
    assert figures.is_clean, figures
    assert figures.kills


def test_the_validating_trainer_needs_no_torch():
    code = "import sys; import tidemill.testing.validating.trainer; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
