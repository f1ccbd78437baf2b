"""The quality gate: the running lineage notices a poisoned stretch, publication pauses with one alarm, and goes on after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import logs
from tidemill.contracts.progress import WindowFigures
from tidemill.lineage.quality import QualityBounds, QualityWatch, Sample, mean_figures, problems, sample_problems

BOUNDS = QualityBounds(min_events=100, auc=0.05, normalized_entropy=0.1, calibration=0.3)
USUAL = {"auc": 0.75, "normalized_entropy": 0.8, "calibration": 1.0}


def window(number: int, *, rows: int = 1000, **metrics: float) -> WindowFigures:
    return WindowFigures(start=number * 60.0, stop=number * 60.0 + 60.0, rows=rows, metrics=USUAL | metrics)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "events.jsonl"
    sink = logs.EventLog(path)
    logs.send_events_to(sink)
    yield path
    logs.send_events_to(None)
    sink.close()


def named(path: Path, name: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == name]


@pytest.mark.parametrize(
    ("figures", "bad"),
    [
        pytest.param({}, None, id="as usual"),
        pytest.param({"auc": 0.7}, None, id="AUC exactly at the bound"),
        pytest.param({"auc": 0.69}, "auc", id="AUC lower"),
        pytest.param({"auc": 0.95}, None, id="AUC higher"),
        pytest.param({"normalized_entropy": 0.9}, None, id="entropy exactly at the bound"),
        pytest.param({"normalized_entropy": 0.91}, "normalized_entropy", id="entropy higher"),
        pytest.param({"calibration": 1.31}, "calibration", id="promises more than before"),
        pytest.param({"calibration": 0.69}, "calibration", id="promises less than before"),
    ],
)
def test_a_window_against_a_reference(figures: dict[str, float], bad: str | None) -> None:
    found = problems(window(1, **figures), {"the daily model": USUAL}, BOUNDS)
    assert [problem.split()[0] for problem in found] == ([bad] if bad else [])


def test_labels_of_one_kind_only_are_bad_and_said_once() -> None:
    alike = WindowFigures(start=0.0, stop=60.0, rows=1000, metrics={"calibration": 1.0})
    assert len(problems(alike, {"a": {"auc": 0.75}, "b": {"auc": 0.74}}, BOUNDS)) == 1
    assert problems(alike, {}, BOUNDS) == []


def test_one_alarm_for_a_bad_stretch_and_one_word_at_its_end(events: Path) -> None:
    watch = QualityWatch(BOUNDS, reference_windows=10)
    paused = []
    for number in range(12):
        watch.observe(window(number, auc=0.4 if 5 <= number < 9 else 0.75))
        paused.append(watch.paused)
    assert paused == [False] * 5 + [True] * 4 + [False] * 3
    (alarm,) = named(events, "quality.alarm")
    assert alarm["start"] == 300.0
    assert "0.4000" in str(alarm["reason"])
    assert [(line["start"], line["bad_since"]) for line in named(events, "quality.good")] == [(540.0, 300.0)]


def test_publication_waits_until_windows_have_been_good_for_long_enough(events: Path) -> None:
    """A model that has learnt the poison looks good for a while, and bad again when the poison ends."""
    watch = QualityWatch(replace(BOUNDS, hold_s=180.0), reference_windows=10)
    paused = []
    for number in range(12):
        watch.observe(window(number, auc=0.4 if number in (3, 6) else 0.75))
        paused.append(watch.paused)
    assert paused == [False] * 3 + [True] * 6 + [False] * 3
    assert len(named(events, "quality.alarm")) == 1


def test_the_daily_models_figures_judge_the_very_first_window() -> None:
    watch = QualityWatch(BOUNDS, reference_windows=10, frozen={"auc": 0.75})
    watch.observe(window(0, auc=0.5))
    assert watch.paused
    unknowing = QualityWatch(BOUNDS, reference_windows=10)
    unknowing.observe(window(0, auc=0.5))
    assert not unknowing.paused


def test_a_slow_decline_is_held_against_the_daily_model() -> None:
    slow = QualityWatch(BOUNDS, reference_windows=2, frozen={"auc": 0.75})
    for number in range(20):
        slow.observe(window(number, auc=0.75 - 0.01 * number))
    assert slow.paused


def test_bad_windows_do_not_become_the_reference() -> None:
    watch = QualityWatch(BOUNDS, reference_windows=2)
    for number in range(10):
        watch.observe(window(number, auc=0.4 if number >= 2 else 0.75))
    assert watch.paused


def test_windows_of_few_rows_neither_pause_nor_resume() -> None:
    watch = QualityWatch(BOUNDS, reference_windows=10)
    watch.observe(window(0))
    watch.observe(window(1, rows=99, auc=0.1))
    assert not watch.paused
    watch.observe(window(2, auc=0.1))
    watch.observe(window(3, rows=99))
    assert watch.paused


def test_a_restart_goes_on_paused_with_the_same_reference_and_tells_nothing_again(events: Path) -> None:
    before = QualityWatch(BOUNDS, reference_windows=10, frozen={"auc": 0.74})
    for number in range(4):
        before.observe(window(number, auc=0.4 if number == 3 else 0.75))
    after = QualityWatch(BOUNDS, reference_windows=10)
    after.load_state(json.loads(json.dumps([before.state(), before.state()])))
    assert after.paused
    after.observe(window(4, auc=0.4))
    assert len(named(events, "quality.alarm")) == 1
    after.observe(window(5))
    assert not after.paused
    assert after.state()["frozen"] == {"auc": 0.74}


def test_ranks_above_0_decide_alike_and_say_nothing(events: Path) -> None:
    watch = QualityWatch(BOUNDS, reference_windows=10, frozen=USUAL, tells=False)
    watch.observe(window(0, auc=0.4))
    assert watch.paused
    assert named(events, "quality.alarm") == []


@given(st.lists(st.floats(0.7, 0.75), min_size=1, max_size=30))
def test_what_stays_within_the_bound_never_pauses(aucs: list[float]) -> None:
    watch = QualityWatch(BOUNDS, reference_windows=5)
    for number, auc in enumerate(aucs):
        watch.observe(window(number, auc=auc))
        assert not watch.paused


def test_means_are_by_rows_over_the_windows_that_have_the_metric() -> None:
    windows = [window(0, rows=100, auc=0.9), window(1, rows=300, auc=0.5)]
    windows.append(WindowFigures(start=120.0, stop=180.0, rows=50, metrics={"calibration": 2.0}))
    means = mean_figures(windows)
    assert means["auc"] == pytest.approx(0.6)
    assert means["calibration"] == pytest.approx((400 + 100) / 450)
    assert np.isfinite(list(means.values())).all()


def sample(own: dict[str, float], daily: dict[str, float], rows: int = 1000) -> Sample:
    return Sample(rows, USUAL | own, USUAL | daily)


@pytest.mark.parametrize(
    ("own", "daily", "bad"),
    [
        pytest.param({}, {}, [], id="as usual"),
        pytest.param({"auc": 0.7}, {}, [], id="worse than the daily model, exactly at the bound"),
        pytest.param({"auc": 0.69}, {}, ["auc"], id="worse than the daily model"),
        pytest.param({"auc": 0.74}, {"auc": 0.65}, [], id="the daily model ages"),
        pytest.param({"auc": 0.74}, {"auc": 0.64}, ["the"], id="the data have changed, and the model has learnt them"),
        pytest.param({"normalized_entropy": 0.91}, {}, ["normalized_entropy"], id="higher entropy than the daily model"),
        pytest.param({"calibration": 0.6}, {"calibration": 1.4}, [], id="as far from right on the other side"),
        pytest.param({}, {"calibration": 1.9}, [], id="only the daily model is out of date"),
        pytest.param({"calibration": 1.31}, {}, ["calibration"], id="promises more than the daily model"),
    ],
)
def test_a_sample_that_the_daily_model_has_scored(own: dict[str, float], daily: dict[str, float], bad: list[str]) -> None:
    found = sample_problems(sample(own, daily), USUAL, BOUNDS)
    assert [problem.split()[0] for problem in found] == bad


def test_a_poison_that_the_model_has_learnt_keeps_publication_paused_by_the_daily_model() -> None:
    watch = QualityWatch(BOUNDS, reference_windows=10)
    paused = []
    for number in range(8):
        poisoned = 3 <= number < 6
        # The stream's model looks good again at once; the daily model can't learn.
        watch.observe(window(number), sample({}, {"auc": 0.3} if poisoned else {}))
        paused.append(watch.paused)
    assert paused == [False] * 3 + [True] * 3 + [False] * 2


def test_a_sample_of_few_rows_says_nothing() -> None:
    watch = QualityWatch(BOUNDS, reference_windows=10)
    watch.observe(window(0), sample({}, {}))
    watch.observe(window(1), sample({"auc": 0.1}, {"auc": 0.1}, rows=49))
    assert not watch.paused
    watch.observe(window(2), sample({"auc": 0.1}, {"auc": 0.1}, rows=50))
    assert watch.paused


def test_what_the_daily_model_usually_makes_of_events_survives_a_restart() -> None:
    before = QualityWatch(BOUNDS, reference_windows=10)
    before.observe(window(0), sample({}, {}))
    after = QualityWatch(BOUNDS, reference_windows=10)
    after.load_state(json.loads(json.dumps([before.state()])))
    after.observe(window(1), sample({"auc": 0.6}, {"auc": 0.6}))
    assert after.paused
