from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.demo.quality import auc, score_rows, share_closed


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[bool, int]]) -> None:
    labels, scores = np.array([row[0] for row in rows]), np.array([row[1] for row in rows], float)
    pairs = [np.sign(p - n) / 2 + 0.5 for p in scores[labels] for n in scores[~labels]]
    expected = float(np.mean(pairs)) if pairs else None
    assert auc(labels.astype(int), scores) == (None if expected is None else pytest.approx(expected))


def test_share_closed() -> None:
    assert share_closed(0.6, 0.7, 0.8) == pytest.approx(0.5)
    assert share_closed(0.6, 0.7, 0.6) is None
    assert share_closed(None, 0.7, 0.8) is None


def test_all_scores_are_of_the_rows_that_have_an_online_score() -> None:
    impressions = pa.table(
        {
            "event_id": ["a", "b", "c"],
            "event_time": [1.0, 2.0, 3.0],
            "click": [0, 1, 1],
            "served_score": [0.1, 0.2, 0.3],
            "true_probability": [0.4, 0.5, 0.6],
        }
    )
    online = pa.table({"event_id": ["c", "x", "a"], "score": [0.7, 0.8, 0.9]})
    rows = score_rows(impressions, online, np.array([0.01, 0.02, 0.03]))
    assert rows.event_times.tolist() == [1.0, 3.0]
    assert rows.clicks.tolist() == [0, 1]
    assert {name: scores.tolist() for name, scores in rows.scores.items()} == {
        "served": [0.1, 0.3],
        "online": [0.9, 0.7],
        "frozen": [0.01, 0.03],
        "best_possible": [0.4, 0.6],
    }
