from __future__ import annotations

import numpy as np
import pytest

from tidemill.errors import PublishError
from tidemill.publish.gate import Candidate, Gate, compare_scores


def candidate(segments=(), dense=None) -> Candidate:
    return Candidate(term=1, sequence=2, step=3, watermark=None, segments=segments, dense=dense)


def rows(*values: float) -> dict[str, np.ndarray]:
    array = np.array(values, np.float32).reshape(-1, 1)
    return {"a/b/ids": 10 * np.arange(len(array)), "a/b/rows": array, "a/b/deleted": np.array([5])}


def test_finite_rows_and_weights_pass_without_a_score():
    Gate().check(candidate([rows(1, 2), {}], {"w": np.ones((2, 2)), "count": np.array(3)}), {"probs": np.array([0.1])})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_is_named(bad):
    with pytest.raises(PublishError, match="table 'a/b': the row of id 20 isn't finite"):
        Gate().check(candidate([rows(1), rows(1, 2, bad)]), None)
    for weights in (np.array([[1.0, bad]]), np.array(bad, np.float32)):
        with pytest.raises(PublishError, match="dense tensor 'w' isn't finite"):
            Gate().check(candidate(dense={"v": np.ones(2), "w": weights}), None)


def test_the_candidate_itself_is_scored():
    seen = []

    def score(given: Candidate) -> dict[str, np.ndarray]:
        seen.append(given)
        return {"probs": np.array([0.5])}

    one = candidate()
    Gate(score).check(one, {"probs": np.array([0.5])})
    assert seen == [one]
    Gate(score).check(one, None)
    assert seen == [one], "without probe rows there is nothing to compare"


def test_whatever_the_score_raises_is_a_rejection():
    def score(given: Candidate) -> dict[str, np.ndarray]:
        raise KeyError("top.weight")

    with pytest.raises(PublishError, match=r"can't score the probe rows: KeyError: 'top\.weight'"):
        Gate(score).check(candidate(), {"probs": np.array([0.5])})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"logits": np.zeros(2)}, "no scores for 2 probe rows"),
        ({"probs": np.zeros(3)}, "3 scores for 2 probe rows"),
        ({"probs": np.array([0.1, 0.2002])}, "probe row 1 .* a difference of 0.0002, more than 0.0001 .1 of 2 rows differ"),
        ({"probs": np.array([np.nan, 0.2])}, "probe row 0 is nan as served and 0.1 as trained"),
    ],
)
def test_other_scores_are_rejected_with_output_row_and_difference(found, reason):
    with pytest.raises(PublishError, match=f"output 'probs': {reason}"):
        compare_scores(found, {"probs": np.array([0.1, 0.2])}, 1e-4)


def test_scores_within_the_tolerance_pass():
    compare_scores({"probs": np.array([0.10009, 0.2])}, {"probs": np.array([0.1, 0.20009])}, 1e-4)
    compare_scores({"probs": np.zeros((2, 3))}, {"probs": np.full((2, 3), 5e-5)}, 1e-4)
