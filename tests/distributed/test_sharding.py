"""Tables over ranks: the same model whatever the world size and sharding; idle ranks; shards and lookups. Real gloo processes."""

import itertools

import numpy as np
import pytest
import torch

from tidemill.distributed.initial import BLOCK_ROWS, fill_initial
from tidemill.errors import ConfigError
from tidemill.models.model import build_model
from tidemill.testing import model_contract as contract
from tidemill.testing.ranks import run_ranks, single_process

SIZE = 24
STEPS = 5
ADAGRAD = {"adagrad_optimizer": {"lr": 0.1}}
ROWWISE = {"rowwise_adagrad_optimizer": {"lr": 0.1}}
ADAM = {"adam_optimizer": {"lr": 0.01}}
# Where a gradient is nearly 0, Adam's first steps turn its rounding errors into steps of full length: not for comparisons that
# change the order of sums.
SGD = {"sgd_optimizer": {"lr": 0.1}}


def _model():
    return build_model(contract.contract_config("multi_tower_din"), contract.contract_features(), seed=3)


def _global_batches():
    return [contract.random_batch(seed, 2 * SIZE) for seed in range(STEPS)]


def _tables(sharded):
    """This rank's shards as numpy, with their optimizer state."""
    return [
        (s.table, s.row_start, s.row_stop, s.weight.clone().numpy(), {k: v.clone().numpy() for k, v in s.optimizer.items()})
        for s in sharded.local_shards()
    ]


def _train(runtime, settings, batches):
    """What training came to: shards, dense state, outputs of this rank by step, marked rows by table."""
    step, _, sharded = contract.contract_step(runtime, _model(), settings)
    orders = set()
    sharded.model.embeddings.pooled.register_forward_hook(lambda module, args, output: orders.add(tuple(output.keys())))
    marks = {}
    sharded.on_lookup(lambda table, rows: marks.setdefault(table, set()).update(rows.tolist()))
    initial = _tables(sharded)
    probs = [step(mine, weight)["probs"] for mine, weight in batches]
    scores = step.scores(contract.random_batch(99, SIZE))["probs"]
    dense = {name: tensor.numpy() for name, tensor in sharded.dense_state().items()}
    return {
        "initial": initial,
        "final": _tables(sharded),
        "dense": dense,
        "probs": probs,
        "scores": scores,
        "marks": marks,
        "orders": orders,
    }


def _weight(batch):
    return float(batch.weights.sum())


def _settings(sharding, dense, sparse=ADAGRAD):
    return contract.ContractSettings(sharding=sharding, sparse=sparse, dense=dense)


def _train_alone(settings, batches):
    with single_process() as runtime:
        return _train(runtime, settings, [(batch, _weight(batch)) for batch in batches])


def _rank_trains_its_half(runtime, settings):
    halves = [(contract.split_batch(batch, 2)[runtime.rank], _weight(batch)) for batch in _global_batches()]
    return _train(runtime, settings, halves)


def _idle_batches():
    # One id a feature: a sum of several, split over ranks, is another order of additions, whether or not a rank is idle.
    return [contract.random_batch(seed, SIZE, max_ids=1) for seed in range(STEPS)]


def _rank_one_is_idle(runtime, settings):
    idle = contract.padding_batch(contract.contract_features(), [contract.LABEL], SIZE)
    return _train(runtime, settings, [(idle if runtime.rank else batch, _weight(batch)) for batch in _idle_batches()])


def _ranks_score_loaded_shards(runtime, settings, tables, dense):
    """Load full tables into whatever shards this rank has, and score."""
    step, _, sharded = contract.contract_step(runtime, _model(), settings)
    with torch.no_grad():
        for shard in sharded.local_shards():
            weight, state = tables[shard.table]
            shard.weight.copy_(torch.from_numpy(weight[shard.row_start : shard.row_stop]))
            for name, tensor in shard.optimizer.items():
                tensor.copy_(torch.from_numpy(state[name][shard.row_start : shard.row_stop]))
    sharded.load_dense_state({name: torch.from_numpy(array) for name, array in dense.items()})
    before = step.scores(contract.random_batch(99, SIZE))["probs"]
    batch = contract.random_batch(50, 2 * SIZE)
    mine = batch if runtime.world_size == 1 else contract.split_batch(batch, 2)[runtime.rank]
    step(mine, _weight(batch))
    return before, step.scores(contract.random_batch(99, SIZE))["probs"]


