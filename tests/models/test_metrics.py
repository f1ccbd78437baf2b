import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.model import MetricConfig
from tidemill.errors import ConfigError, DataError
from tidemill.models.metrics import (
    AUC,
    GroupedAUC,
    Scored,
    build_metrics,
    calibration,
    grouping_keys,
    label_mean,
    normalized_entropy,
    scored_rows,
)
from tidemill.testing import model_contract as contract

with warnings.catch_warnings():
    # torchmetrics itself uses what setuptools has deprecated.
    warnings.simplefilter("ignore")
    from torchmetrics.functional.classification import binary_auroc


def _rows(seed, count=400, groups=30):
    rng = np.random.default_rng(seed)
    probs = rng.random(count).astype(np.float32)
    labels = (rng.random(count) < probs).astype(np.float32)
    return Scored(probs, labels, np.ones(count, np.float32), {"user": rng.integers(0, groups, count)})


def _pairwise_auc(probs, labels):
    positive, negative = probs[labels > 0.5], probs[labels <= 0.5]
    if not len(positive) or not len(negative):
        return None
    wins = (positive[:, None] > negative[None]).sum() + 0.5 * (positive[:, None] == negative[None]).sum()
    return wins / (len(positive) * len(negative))


@given(st.lists(st.tuples(st.floats(0, 0.96875, width=32), st.booleans()), min_size=1, max_size=60), st.integers(2, 50))
def test_auc_equals_torchmetrics(pairs, thresholds):
    """But for scores of exactly 1, where torchmetrics' curve doesn't begin at the origin."""
    probs = np.array([prob for prob, _ in pairs], np.float32)
    labels = np.array([label for _, label in pairs], np.float32)
    metric = AUC(thresholds)
    metric.update(Scored(probs, labels, np.ones(len(probs))))
    if 0 < labels.sum() < len(labels):
        expected = binary_auroc(torch.from_numpy(probs), torch.from_numpy(labels).long(), thresholds=thresholds)
        assert metric.compute() == pytest.approx(float(expected), abs=1e-6)
    else:
        assert np.isnan(metric.compute())


def test_auc_with_many_thresholds_is_nearly_exact():
    rows = _rows(1, 2000)
    metric = AUC(10_000)
    metric.update(rows)
    assert metric.compute() == pytest.approx(_pairwise_auc(rows.probs, rows.labels), abs=1e-3)


def test_weights_count_as_repetitions():
    probs, labels = np.array([0.1, 0.4, 0.6, 0.9], np.float32), np.array([0, 1, 0, 1.0])
    for weighted, repeated in [(AUC(), AUC()), (normalized_entropy(), normalized_entropy())]:
        weighted.update(Scored(probs, labels, np.array([1, 2, 3, 0])))
        index = [0, 1, 1, 2, 2, 2]
        repeated.update(Scored(probs[index], labels[index], np.ones(6)))
        assert weighted.compute() == pytest.approx(repeated.compute())


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.booleans()), max_size=40))
def test_grouped_auc_is_the_mean_over_groups_with_both_classes(triples):
    groups = np.array([group for group, _, _ in triples], np.int64)
    probs = np.array([prob for _, prob, _ in triples], np.float32)
    labels = np.array([label for _, _, label in triples], np.float32)
    metric = GroupedAUC("user")
    metric.update(Scored(probs, labels, np.ones(len(probs)), {"user": groups}))
    values = [_pairwise_auc(probs[groups == group], labels[groups == group]) for group in set(groups.tolist())]
    values = [value for value in values if value is not None]
    assert metric.compute() == pytest.approx(np.mean(values), abs=1e-9) if values else np.isnan(metric.compute())


def test_text_groups_are_groups():
    rows = _rows(3)
    numbers, texts = GroupedAUC("user"), GroupedAUC("user")
    numbers.update(rows)
    texts.update(Scored(rows.probs, rows.labels, rows.weights, {"user": np.array([f"u{g}" for g in rows.groups["user"]])}))
    assert texts.compute() == pytest.approx(numbers.compute())


def test_normalized_entropy_of_the_mean_is_one():
    metric = normalized_entropy()
    labels = np.array([1, 0, 0, 0, 1.0])
    metric.update(Scored(np.full(5, 0.4), labels, np.ones(5)))
    assert metric.compute() == pytest.approx(1.0)


def test_certain_and_wrong_is_finite():
    metric = normalized_entropy()
    metric.update(Scored(np.array([1.0, 0.0], np.float32), np.array([0, 1.0]), np.ones(2)))
    assert np.isfinite(metric.compute())


@pytest.mark.parametrize("make", [AUC, lambda: GroupedAUC("user"), normalized_entropy, calibration, label_mean])
def test_merging_is_seeing_all_rows(make):
    whole, first, second, restored = make(), make(), make(), make()
    parts = [_rows(seed) for seed in range(4)]
    for rows in parts:
        whole.update(rows)
    for metric, rows in zip([first, second, first, second], parts, strict=True):
        metric.update(rows)
    restored.load_state(first.state())
    before = second.state()
    restored.merge(before)
    assert restored.compute() == pytest.approx(whole.compute(), abs=1e-12)
    state = restored.state()
    restored.update(_rows(9))
    again = make()
    again.load_state(state)
    assert again.compute() == pytest.approx(whole.compute(), abs=1e-12), "a state changed with later rows"


@pytest.mark.parametrize("make", [AUC, lambda: GroupedAUC("user"), normalized_entropy, calibration, label_mean])
def test_nothing_seen_is_undefined(make):
    assert np.isnan(make().compute())


def test_metrics_are_built_from_the_config():
    configs = [MetricConfig.model_validate(c) for c in ({"auc": {"thresholds": 7}}, {"grouped_auc": {"grouping_key": "user"}})]
    assert [metric.name for metric in build_metrics(configs)] == ["auc", "grouped_auc"]
    assert grouping_keys(configs) == ["user"]
    with pytest.raises(ConfigError, match=r"metrics\[1\]: xauc"):
        build_metrics([configs[0], MetricConfig.model_validate({"xauc": {}})])


def test_rows_of_a_batch_are_grouped_by_their_one_id():
    batch = contract.random_batch(1, 8, num_rows=5)
    probs = np.linspace(0, 1, 5, dtype=np.float32)
    assert len(scored_rows(batch, probs, contract.LABEL).labels) == 5
    with pytest.raises(DataError, match="exactly one"):
        scored_rows(batch, probs, contract.LABEL, ["user"])
    with pytest.raises(ConfigError, match="'nobody' isn't an id feature"):
        scored_rows(batch, probs, contract.LABEL, ["nobody"])
