"""One training step: gradients, scores before the update, determinism, state."""

import dataclasses

import numpy as np
import pytest
import torch

from tidemill.config.train import GradClipping
from tidemill.errors import CheckpointError
from tidemill.models.model import build_model
from tidemill.testing import model_contract as contract
from tidemill.testing.ranks import single_process
from tidemill.training.optimizers import UpdateOptions

SIZE = 24
DROPOUT = {"towers": [{"input": "deep", "mlp": {"hidden_units": [16], "dropout_ratio": [0.5]}}], "final": {"hidden_units": [8]}}


@pytest.fixture
def runtime():
    with single_process() as runtime:
        yield runtime


def _build(runtime, section=None, **settings):
    kind = "multi_tower_din" if section is None else "multi_tower"
    model = build_model(contract.contract_config(kind, section), contract.contract_features(), seed=3)
    return contract.contract_step(runtime, model, contract.ContractSettings(**settings))


def _everything(step, optimizers, sharded):
    """All that training changes, as bytes by name."""
    found = {name: tensor.numpy().tobytes() for name, tensor in sharded.dense_state().items()}
    found |= {name: array.tobytes() for name, array in optimizers.dense_optimizer_state().items()}
    for shard in sharded.local_shards():
        found[shard.table] = shard.weight.numpy().tobytes()
        found |= {f"{shard.table}/{name}": tensor.numpy().tobytes() for name, tensor in shard.optimizer.items()}
    return found


def _weight(batch):
    return float(batch.weights.sum())


def test_training_is_the_same_bit_for_bit(runtime):
    runs = []
    for _ in range(2):
        parts = _build(runtime)
        for seed in range(6):
            batch = contract.random_batch(seed, SIZE)
            parts[0](batch, _weight(batch))
        runs.append(_everything(*parts))
    assert runs[0] == runs[1]


def test_outputs_are_the_scores_before_the_update(runtime):
    step, _, _ = _build(runtime)
    batch = contract.random_batch(1, SIZE, num_rows=20)
    before = step.scores(batch)
    outputs = step(batch, _weight(batch))
    after = step.scores(batch)
    assert sorted(outputs) == ["logits", "probs"]
    for name in outputs:
        assert outputs[name].shape == (20,)
        np.testing.assert_array_equal(outputs[name], before[name])
        assert not np.array_equal(outputs[name], after[name])


def test_with_dropout_outputs_are_scores_only_if_asked_for(runtime):
    batch = contract.random_batch(1, SIZE)
    for score_first in (True, False):
        step, _, _ = _build(runtime, DROPOUT, score_first=score_first)
        before = step.scores(batch)["probs"]
        assert np.array_equal(step(batch, _weight(batch))["probs"], before) == score_first


def test_scoring_changes_nothing(runtime):
    parts = _build(runtime, DROPOUT)
    step, _, sharded = parts
    marks = []
    step(contract.random_batch(1, SIZE), 20.0)
    sharded.on_lookup(lambda table, rows: marks.append(table))
    before, random_state = _everything(*parts), torch.get_rng_state()
    first, second = step.scores(contract.random_batch(2, 64)), step.scores(contract.random_batch(2, 64))
    np.testing.assert_array_equal(first["probs"], second["probs"])
    assert _everything(*parts) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not marks


def test_scoring_in_between_leaves_training_as_it_was(runtime):
    finals = []
    for scoring in (False, True):
        torch.manual_seed(7)
        parts = _build(runtime, DROPOUT)
        for seed in range(4):
            if scoring:
                parts[0].scores(contract.random_batch(50 + seed, SIZE))
            batch = contract.random_batch(seed, SIZE)
            parts[0](batch, _weight(batch))
        finals.append(_everything(*parts))
    assert finals[0] == finals[1]


def test_padding_teaches_nothing(runtime):
    """A padded batch trains like its rows alone would."""
    finals = []
    for size in (12, SIZE):
        step, _, sharded = _build(runtime, dense={"sgd_optimizer": {"lr": 0.1}})
        batch = contract.random_batch(1, size, num_rows=12)
        step(batch, _weight(batch))
        finals.append({shard.table: shard.weight.clone() for shard in sharded.local_shards()} | sharded.dense_state())
    for name, tensor in finals[0].items():
        torch.testing.assert_close(finals[1][name], tensor, rtol=0, atol=1e-6)


def test_padding_is_all_weight_0(runtime):
    step, _, _ = _build(runtime)
    padding = step.padding()
    assert padding.num_rows == 0
    assert not padding.weights.any()
    assert padding.ids.keys == contract.random_batch(1, 4).ids.keys
    assert step.scores(padding)["probs"].shape == (0,)


