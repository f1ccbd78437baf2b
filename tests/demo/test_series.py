from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tidemill.contracts import layout
from tidemill.demo.playlog import REQUEST_SCHEMA
from tidemill.demo.quality import ScoredRows, auc
from tidemill.demo.series import hand_over_moments, requests_by_second, rolling_aucs
from tidemill.storage.open import open_storage


def _requests(rows: list[tuple[float, float, int, str | None]]) -> pa.Table:
    names = ("sent_at", "latency_s", "status", "lineage")
    filler = {"request": 0, "event_time": 0.0, "error": None, "term": None, "sequence": None}
    return pa.Table.from_pylist([filler | dict(zip(names, row, strict=True)) for row in rows], REQUEST_SCHEMA)


def test_windows_roll_over_the_rows_in_any_order() -> None:
    rng = np.random.default_rng(1)
    times = rng.permutation(np.arange(0.0, 8 * 3600, 10.0))
    clicks, scores = rng.integers(0, 2, len(times)), rng.random(len(times))
    points = rolling_aucs(ScoredRows(times, clicks, {"served": scores}))
    assert [point["event_time"] for point in points] == [5400.0 + 1800 * n for n in range(len(points))]
    inside = (times >= 1800) & (times < 1800 + 3 * 3600)
    assert points[1]["rows"] == inside.sum()
    assert points[1]["served"] == pytest.approx(auc(clicks[inside], scores[inside]))


def test_windows_with_few_rows_are_left_out() -> None:
    times = np.arange(0.0, 8 * 3600, 100.0)
    assert rolling_aucs(ScoredRows(times, np.ones(len(times)), {"served": times})) == []
    assert rolling_aucs(ScoredRows(np.array([]), np.array([]), {"served": np.array([])})) == []


def test_requests_count_in_the_second_in_which_they_end() -> None:
    points = requests_by_second(
        _requests([(10.1, 0.1, 200, "a"), (10.2, 1.0, 200, "a"), (11.0, 0.5, 500, None), (13.5, 0.1, 200, "a")])
    )
    assert [(point["at"], point["answered"], point["failed"]) for point in points] == [(10, 1, 0), (11, 1, 1), (12, 0, 0)]
    assert points[0]["p50_ms"] == pytest.approx(100.0)
    assert points[2]["p50_ms"] is None
    assert requests_by_second(_requests([])) == []


def test_the_switch_is_confirmed_by_the_first_answer_of_the_successor(tmp_path: Path) -> None:
    old, new = layout.lineage("20260302"), layout.lineage("20260303")
    requests = _requests([(10.0, 1.0, 200, old), (12.0, 0.5, 0, None), (14.0, 0.5, 200, new), (13.0, 2.0, 200, new)])
    moments = hand_over_moments(open_storage(tmp_path), ("20260302", "20260303"), [{"moment": "retired", "at": 20.0}], requests)
    assert moments == [{"moment": "confirmed: first answer", "at": 14.5}, {"moment": "retired", "at": 20.0}]
