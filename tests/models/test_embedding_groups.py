"""Feature groups: what tables and columns they come to, and that a lookup lays them out as promised."""

import numpy as np
import pytest
import torch

from tidemill.config.model import FeatureGroupConfig
from tidemill.config.optimizer import SparseOptimizer
from tidemill.distributed.sharding import shard
from tidemill.errors import ConfigError
from tidemill.features.batch import Batch, IdColumns
from tidemill.features.feature_set import FeatureSet
from tidemill.models.embedding_groups import Columns, EmbeddingGroups, plan_groups
from tidemill.models.model import build_model
from tidemill.testing import model_contract as contract
from tidemill.testing.ranks import single_process


def _plan(*groups):
    return plan_groups(contract.contract_features(), groups)


def test_columns_follow_the_config_not_the_features():
    plan = _plan(FeatureGroupConfig(group_name="g", feature_names=("other_item", "price", "user", "tags", "context")))
    assert [lookup.feature for lookup in plan.inputs.pooled] == ["other_item", "user", "tags"]
    assert plan.inputs.num_dense == 3
    assert plan.deep["g"] == (
        Columns("pooled", 0, 8),
        Columns("dense", 0, 1),
        Columns("pooled", 8, 20),
        Columns("dense", 1, 3),
    )
    assert plan.width("g") == 23


def test_equal_embedding_names_share_a_table_within_a_collection():
    plan = _plan(
        FeatureGroupConfig(group_name="a", feature_names=("item", "other_item")),
        FeatureGroupConfig(group_name="b", feature_names=("item", "clicks"), group_type="SEQUENCE"),
    )
    assert [(table.name, table.num_embeddings) for table in plan.tables] == [("pooled/item_emb", 40), ("sequence/item_emb", 40)]
    sequence = plan.sequence("b")
    assert [look.table for look in (*sequence.query, *sequence.steps)] == ["sequence/item_emb"] * 2
    assert sequence.max_steps == contract.MAX_STEPS


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"feature_names": ("nobody",)}, "no feature is named 'nobody'"),
        ({"feature_names": ("user", "user")}, "listed twice"),
        ({"feature_names": ()}, "feature_names is empty"),
        ({"feature_names": ("clicks",)}, "'clicks' is a sequence"),
        ({"feature_names": ("user",), "group_type": "WIDE"}, "WIDE isn't supported"),
        ({"feature_names": ("user",), "group_type": "SEQUENCE"}, "needs at least one sequence"),
        ({"feature_names": ("price", "clicks"), "group_type": "SEQUENCE"}, "'price' is a raw feature"),
        ({"feature_names": ("user",), "embedding_name_suffix": "_x"}, "embedding_name_suffix"),
    ],
)
def test_a_wrong_group_is_named(group, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _plan(FeatureGroupConfig(group_name="g", **group))
    assert "'g'" in str(caught.value)


def test_group_names_differ():
    group = FeatureGroupConfig(group_name="g", feature_names=("user",))
    with pytest.raises(ConfigError, match="group names must differ"):
        _plan(group, group)


def test_inputs_are_the_rows_of_the_tables():
    """The oracle looks up row by row what `ProgramInputs` describes, in plain numpy: what a server does."""
    model = build_model(contract.contract_config("multi_tower_din"), contract.contract_features(), seed=1)
    batch = contract.random_batch(3, 16, num_rows=13)
    with single_process() as runtime:
        _, _, sharded = contract.contract_step(runtime, model)
        tables = {shard.table: shard.weight.clone().numpy() for shard in sharded.local_shards()}
        with torch.no_grad():
            found = {name: tensor.numpy() for name, tensor in model.embeddings(batch).items()}
    inputs = model.plan.inputs
    pooled = [_pooled(_ids(batch, look.feature), tables[look.table], look.pooling) for look in inputs.pooled]
    sequence = inputs.sequences[0]
    steps = _ids(batch, sequence.steps[0].feature)
    expected = {
        "dense": batch.dense.numpy(),
        "pooled": np.concatenate(pooled, axis=1),
        "history.query": _stepwise(_ids(batch, "item"), tables["sequence/item_emb"], 1)[:, 0],
        "history.sequence": _stepwise(steps, tables["sequence/item_emb"], sequence.max_steps),
        "history.lengths": np.array([len(row) for row in steps]),
    }
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-7, err_msg=name)
    assert found["history.lengths"].dtype == np.int64
    assert not found["pooled"][13:].any()


def test_sequences_of_several_dimensions_stand_side_by_side():
    features = FeatureSet(
        [
            contract.id_plan("user", 20, 4),
            contract.id_plan("items", 30, 8, sequence_length=3),
            contract.id_plan("shops", 10, 4, embedding_name="user_emb2", sequence_length=5),
        ]
    )
    group = FeatureGroupConfig(group_name="g", feature_names=("shops", "user", "items"), group_type="SEQUENCE")
    plan = plan_groups(features, [group])
    batch = Batch(
        num_rows=2,
        size=2,
        dense=torch.zeros(2, 0),
        ids=IdColumns(("user",), torch.tensor([7]), torch.tensor([0, 1], dtype=torch.int32)),
        sequences=IdColumns(("items", "shops"), torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 0, 2, 1], dtype=torch.int32)),
        labels={},
        weights=torch.ones(2),
        extras={},
    )
    with single_process() as runtime:
        holder = torch.nn.Module()
        holder.embeddings = EmbeddingGroups(plan)
        sparse = SparseOptimizer.model_validate({"sgd_optimizer": {}})
        tables = {s.table: s.weight for s in shard(holder, runtime, sparse, "row_wise", seed=1).local_shards()}
        found = holder.embeddings(batch)
    assert sorted(found) == ["g.lengths", "g.query", "g.sequence"]
    assert found["g.sequence"].shape == (2, 5, 12)
    assert found["g.lengths"].tolist() == [2, 1]
    assert torch.equal(found["g.query"], torch.stack([torch.zeros(4), tables["sequence/user_emb"][7]]))
    assert torch.equal(found["g.sequence"][0, :2, :4], tables["sequence/user_emb2"][[3, 4]])
    assert torch.equal(found["g.sequence"][0, :2, 4:], tables["sequence/items_emb"][[1, 2]])
    assert not found["g.sequence"][0, 2:].any()
    assert torch.equal(found["g.sequence"][1, 0], torch.cat([tables["sequence/user_emb2"][5], torch.zeros(8)]))


def _ids(batch, feature):
    columns = batch.ids if feature in batch.ids.keys else batch.sequences
    column = columns.select([feature])
    return np.split(column.values.numpy(), np.cumsum(column.lengths.numpy())[:-1])


def _pooled(ids, table, pooling):
    zero = np.zeros((1, table.shape[1]), np.float32)
    return np.stack([getattr(table[row] if len(row) else zero, pooling)(axis=0) for row in ids])


def _stepwise(ids, table, steps):
    out = np.zeros((len(ids), steps, table.shape[1]), np.float32)
    for at, row in enumerate(ids):
        out[at, : len(row[:steps])] = table[row[:steps]]
    return out
