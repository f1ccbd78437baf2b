"""How good the model was: AUCs of four scores on one set of random impressions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SCORES = ("served", "online", "frozen", "best_possible")
"""served: as the server ranked with it. online: the trainer's, before it was trained on the row. frozen: the snapshot of day T-1.
best_possible: the true probability."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The same rows' four scores, labels and event times; one element a row."""

    event_times: np.ndarray
    clicks: np.ndarray
    scores: dict[str, np.ndarray]

    def aucs(self) -> dict[str, float | None]:
        return {name: auc(self.clicks, scores) for name, scores in self.scores.items()}


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Exact area under the ROC curve, ties counting half; None with rows of one class only (or none)."""
    positive = labels > 0
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def share_closed(frozen: float | None, online: float | None, best: float | None) -> float | None:
    """Which share of the distance from the frozen to the best possible AUC the online model closes; None if there is none."""
    if frozen is None or online is None or best is None or best <= frozen:
        return None
    return (online - frozen) / (best - frozen)


def score_rows(impressions: pa.Table, online: pa.Table, frozen: np.ndarray) -> ScoredRows:
    """The rows of `impressions` that have an online score. `online`: columns event_id and score, ids once each. `frozen`: one
    score a row of `impressions`."""
    place = pc.index_in(impressions["event_id"].combine_chunks(), online["event_id"].combine_chunks())
    both = pc.is_valid(place).to_numpy(zero_copy_only=False)
    found = place.drop_null().to_numpy()
    rows = impressions.filter(pa.array(both))
    return ScoredRows(
        rows["event_time"].to_numpy(),
        rows["click"].to_numpy(),
        {
            "served": rows["served_score"].to_numpy(),
            "online": online["score"].to_numpy()[found],
            "frozen": frozen[both],
            "best_possible": rows["true_probability"].to_numpy(),
        },
    )
