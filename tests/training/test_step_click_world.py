"""The demo's model on the click world: it learns what can be learned."""

import numpy as np
import torch

from tidemill.data.click_world import World
from tidemill.features.feature_set import FeatureSet
from tidemill.models.metrics import AUC, Scored, scored_rows
from tidemill.models.model import build_model
from tidemill.registry import resolve
from tidemill.testing import model_contract as contract
from tidemill.testing.ranks import single_process

ROWS, TEST_ROWS, SIZE = 49_152, 8_192, 512
IDS = {"user_id": ("user", 4000), "hour": ("context", 24), "item_id": ("item", 4000), "category_id": ("item", 100)}


def _features():
    id_config, raw_config = (resolve("feature", kind).Config for kind in ("id_feature", "raw_feature"))
    sequence_config = resolve("feature", "sequence_id_feature").Config
    ids = [
        id_config(feature_name=name, expression=f"{side}:{name}", hash_bucket_size=buckets, embedding_dim=8)
        for name, (side, buckets) in IDS.items()
    ]
    clicks = sequence_config(
        feature_name="click_seq",
        expression="user:click_seq",
        embedding_name="item_id_emb",
        hash_bucket_size=4000,
        embedding_dim=8,
        sequence_length=20,
        sequence_delim=";",
    )
    price = raw_config(feature_name="price", expression="item:price", normalizer="method=log10")
    named = [*(("id_feature", config) for config in ids), ("raw_feature", price), ("sequence_id_feature", clicks)]
    return FeatureSet.compile(named, labels=["click"])


def _config():
    section = {
        "towers": [{"input": "deep", "mlp": {"hidden_units": [32]}}],
        "din_towers": [{"input": "history", "attn_mlp": {"hidden_units": [16]}}],
        "final": {"hidden_units": [32, 16]},
    }
    groups = (
        {"group_name": "deep", "feature_names": ("user_id", "hour", "item_id", "category_id", "price")},
        {"group_name": "history", "feature_names": ("item_id", "click_seq"), "group_type": "SEQUENCE"},
    )
    config = contract.contract_config("multi_tower_din", section)
    return config.model_validate({**config.model_dump(), "config": config.config, "feature_groups": groups})


def test_an_afternoon_of_clicks_is_learned():
    table = World(seed=3).day_table(0, ROWS + TEST_ROWS).combine_chunks()
    features = _features()
    assert features.id_features
    with single_process() as runtime:
        torch.manual_seed(0)
        step, _, _ = contract.contract_step(runtime, build_model(_config(), features, seed=1))
        losses, seen = [], AUC(2000)
        for at in range(0, len(table), SIZE):
            batch = features.transform(table.slice(at, SIZE).to_batches()[0], size=SIZE)
            outputs = step(batch, float(batch.weights.sum()))
            losses.append(step.loss_sum / SIZE)
            if at >= ROWS:
                seen.update(scored_rows(batch, outputs["probs"], "click"))
    assert np.mean(losses[-16:]) < np.mean(losses[:4]) - 0.02
    truth = table.slice(ROWS)
    best = AUC(2000)
    best.update(Scored(truth["true_probability"].to_numpy(), truth["click"].to_numpy(), np.ones(len(truth))))
    # On rows that it hadn't been trained on yet, well on the way from a guess (0.5) to what nobody can beat.
    assert seen.compute() > 0.5 + 0.6 * (best.compute() - 0.5), (seen.compute(), best.compute())