def _assemble(results, key):
    """table -> (full weight, full optimizer state), from all ranks' shards; they cover every row once."""
    parts = {}
    for result in results:
        for table, start, stop, weight, state in result[key]:
            parts.setdefault(table, []).append((start, stop, weight, state))
    full = {}
    for table, shards in parts.items():
        shards.sort(key=lambda shard: shard[0])
        assert shards[0][0] == 0
        assert all(left[1] == right[0] for left, right in itertools.pairwise(shards))
        weight = np.concatenate([shard[2] for shard in shards])
        full[table] = weight, {name: np.concatenate([shard[3][name] for shard in shards]) for name in shards[0][3]}
    return full


SCENARIOS = {
    "row_wise": (_rank_trains_its_half, _settings("row_wise", SGD)),
    "table_wise": (_rank_trains_its_half, _settings("table_wise", SGD)),
    "rowwise_adagrad": (_rank_trains_its_half, _settings("row_wise", SGD, ROWWISE)),
    "idle_row_wise": (_rank_one_is_idle, _settings("row_wise", ADAM)),
    "idle_table_wise": (_rank_one_is_idle, _settings("table_wise", ADAM)),
}


def _all_scenarios(runtime):
    return {name: function(runtime, settings) for name, (function, settings) in SCENARIOS.items()}


@pytest.fixture(scope="module")
def alone():
    return {sharding: _train_alone(_settings(sharding, SGD), _global_batches()) for sharding in ("row_wise", "table_wise")}


@pytest.fixture(scope="module")
def two_ranks():
    """Scenario -> results in rank order. One pair of processes for all: starting it takes longer than the rest."""
    ranks = run_ranks(2, _all_scenarios)
    return {name: [rank[name] for rank in ranks] for name in SCENARIOS}


