"""Benchmarks run, and end with their figures as one JSON line. How fast is for whoever reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _figures(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a benchmark ends with."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=BENCHMARKS.parent,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=170,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_train_measures_three_ways_on_both_shapes():
    figures = _figures("train.py", "--quick")
    assert figures["benchmark"] == "train"
    assert [(result["shape"], result["threads"]) for result in figures["results"]] == [("heavy", 1), ("light", 1)]
    for result in figures["results"]:
        (turn,) = result["turns"]
        assert turn == result["examples_per_s"]
        assert set(turn) == {"end_to_end", "prebuilt", "plain"}
        assert min(turn.values()) > 100
        assert result["loss"] == pytest.approx(1 - turn["end_to_end"] / turn["prebuilt"], abs=0.01)
        assert result["vs_plain"] == pytest.approx(turn["end_to_end"] / turn["plain"], rel=0.01, abs=0.01)


@pytest.mark.slow
def test_click_world_counts_rows():
    figures = _figures("click_world.py", "50000")
    assert figures["rows"] == 50_000
    assert figures["rows_per_core_s"] > 1000


@pytest.mark.slow
def test_features_measures_both_kernels():
    figures = _figures("features.py", "--rows", "500", "--seconds", "0.2")
    assert set(figures["results"]) == {"compiled", "numpy"}
    assert min(result["rows_per_s"] for result in figures["results"].values()) > 100


@pytest.mark.slow
def test_checkpoint_measures_stall_bytes_and_the_way_back():
    figures = _figures("checkpoint.py", "--quick")
    training, crash = figures["training"], figures["crash"]
    assert training["checkpoints"] > 2
    assert 0 < training["blocked_share"] < 1
    full, few = figures["tables"][:2]
    assert (full["kind"], few["kind"]) == ("full", "incremental")
    assert few["bytes"] < full["bytes"] / 20
    assert crash["back_s"] > 0
