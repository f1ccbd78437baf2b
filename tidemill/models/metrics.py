"""Metrics whose state is a few numpy arrays: updated batch by batch, merged over ranks and windows, saved as they are.

Torchmetrics' binned AUC gives the same numbers (a test holds the two equal), but its state isn't made to be merged and stored by
name, and it has no grouped AUC.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill.config.model import MetricConfig
from tidemill.errors import ConfigError, DataError
from tidemill.features.batch import Batch


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows with their scores: all arrays have one length; padding is left out."""

    probs: np.ndarray
    """in [0, 1]"""
    labels: np.ndarray
    """0 or 1"""
    weights: np.ndarray
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    """grouping key -> group of each row, integers or text; see `grouping_keys`"""


class Metric(ABC):
    """A number about scored rows. The order of updates and merges doesn't change it, but for rounding."""

    name: str

    @abstractmethod
    def update(self, rows: Scored) -> None: ...

    @abstractmethod
    def compute(self) -> float:
        """NaN while it is undefined: without rows, or with rows of one class only."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """A copy, as numpy arrays."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        """Add what another instance saw."""


class AUC(Metric):
    """Area under the ROC curve by the trapezoid rule over evenly spaced thresholds; weighted.

    Rows between two thresholds count as ties, so it needs many thresholds where scores are crowded (200 is tzrec's default).
    The curve begins at the origin even if scores are exactly 1.
    """

    name = "auc"

    def __init__(self, thresholds: int = 200) -> None:
        if thresholds < 2:
            raise ConfigError(f"auc: thresholds is {thresholds}, but a curve needs at least 2")
        self._edges = np.linspace(0.0, 1.0, thresholds).astype(np.float32)
        # [class, bin]: the weight of rows whose score reached exactly so many thresholds.
        self._weights = np.zeros((2, thresholds + 1))

    def update(self, rows: Scored) -> None:
        bins = np.searchsorted(self._edges, rows.probs.astype(np.float32), side="right")
        for positive in (0, 1):
            chosen = (rows.labels > 0.5) == bool(positive)
            self._weights[positive] += np.bincount(bins[chosen], rows.weights[chosen], minlength=self._weights.shape[1])

    def compute(self) -> float:
        negatives, positives = self._weights
        if negatives.sum() <= 0 or positives.sum() <= 0:
            return float("nan")
        # From the highest threshold down, beginning at the origin.
        false_rate = np.concatenate([[0.0], np.cumsum(negatives[::-1])]) / negatives.sum()
        true_rate = np.concatenate([[0.0], np.cumsum(positives[::-1])]) / positives.sum()
        return float(np.trapezoid(true_rate, false_rate))

    def state(self) -> dict[str, Any]:
        return {"weights": self._weights.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._weights = np.array(state["weights"], np.float64)

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        self._weights += state["weights"]


class GroupedAUC(Metric):
    """The unweighted mean of the exact AUC over the groups that hold both classes. Keeps every row of weight > 0."""

    name = "grouped_auc"

    def __init__(self, grouping_key: str) -> None:
        self.grouping_key = grouping_key
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def update(self, rows: Scored) -> None:
        present = rows.weights > 0
        keys = _group_numbers(rows.groups[self.grouping_key][present])
        self._parts.append((keys, rows.probs[present].astype(np.float32), rows.labels[present] > 0.5))

    def compute(self) -> float:
        groups, probs, labels = self._rows()
        if not len(groups):
            return float("nan")
        order = np.lexsort((probs, groups))
        groups, probs, labels = groups[order], probs[order], labels[order]
        starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        sizes = np.diff(np.append(starts, len(groups)))
        ranks = _mean_ranks(groups, probs) - np.repeat(starts, sizes)
        positives = np.add.reduceat(labels.astype(np.float64), starts)
        negatives = sizes - positives
        rank_sums = np.add.reduceat(np.where(labels, ranks, 0.0), starts)
        both = (positives > 0) & (negatives > 0)
        if not both.any():
            return float("nan")
        # Mann-Whitney: the share of (positive, negative) pairs in the right order, ties half.
        wins = rank_sums[both] - positives[both] * (positives[both] + 1) / 2
        return float(np.mean(wins / (positives[both] * negatives[both])))

    def state(self) -> dict[str, Any]:
        groups, probs, labels = self._rows()
        return {"groups": groups.copy(), "probs": probs.copy(), "labels": labels.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._parts = []
        self.merge(state)

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        self._parts.append((np.array(state["groups"]), np.array(state["probs"]), np.array(state["labels"], bool)))

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not self._parts:
            return np.empty(0, np.uint64), np.empty(0, np.float32), np.empty(0, bool)
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        self._parts = [(columns[0], columns[1], columns[2])]
        return self._parts[0]


class SumMetric(Metric):
    """A number that is made of a few sums over the rows, each of them weighted."""

    def __init__(self, name: str, sums: Callable[[Scored], np.ndarray], value: Callable[[np.ndarray], float]) -> None:
        """`sums` of some rows; `value` of all sums together."""
        self.name = name
        self._sums_of = sums
        self._value = value
        # Zero alone fits sums of any number.
        self._sums = np.zeros(1)

    def update(self, rows: Scored) -> None:
        self._sums = self._sums + self._sums_of(rows)

    def compute(self) -> float:
        return self._value(self._sums) if len(self._sums) > 1 else float("nan")

    def state(self) -> dict[str, Any]:
        return {"sums": self._sums.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums = np.array(state["sums"], np.float64)

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        self._sums = self._sums + state["sums"]


def normalized_entropy(eta: float = 1e-12) -> SumMetric:
    """Cross entropy over that of the mean label (He et al., ADKDD 2014): below 1 is better than always predicting the mean."""

    def sums(rows: Scored) -> np.ndarray:
        weights, labels = rows.weights.astype(np.float64), rows.labels.astype(np.float64)
        return np.array([weights @ _entropy(labels, rows.probs.astype(np.float64), eta), weights @ labels, weights.sum()])

    def value(sums: np.ndarray) -> float:
        entropy, positives, total = sums
        if total <= 0 or not 0 < positives < total:
            return float("nan")
        mean = positives / total
        return float(entropy / total / _entropy(mean, mean, eta))

    return SumMetric("normalized_entropy", sums, value)


def calibration() -> SumMetric:
    """The sum of the scores over that of the labels, weighted: 1 is right, above 1 the model promises too much."""

    def sums(rows: Scored) -> np.ndarray:
        weights = rows.weights.astype(np.float64)
        return np.array([weights @ rows.probs.astype(np.float64), weights @ rows.labels.astype(np.float64)])

    return SumMetric("calibration", sums, _ratio)


def label_mean() -> SumMetric:
    """The weighted mean of the labels: what the events themselves are like."""

    def sums(rows: Scored) -> np.ndarray:
        weights = rows.weights.astype(np.float64)
        return np.array([weights @ rows.labels.astype(np.float64), weights.sum()])

    return SumMetric("label_mean", sums, _ratio)


def _ratio(sums: np.ndarray) -> float:
    """The first of two sums over the second."""
    upper, lower = sums
    return float(upper / lower) if lower > 0 else float("nan")


def progressive_metrics(configs: Sequence[MetricConfig]) -> list[Metric]:
    """New metrics, empty: those of the config, and what hand-over and quality are judged by whatever the config names."""
    metrics = build_metrics(configs)
    names = {metric.name for metric in metrics}
    judged: list[Metric] = [AUC(), normalized_entropy(), calibration(), label_mean()]
    return metrics + [metric for metric in judged if metric.name not in names]


def build_metrics(configs: Sequence[MetricConfig]) -> list[Metric]:
    """New metrics, empty. Raises ConfigError for one that isn't supported."""
    return [_build(config, index) for index, config in enumerate(configs)]


def grouping_keys(configs: Sequence[MetricConfig]) -> list[str]:
    """Columns that grouped metrics need beside the scores."""
    return list(dict.fromkeys(config.grouped_auc.grouping_key for config in configs if config.grouped_auc))


def merge_states(states: Iterable[Mapping[str, np.ndarray]], into: Metric) -> Metric:
    """`into`, after it has taken in what others saw."""
    for state in states:
        into.merge(state)
    return into


def scored_rows(batch: Batch, probs: np.ndarray, label: str, keys: Sequence[str] = ()) -> Scored:
    """The real rows of a batch with their scores, grouped by the ids of `keys`.

    Raises DataError for a row that hasn't exactly one id of a key.
    """
    count = batch.num_rows
    return Scored(
        probs[:count],
        batch.labels[label][:count].cpu().numpy(),
        batch.weights[:count].cpu().numpy(),
        {key: _ids(batch, key) for key in keys},
    )


def _ids(batch: Batch, key: str) -> np.ndarray:
    if key not in batch.ids.keys:
        raise ConfigError(f"grouping_key {key!r} isn't an id feature of the model; known: {', '.join(batch.ids.keys)}")
    column = batch.ids.select([key])
    if not bool((column.lengths[: batch.num_rows] == 1).all()):
        raise DataError(f"grouping_key {key!r}: a row has no id of this feature, or several; a group needs exactly one")
    return column.values.cpu().numpy()


def _group_numbers(groups: np.ndarray) -> np.ndarray:
    """Groups as uint64: integers as they are, text by a hash that is the same in every process."""
    if groups.dtype.kind in "iu":
        return groups.astype(np.uint64)
    texts, places = np.unique(groups.astype(str), return_inverse=True)
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), np.uint64)[places]


def _build(config: MetricConfig, index: int) -> Metric:
    found = config.one_of("metric")
    match found:
        case ("auc", settings):
            return AUC(settings.thresholds)
        case ("grouped_auc", settings):
            return GroupedAUC(settings.grouping_key)
        case ("normalized_entropy", settings):
            return normalized_entropy(settings.eta)
    name = found[0] if found else "nothing"
    raise ConfigError(f"model_config.metrics[{index}]: {name} isn't supported yet; use auc, grouped_auc or normalized_entropy")


def _mean_ranks(groups: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """1-based places in the sorted rows; rows of one group with equal scores share the mean of their places."""
    changes = (groups[1:] != groups[:-1]) | (probs[1:] != probs[:-1])
    starts = np.flatnonzero(np.concatenate([[True], changes]))
    sizes = np.diff(np.append(starts, len(groups)))
    return np.repeat(starts + (sizes + 1) / 2, sizes)


def _entropy(labels: Any, probs: Any, eta: float) -> Any:
    probs = np.clip(probs, eta, 1 - eta)
    return -labels * np.log(probs) - (1 - labels) * np.log1p(-probs)