def test_shardings_are_the_same_on_one_rank(alone):
    first, second = alone["row_wise"], alone["table_wise"]
    for left, right in zip(first["probs"], second["probs"], strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_two_ranks_start_as_one(alone, two_ranks, sharding):
    one, two = _assemble([alone[sharding]], "initial"), _assemble(two_ranks[sharding], "initial")
    assert sorted(one) == sorted(two)
    for table in one:
        np.testing.assert_array_equal(one[table][0], two[table][0], err_msg=table)


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_two_ranks_learn_what_one_learns(alone, two_ranks, sharding):
    one, two = _assemble([alone[sharding]], "final"), _assemble(two_ranks[sharding], "final")
    before = _assemble([alone[sharding]], "initial")
    for table, (weight, state) in one.items():
        assert np.abs(weight - before[table][0]).max() > 0.01, "nothing was learned, so equality would say nothing"
        np.testing.assert_allclose(two[table][0], weight, rtol=0, atol=1e-6, err_msg=table)
        np.testing.assert_allclose(two[table][1]["momentum1"], state["momentum1"], rtol=1e-4, atol=1e-8, err_msg=table)
    for rank in two_ranks[sharding]:
        for name, array in alone[sharding]["dense"].items():
            np.testing.assert_allclose(rank["dense"][name], array, rtol=0, atol=1e-6, err_msg=name)
    for at in range(STEPS):
        halves = np.concatenate([rank["probs"][at] for rank in two_ranks[sharding]])
        np.testing.assert_allclose(halves, alone[sharding]["probs"][at], rtol=0, atol=1e-6)


def test_the_order_of_keys_depends_on_the_plan(two_ranks):
    """Else the comparisons above wouldn't notice features that are picked by place instead of by name."""
    assert two_ranks["table_wise"][0]["orders"] != two_ranks["row_wise"][0]["orders"]


def test_row_wise_gives_each_rank_half_of_each_table(two_ranks):
    first, second = ({table: (start, stop) for table, start, stop, _, _ in rank["initial"]} for rank in two_ranks["row_wise"])
    assert first["pooled/user_emb"] == (0, 25)
    assert second["pooled/user_emb"] == (25, 50)
    assert sorted(first) == sorted(second)


def test_table_wise_spreads_whole_tables(two_ranks):
    first, second = ({table for table, *_ in rank["initial"]} for rank in two_ranks["table_wise"])
    assert first
    assert second
    assert not first & second


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_lookups_are_reported_to_the_rank_that_owns_the_rows(alone, two_ranks, sharding):
    """Exactly the rows whose bytes changed are reported, under their place in the shard; scoring reports nothing."""
    for result in (alone[sharding], *two_ranks[sharding]):
        for (table, _, _, before, _), (_, _, _, after, _) in zip(result["initial"], result["final"], strict=True):
            changed = set(np.flatnonzero((before != after).any(axis=1)).tolist())
            assert result["marks"].get(table, set()) == changed, table


def test_lookups_are_reported_for_rows_whose_ids_came_from_the_other_rank(two_ranks):
    ids = {i for batch in _global_batches() for i in batch.ids.select(["user"]).values.tolist()}
    first, second = (rank["marks"]["pooled/user_emb"] for rank in two_ranks["row_wise"])
    assert first == {row for row in ids if row < 25}
    assert second == {row - 25 for row in ids if row >= 25}


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_an_idle_rank_changes_nothing(sharding, two_ranks):
    one = _train_alone(_settings(sharding, ADAM), _idle_batches())
    ranks = two_ranks[f"idle_{sharding}"]
    expected, found = _assemble([one], "final"), _assemble(ranks, "final")
    for table, (weight, state) in expected.items():
        np.testing.assert_array_equal(found[table][0], weight, err_msg=table)
        np.testing.assert_array_equal(found[table][1]["momentum1"], state["momentum1"], err_msg=table)
    for name, array in one["dense"].items():
        np.testing.assert_array_equal(ranks[1]["dense"][name], array, err_msg=name)
    assert all(len(probs) == 0 for probs in ranks[1]["probs"])


def test_shards_carry_a_model_from_two_ranks_to_one_and_back(two_ranks):
    tables = _assemble(two_ranks["row_wise"], "final")
    dense = two_ranks["row_wise"][0]["dense"]
    with single_process() as runtime:
        one = _ranks_score_loaded_shards(runtime, _settings("table_wise", SGD), tables, dense)
    np.testing.assert_allclose(one[0], two_ranks["row_wise"][0]["scores"], rtol=0, atol=1e-7)
    for rank in run_ranks(2, _ranks_score_loaded_shards, _settings("table_wise", SGD), tables, dense):
        np.testing.assert_allclose(rank[0], one[0], rtol=0, atol=1e-7)
        np.testing.assert_allclose(rank[1], one[1], rtol=0, atol=2e-6)
    assert np.abs(one[1] - one[0]).max() > 1e-4


def test_rowwise_adagrad_keeps_one_number_a_row(two_ranks):
    one = _assemble([_train_alone(_settings("row_wise", SGD, ROWWISE), _global_batches())], "final")
    two = _assemble(two_ranks["rowwise_adagrad"], "final")
    for table, (weight, state) in one.items():
        assert state["momentum1"].shape == (len(weight),)
        np.testing.assert_allclose(two[table][0], weight, rtol=0, atol=1e-6, err_msg=table)


def test_shards_are_live():
    with single_process() as runtime:
        step, _, sharded = contract.contract_step(runtime, _model())
        shards = sharded.local_shards()
        before = [(shard.weight.clone(), shard.optimizer["momentum1"].clone()) for shard in shards]
        batch = contract.random_batch(1, SIZE)
        step(batch, _weight(batch))
        for shard, (weight, momentum) in zip(shards, before, strict=True):
            assert not torch.equal(shard.weight, weight)
            assert not torch.equal(shard.optimizer["momentum1"], momentum)
        with torch.no_grad():
            shards[0].weight.fill_(0.5)
        assert float(sharded.local_shards()[0].weight.min()) == 0.5


def test_sgd_has_no_state_and_adagrad_starts_where_told():
    with single_process() as runtime:
        for section, states in [
            ({"sgd_optimizer": {"lr": 0.1}}, set()),
            ({"adagrad_optimizer": {"initial_accumulator_value": 0.25}}, {0.25}),
        ]:
            _, _, sharded = contract.contract_step(runtime, _model(), _settings("row_wise", SGD, section))
            found = {value for s in sharded.local_shards() for tensor in s.optimizer.values() for value in tensor.unique().tolist()}
            assert found == states


def test_an_optimizer_without_a_kernel_is_refused():
    with single_process() as runtime, pytest.raises(ConfigError, match=r"adam_optimizer isn't supported on cpu"):
        contract.contract_step(runtime, _model(), _settings("row_wise", SGD, {"adam_optimizer": {}}))


def test_initial_rows_are_a_function_of_the_row():
    rows = BLOCK_ROWS + 1000
    full = torch.empty(rows, 2)
    fill_initial(full, "t", rows, 0, seed=1)
    part = torch.empty(700, 2)
    fill_initial(part, "t", rows, BLOCK_ROWS - 300, seed=1)
    assert torch.equal(part, full[BLOCK_ROWS - 300 : BLOCK_ROWS + 400])
    bound = rows**-0.5
    assert 0.99 * bound < float(full.abs().max()) <= bound
    other = torch.empty(rows, 2)
    fill_initial(other, "u", rows, 0, seed=1)
    assert not torch.equal(other, full)