def test_a_step_without_weight_is_refused(runtime):
    step, _, _ = _build(runtime)
    with pytest.raises(ValueError, match="global weight above 0"):
        step(step.padding(), 0.0)


def test_the_gradient_is_of_the_weighted_mean(runtime):
    """With sgd at rate 1 a weight moves by its gradient, which autograd gives for the plain formula."""
    step, _, sharded = _build(runtime, dense={"sgd_optimizer": {"lr": 1.0, "momentum": 0.0}}, sparse={"sgd_optimizer": {"lr": 0.0}})
    batch = contract.random_batch(1, SIZE, num_rows=20)
    model = sharded.model.eval()
    head = model.program.head
    before = head.weight.detach().clone()
    probs = model(batch)["probs"]
    entropy = torch.nn.functional.binary_cross_entropy(probs, batch.labels[contract.LABEL], reduction="none")
    loss = (entropy * batch.weights).sum() / batch.weights.sum()
    (expected,) = torch.autograd.grad(loss, head.weight)
    step(batch, _weight(batch))
    torch.testing.assert_close(before - head.weight.detach(), expected, rtol=1e-4, atol=1e-7)
    assert step.loss_sum / _weight(batch) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_bounds_the_dense_gradient(runtime, kind):
    bound = 1e-3
    clipping = GradClipping(clipping_type=kind, max_gradient=bound)
    sgd = {"sgd_optimizer": {"lr": 1.0, "momentum": 0.0}}
    step, _, sharded = _build(runtime, dense=sgd, update=UpdateOptions(clipping=clipping))
    before = {name: tensor.clone() for name, tensor in sharded.dense_state().items()}
    batch = contract.random_batch(1, SIZE)
    step(batch, _weight(batch))
    moved = torch.cat([(tensor - before[name]).flatten() for name, tensor in sharded.dense_state().items()])
    size = float(moved.norm() if kind == "norm" else moved.abs().max())
    assert size == pytest.approx(bound, rel=1e-2)


def test_a_restored_run_goes_on_bit_for_bit(runtime):
    parts = _build(runtime)
    step, optimizers, sharded = parts
    batches = [contract.random_batch(seed, SIZE) for seed in range(6)]
    for batch in batches[:3]:
        step(batch, _weight(batch))
    dense = {name: tensor.clone() for name, tensor in sharded.dense_state().items()}
    dense_optimizer, state = optimizers.dense_optimizer_state(), step.state()
    shards = [dataclasses.replace(shard, weight=shard.weight.clone(), optimizer=_cloned(shard)) for shard in sharded.local_shards()]
    for batch in batches[3:]:
        step(batch, _weight(batch))
    uninterrupted = _everything(*parts)

    again = _build(runtime)
    step, optimizers, sharded = again
    sharded.load_dense_state(dense)
    optimizers.load_dense_optimizer_state(dense_optimizer)
    step.load_state(state)
    for live, saved in zip(sharded.local_shards(), shards, strict=True):
        live.weight.copy_(saved.weight)
        for name, tensor in live.optimizer.items():
            tensor.copy_(saved.optimizer[name])
    for batch in batches[3:]:
        step(batch, _weight(batch))
    assert step.steps == 6
    assert _everything(*again) == uninterrupted


def _cloned(shard):
    return {name: tensor.clone() for name, tensor in shard.optimizer.items()}


def test_optimizer_state_of_another_model_is_refused(runtime):
    step, optimizers, _ = _build(runtime)
    batch = contract.random_batch(1, SIZE)
    step(batch, _weight(batch))
    state = optimizers.dense_optimizer_state()
    name = next(iter(optimizers.parameters))
    for wrong, message in [
        ({**state, "nobody/step": np.float32(1)}, "no parameter of that name"),
        ({key: value for key, value in state.items() if key != f"{name}/exp_avg"}, "lacks entries"),
        ({**state, f"{name}/exp_avg": np.zeros(3, np.float32)}, "has shape"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            optimizers.load_dense_optimizer_state(wrong)


def test_schedules_move_both_rates(runtime):
    decay = {"exponential_decay_learning_rate": {"decay_size": 2, "decay_factor": 0.5}}
    step, _, sharded = _build(
        runtime, dense={"adam_optimizer": {"lr": 0.4}, **decay}, sparse={"sgd_optimizer": {"lr": 0.0}, **decay}
    )
    before = [shard.weight.clone() for shard in sharded.local_shards()]
    rates = []
    for seed in range(4):
        batch = contract.random_batch(seed, SIZE)
        step(batch, _weight(batch))
        rates.append(step.learning_rates)
    assert rates == [(0.4, 0.0), (0.4, 0.0), (0.2, 0.0), (0.2, 0.0)]
    assert all(torch.equal(shard.weight, old) for shard, old in zip(sharded.local_shards(), before, strict=True))
