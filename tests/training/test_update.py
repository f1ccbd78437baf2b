"""From gradients to an update: accumulation, loss scale, averages, mixed precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tidemill.config.train import GradScaler
from tidemill.errors import CheckpointError
from tidemill.models.model import build_model
from tidemill.testing import model_contract as contract
from tidemill.testing.ranks import run_ranks, single_process
from tidemill.training.averages import DenseAverages
from tidemill.training.optimizers import UpdateOptions

SIZE = 24
SGD = {"sgd_optimizer": {"lr": 0.5, "momentum": 0.0}}
FROZEN = {"sgd_optimizer": {"lr": 0.0}}


@pytest.fixture
def runtime():
    with single_process() as runtime:
        yield runtime


def build(runtime, **settings: Any):
    model = build_model(contract.contract_config("multi_tower_din"), contract.contract_features(), seed=3)
    return contract.contract_step(runtime, model, contract.ContractSettings(**settings))


def train(step, *seeds: int) -> None:
    for seed in seeds:
        batch = contract.random_batch(seed, SIZE)
        step(batch, float(batch.weights.sum()))


def dense_of(sharded) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in sharded.dense_state().items()}


def everything(sharded) -> dict[str, bytes]:
    found = {name: tensor.numpy().tobytes() for name, tensor in sharded.dense_state().items()}
    return found | {shard.table: shard.weight.numpy().tobytes() for shard in sharded.local_shards()}


def test_an_update_is_the_mean_of_its_steps_gradients(runtime):
    """With frozen tables: weights - rate * (g1 + g2 + g3) / 3, where each step's gradient is what a single step would take."""
    moves = []
    for seed in range(3):
        step, _, sharded = build(runtime, dense=SGD, sparse=FROZEN)
        before = dense_of(sharded)
        train(step, seed)
        moves.append({name: tensor - before[name] for name, tensor in dense_of(sharded).items()})
    step, optimizers, sharded = build(runtime, dense=SGD, sparse=FROZEN, update=UpdateOptions(accumulation=3))
    before = dense_of(sharded)
    train(step, 0, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense_of(sharded).items()), "nothing before the third"
    assert optimizers.gradients()
    train(step, 2)
    assert not optimizers.gradients()
    for name, tensor in dense_of(sharded).items():
        expected = sum(move[name] for move in moves) / 3
        torch.testing.assert_close(tensor - before[name], expected, rtol=1e-4, atol=1e-6)
    assert step.steps == 3


def test_tables_are_updated_in_each_step_of_an_accumulation(runtime):
    step, _, sharded = build(runtime, update=UpdateOptions(accumulation=4))
    before = {shard.table: shard.weight.clone() for shard in sharded.local_shards()}
    train(step, 0)
    assert all(not torch.equal(shard.weight, before[shard.table]) for shard in sharded.local_shards())


def test_gradients_of_another_model_are_refused(runtime):
    _, optimizers, _ = build(runtime)
    with pytest.raises(CheckpointError, match=r"'elsewhere\.weight'"):
        optimizers.load_gradients({"elsewhere.weight": np.zeros(3, np.float32)})


def test_a_loss_scale_changes_nothing_but_the_size_on_the_way(runtime):
    """Powers of two are exact: with and without a scale the same bits, tables included."""
    finals = []
    for scaler in (None, GradScaler(init_scale=1024.0, growth_interval=2)):
        step, optimizers, sharded = build(runtime, update=UpdateOptions(scaler=scaler))
        train(step, *range(6))
        finals.append(everything(sharded))
    assert finals[0] == finals[1]
    assert optimizers.scale.value == 1024.0 * 8, "it has grown after each two good updates"


def test_an_overflow_leaves_the_update_out_and_shrinks_the_scale(runtime):
    scaler = GradScaler(init_scale=1e300, backoff_factor=1e-298)
    step, optimizers, sharded = build(runtime, update=UpdateOptions(scaler=scaler))
    before = everything(sharded)
    train(step, 0)
    assert everything(sharded) == before
    assert optimizers.scale.value == pytest.approx(100.0)
    train(step, 1)
    after = everything(sharded)
    assert all(after[name] != before[name] for name in optimizers.parameters)
    assert all(np.isfinite(tensor.numpy()).all() for tensor in sharded.dense_state().values())


@pytest.mark.parametrize("precision", ["BF16", "FP16"])
def test_mixed_precision_trains_nearly_the_same_and_scores_in_full(runtime, precision):
    updates = UpdateOptions(scaler=GradScaler(init_scale=1024.0) if precision == "FP16" else None)
    full, half = build(runtime), build(runtime, mixed_precision=precision, update=updates)
    batch = contract.random_batch(1, SIZE)
    np.testing.assert_array_equal(full[0].scores(batch)["probs"], half[0].scores(batch)["probs"])
    for step, _, _ in (full, half):
        train(step, *range(5))
    assert half[0](batch, 10.0)["logits"].dtype == np.float32
    one, other = dense_of(full[2]), dense_of(half[2])
    assert any(not torch.equal(one[name], other[name]) for name in one)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0.1, atol=0.05)


def test_averages_follow_the_updates(runtime):
    dense = {**SGD, "ema": {"decay": 0.75}}
    step, optimizers, sharded = build(runtime, dense=dense, update=UpdateOptions(accumulation=2))
    averages = optimizers.averages
    assert averages is not None
    train(step, 0)
    assert not averages.begun, "no update yet"
    train(step, 1)
    expected = dense_of(sharded)
    for pair in ((2, 3), (4, 5)):
        train(step, *pair)
        for name, tensor in dense_of(sharded).items():
            expected[name] = 0.75 * expected[name] + 0.25 * tensor
    for name, value in averages.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


def test_scoring_with_the_averages_leaves_the_weights_alone(runtime):
    step, optimizers, sharded = build(runtime, dense={**SGD, "ema": {"decay": 0.9}})
    train(step, 0, 1, 2)
    assert optimizers.averages is not None
    batch, before = contract.random_batch(9, SIZE), everything(sharded)
    plain = step.scores(batch)["probs"]
    with optimizers.averages.applied():
        averaged = step.scores(batch)["probs"]
    assert not np.array_equal(plain, averaged)
    assert everything(sharded) == before
    np.testing.assert_array_equal(step.scores(batch)["probs"], plain)


def test_averages_before_the_first_update_are_the_weights():
    weight = torch.ones(3)
    averages = DenseAverages({"w": weight}, 0.9)
    with averages.applied():
        assert weight.tolist() == [1.0, 1.0, 1.0]
    averages.update()
    weight.zero_()
    averages.update()
    assert averages.values()["w"].tolist() == pytest.approx([0.9] * 3)


def _trained_on_ranks(runtime, scaler: GradScaler | None, accumulation: int) -> dict[str, bytes]:
    step, _, sharded = build(runtime, update=UpdateOptions(accumulation=accumulation, scaler=scaler))
    for seed in range(4):
        batch = contract.random_batch(10 * seed + runtime.rank, SIZE)
        step(batch, 40.0)
    return everything(sharded)


@pytest.mark.slow
def test_on_two_ranks_a_scale_changes_nothing_and_accumulation_keeps_ranks_equal():
    plain = run_ranks(2, _trained_on_ranks, None, 2)
    scaled = run_ranks(2, _trained_on_ranks, GradScaler(init_scale=1024.0), 2)
    assert plain == scaled
    dense = [{name: data for name, data in rank.items() if "/" not in name} for rank in scaled]
    assert dense[0]
    assert dense[0] == dense[1]
