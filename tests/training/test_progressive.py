"""Progressive metrics: windows by event time that hold the same events however they were read, and slices of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from tidemill import logs
from tidemill.config.model import MetricConfig
from tidemill.data.split import Delivery, Provenance, Run, SplitId
from tidemill.errors import ConfigError
from tidemill.features.batch import Batch, IdColumns
from tidemill.models.metrics import progressive_metrics
from tidemill.training.progressive import HISTORY, ProgressiveMetrics, ProgressiveSettings
from tidemill.training.slices import NONE, OTHER, Slices

NO_IDS = IdColumns((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
SPLIT = SplitId("kafka", "clicks:0")


def metrics(slices: Slices | None = None, *, rank: int = 0, watermark: float | None = None) -> ProgressiveMetrics:
    settings = ProgressiveSettings(lambda: progressive_metrics([]), label="click", window_s=100.0, slices=slices or Slices())
    return ProgressiveMetrics(settings, rank=rank, watermark=watermark)


def delivery(times, labels, devices=None):
    """A batch of rows with these event times, labels, and ids of the feature `device` (None: no id)."""
    rows = len(times)
    ids = NO_IDS
    if devices is not None:
        values = torch.tensor([device for device in devices if device is not None], dtype=torch.int64)
        ids = IdColumns(("device",), values, torch.tensor([int(device is not None) for device in devices], dtype=torch.int32))
    batch = Batch(
        num_rows=rows,
        size=rows,
        dense=torch.zeros(rows, 0),
        ids=ids,
        sequences=NO_IDS,
        labels={"click": torch.tensor(labels, dtype=torch.float32)},
        weights=torch.ones(rows),
        extras={},
    )
    event_time = np.array(times, np.float64)
    run = Run(SPLIT, 0, rows, rows, event_time=float(np.nanmax(event_time)))
    return Delivery(Provenance((run,), rows, event_time=event_time), batch)


def train(progressive: ProgressiveMetrics, times, labels, scores, devices=None) -> None:
    progressive.trained(0, delivery(times, labels, devices), {"probs": np.array(scores, np.float64)})


def alone(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [dict(arrays)]


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


def test_a_row_belongs_to_the_window_of_its_own_event_time():
    progressive = metrics()
    train(progressive, [10, 150, 90, 199], [1, 1, 0, 0], [0.9, 0.2, 0.1, 0.4])
    first, second = progressive.close_windows(210.0, alone)
    assert (first.start, first.stop, first.rows) == (0.0, 100.0, 2)
    assert (second.start, second.stop, second.rows) == (100.0, 200.0, 2)
    assert (first.metrics["auc"], second.metrics["auc"]) == (1.0, 0.0)
    assert first.metrics["calibration"] == pytest.approx(1.0)
    assert first.metrics["label_mean"] == 0.5


def test_a_window_closes_once_the_watermark_is_well_past_its_end():
    progressive = metrics()
    train(progressive, [10, 20], [1, 0], [0.9, 0.1])
    assert progressive.close_windows(None, alone) == ()
    assert progressive.close_windows(109.0, alone) == ()
    assert len(progressive.close_windows(110.0, alone)) == 1
    assert progressive.close_windows(150.0, alone) == ()
    assert len(progressive.windows) == 1


def test_rows_that_come_after_their_window_has_closed_do_not_count():
    progressive = metrics()
    train(progressive, [10], [1], [0.9])
    progressive.close_windows(110.0, alone)
    train(progressive, [20, 130], [1, 0], [0.9, 0.1])
    (window,) = progressive.close_windows(300.0, alone)
    assert (window.start, window.rows) == (100.0, 1)


def test_two_ways_to_read_the_same_events_give_the_same_windows():
    """What makes two lineages comparable: no batch border, order or number of ranks shows."""
    random = np.random.default_rng(5)
    times, scores = random.uniform(0, 500, 400), random.uniform(0.01, 0.99, 400)
    labels = (random.uniform(size=400) < scores).astype(float)
    one = metrics()
    for start in range(0, 400, 7):
        train(one, times[start : start + 7], labels[start : start + 7], scores[start : start + 7])
    order = random.permutation(400)
    ranks = [metrics(), metrics(rank=1)]
    for rank, progressive in enumerate(ranks):
        for start in range(rank, 400, 100):
            chosen = order[start : start + 100 : 2]
            train(progressive, times[chosen], labels[chosen], scores[chosen])
    left: list[dict[str, np.ndarray]] = []
    ranks[1].close_windows(np.inf, lambda arrays: left.append(dict(arrays)) or left)
    expected = one.close_windows(np.inf, alone)
    found = ranks[0].close_windows(np.inf, lambda arrays: [dict(arrays), *left])
    assert [window.rows for window in found] == [window.rows for window in expected]
    assert sum(window.rows for window in found) == 400
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics)


def test_a_row_without_a_time_goes_with_the_newest_of_its_batch():
    progressive = metrics()
    train(progressive, [np.nan, 150], [1, 0], [0.9, 0.1])
    (window,) = progressive.close_windows(np.inf, alone)
    assert (window.start, window.rows) == (100.0, 2)


def test_open_windows_and_history_go_on_after_a_checkpoint():
    before = [metrics(), metrics(rank=1)]
    train(before[0], [10, 110], [1, 0], [0.9, 0.1])
    before[0].close_windows(110.0, alone)
    train(before[1], [120, 130], [1, 1], [0.8, 0.7])
    after = metrics(watermark=110.0)
    after.load_state([progressive.state() for progressive in before])
    train(after, [20, 140], [1, 0], [0.5, 0.2])
    after.close_windows(250.0, alone)
    assert [(window.start, window.rows) for window in after.windows] == [(0.0, 1), (100.0, 4)]


def test_a_window_that_was_due_at_the_checkpoint_is_told_after_it():
    before = metrics()
    train(before, [10, 20], [1, 0], [0.9, 0.1])
    after = metrics(watermark=150.0)
    after.load_state([before.state()])
    assert [window.rows for window in after.close_windows(150.0, alone)] == [2]
    assert after.close_windows(150.0, alone) == ()


def test_windows_of_another_length_are_dropped_when_the_config_has_changed():
    before = metrics()
    train(before, [10, 110], [1, 0], [0.9, 0.1])
    before.close_windows(110.0, alone)
    settings = ProgressiveSettings(lambda: progressive_metrics([]), label="click", window_s=50.0)
    after = ProgressiveMetrics(settings, watermark=110.0)
    after.load_state([before.state()])
    assert after.close_windows(np.inf, alone) == ()
    assert after.windows == ()


def test_the_history_is_bounded():
    progressive = metrics()
    for hour in range(HISTORY + 5):
        train(progressive, [hour * 100.0], [1], [0.5])
        progressive.close_windows(hour * 100.0 + 110.0, alone)
    assert len(progressive.windows) == HISTORY
    assert progressive.windows[0].start == 500.0


def test_a_window_and_its_slices_are_events_of_rank_0(events: Path):
    for rank in (0, 1):
        progressive = metrics(Slices(("device",)), rank=rank)
        train(progressive, [10, 20, 30, 40], [1, 0, 1, 0], [0.9, 0.1, 0.2, 0.8], [7, 7, 9, None])
        progressive.close_windows(110.0, alone)
    (window,) = named(events, "progressive.window")
    assert (window["start"], window["stop"], window["rows"]) == (0.0, 100.0, 4)
    slices = {line["value"]: line for line in named(events, "progressive.slice")}
    assert set(slices) == {"7", "9", NONE}
    assert (slices["7"]["feature"], slices["7"]["rows"], slices["7"]["auc"]) == ("device", 2, 1.0)
    assert "auc" not in slices["9"], "a slice of one class has no AUC"


def test_values_beyond_the_allowed_number_are_one_slice(events: Path):
    progressive = metrics(Slices(("device",), num_values=2))
    train(progressive, [10, 20, 30], [1, 0, 1], [0.9, 0.1, 0.2], [1, 2, 3])
    train(progressive, [10, 20, 30], [1, 0, 1], [0.9, 0.1, 0.2], [3, 4, 1])
    progressive.close_windows(110.0, alone)
    assert {line["value"]: line["rows"] for line in named(events, "progressive.slice")} == {"1": 2, "2": 1, OTHER: 3}


def test_of_the_values_of_all_ranks_those_with_most_rows_are_shown(events: Path):
    progressive, other = metrics(Slices(("device",), num_values=1)), metrics(Slices(("device",), num_values=1), rank=1)
    train(progressive, [10], [1], [0.9], [1])
    train(other, [10, 20], [1, 0], [0.9, 0.1], [2, 2])
    left: list[dict[str, np.ndarray]] = []
    other.close_windows(110.0, lambda arrays: left.append(dict(arrays)) or left)
    progressive.close_windows(110.0, lambda arrays: [dict(arrays), *left])
    assert [(line["value"], line["rows"]) for line in named(events, "progressive.slice")] == [("2", 2)]


def test_a_slice_survives_a_checkpoint(events: Path):
    before = metrics(Slices(("device",)))
    train(before, [10, 20], [1, 0], [0.9, 0.1], [7, 7])
    after = metrics(Slices(("device",)))
    after.load_state([before.state()])
    train(after, [30], [1], [0.8], [7])
    after.close_windows(110.0, alone)
    assert [(line["value"], line["rows"]) for line in named(events, "progressive.slice")] == [("7", 3)]


def test_a_slice_of_what_is_no_id_feature_says_so():
    progressive = metrics(Slices(("colour",)))
    with pytest.raises(ConfigError, match=r"progressive_slices: 'colour' isn't an id feature"):
        train(progressive, [10], [1], [0.9], [7])


def test_what_is_judged_is_always_measured():
    configured = [MetricConfig(auc={"thresholds": 50})]
    assert [metric.name for metric in progressive_metrics(configured)] == ["auc", "normalized_entropy", "calibration", "label_mean"]
