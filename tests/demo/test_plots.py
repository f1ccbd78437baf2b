from __future__ import annotations

import json
from pathlib import Path

from matplotlib import image

from tests.demo.recorded import MOVIELENS, REPORT, SERIES
from tidemill.demo import plots


def test_each_plot_is_a_readable_picture(tmp_path: Path) -> None:
    paths = plots.draw(REPORT | {"movielens": MOVIELENS}, SERIES, tmp_path)
    assert [path.name for path in paths] == ["auc.png", "movielens.png", "freshness.png", "handover.png"]
    for path in paths:
        height, width, _ = image.imread(path).shape
        assert width == 1350
        assert height > 500


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second):
        folder.mkdir()
        plots.draw(REPORT, json.loads(json.dumps(SERIES)), folder)
    assert (first / "handover.png").read_bytes() == (second / "handover.png").read_bytes()


def test_the_waterfall_stacks_the_stages_in_their_order() -> None:
    figure = plots.freshness_waterfall(REPORT, SERIES)
    assert figure is not None
    for axes, quantile in zip(figure.axes, ("p50", "p99"), strict=True):
        seconds = [stage[quantile] for stage in REPORT["freshness_s"]["stages"].values()]
        assert [round(bar.get_width(), 6) for bar in axes.patches] == [round(s, 6) for s in seconds]
        assert [round(bar.get_x(), 6) for bar in axes.patches] == [round(sum(seconds[:n]), 6) for n in range(len(seconds))]


def test_the_auc_plot_marks_midnight_and_the_switch() -> None:
    figure = plots.auc_by_event_time(REPORT, SERIES)
    assert figure is not None
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["midnight", "switch"]
    assert [text.get_position()[0] * 86400 for text in axes.texts] == [SERIES["midnight_event_time"], SERIES["switch_event_time"]]
    assert "AUC" in axes.get_ylabel()
    assert len(axes.get_lines()) == 4 + 2


def test_the_hand_over_plot_shows_both_lines_kills_failures_and_moments() -> None:
    figure = plots.handover_timeline(REPORT, SERIES)
    assert figure is not None
    upper, lower = figure.axes
    labels = [line.get_label() for line in upper.get_lines()]
    assert {"lineages/20260302", "lineages/20260303", "SIGKILL to the trainer"} <= set(labels)
    assert [text.get_text() for text in upper.texts] == ["1", "2-3"]
    assert any("failed (1 in all)" in str(line.get_label()) for line in lower.get_lines())
    assert "1 midnight (50 s)" in figure.get_supxlabel()
