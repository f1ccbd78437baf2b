"""Starting from another run's checkpoint: names mapped, coverage told, positions left behind (B9)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from tests.jobs.conftest import BATCH, BOUNDARY, pipeline_config, rows
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state
from tidemill.checkpoint.fine_tune import Shapes, cover, parse_parameter_map
from tidemill.checkpoint.restore import dense_tensors, read_table
from tidemill.errors import CheckpointError, ConfigError
from tidemill.jobs.train import TrainRequest, train
from tidemill.storage.backends.local import LocalStorage

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Of the first run; its day has three batches."""
    day = tmp_path / "day"
    day.mkdir()
    pq.write_table(rows(3 * BATCH, BOUNDARY - 1000, seed=0), day / "a.parquet")
    config = pipeline_config(tmp_path / "root", day)
    config["train_config"]["num_steps"] = 3
    return config | {"eval_input_path": ""}


def run(tmp_path: Path, config: dict[str, Any], name: str, parent: str = "", **edits: Any) -> Path:
    """The folder that was trained."""
    path, folder = tmp_path / f"{name}.yaml", tmp_path / name
    path.write_text(yaml.safe_dump(config))
    overrides = {"model_dir": str(folder)}
    if parent:
        overrides["train_config.fine_tune_checkpoint"] = str(tmp_path / parent)
    assert train(TrainRequest(str(path), overrides, json.dumps({key.replace("__", "."): v for key, v in edits.items()}))) == 0
    return folder


def started_from(folder: Path) -> dict[str, Any]:
    (events,) = folder.glob("runs/*/events.jsonl")
    (event,) = [e for line in events.read_text().splitlines() if (e := json.loads(line))["event"] == "train.started_from"]
    return event


def table(folder: Path, name: str, tensor: str = "weight") -> np.ndarray:
    storage = LocalStorage(folder)
    return read_table(storage, read_checkpoint(storage)[1], name, tensor)


def frozen(config: dict[str, Any]) -> dict[str, Any]:
    """Rates of nothing, so that what was taken can be seen after a step."""
    text = json.dumps(config).replace('"lr": 0.05', '"lr": 0.0').replace('"lr": 0.01', '"lr": 0.0')
    return json.loads(text)


def test_the_same_model_takes_everything_and_reads_its_own_data_from_the_start(tmp_path: Path, config: dict[str, Any]) -> None:
    """B9: the foreign positions, of the very same file, are tolerated and left behind."""
    first = run(tmp_path, config, "first")
    second = run(tmp_path, frozen(config), "second", "first")
    found = started_from(second)
    assert (found["share"], found["missing"], found["unfit"], found["unused"], found["anew"]) == (1.0, [], [], [], [])
    storage = LocalStorage(second)
    _, manifest = read_checkpoint(storage)
    assert (manifest.step, manifest.examples) == (3, 6 * BATCH)
    (split,) = read_dataloader_state(storage, manifest).splits
    assert split.intervals in ([], [(0, 3 * BATCH)])
    for name in ("pooled/user_id_emb", "pooled/item_id_emb"):
        np.testing.assert_array_equal(table(first, name), table(second, name))


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """The user's table has another name, the item's another size; there is one more feature."""
    features = config["feature_configs"]
    features[0]["id_feature"]["embedding_name"] = "visitor_emb"
    features[1]["id_feature"]["hash_bucket_size"] = 65
    extra = {"feature_name": "more", "expression": "user:user_id", "hash_bucket_size": 10, "embedding_dim": 4}
    config["feature_configs"] = [*features, {"id_feature": extra}]
    config["model_config"]["feature_groups"][0]["feature_names"].append("more")
    return config


def test_another_model_takes_what_fits_and_names_the_rest(tmp_path: Path, config: dict[str, Any]) -> None:
    first = run(tmp_path, config, "first")
    names = tmp_path / "names.txt"
    names.write_text("# new\told\n\npooled/visitor_emb\tpooled/user_id_emb\n")
    other = frozen(renamed(json.loads(json.dumps(config))))
    second = run(tmp_path, other, "second", "first", train_config__fine_tune_ckpt_param_map=str(names))
    found = started_from(second)
    assert found["renamed"] == {"pooled/visitor_emb": "pooled/user_id_emb"}
    assert found["missing"] == ["pooled/more_emb"]
    assert found["unused"] == []
    assert found["unfit"][0] == "pooled/item_id_emb (65 x 4, in the checkpoint 64 x 4)"
    assert 0 < found["share"] < 1
    assert found["anew"] == ["dense_optimizer"]
    for tensor in ("weight", "momentum1"):
        theirs, mine = table(first, "pooled/user_id_emb", tensor), table(second, "pooled/visitor_emb", tensor)
        assert (mine >= theirs).all() if tensor == "momentum1" else (mine == theirs).all()
    one, other_dense = (dense_tensors(LocalStorage(f), read_checkpoint(LocalStorage(f))[1]) for f in (first, second))
    same = [name for name, tensor in one.items() if tensor.shape == other_dense[name].shape]
    assert same
    assert all((one[name] == other_dense[name]).all() for name in same)


def test_another_optimizer_begins_anew(tmp_path: Path, config: dict[str, Any]) -> None:
    run(tmp_path, config, "first")
    other = frozen(config)
    other["train_config"]["dense_optimizer"] = {"sgd_optimizer": {"lr": 0.0}, "constant_learning_rate": {}}
    other["train_config"]["sparse_optimizer"] = {"sgd_optimizer": {"lr": 0.0}, "constant_learning_rate": {}}
    found = started_from(run(tmp_path, other, "second", "first"))
    assert (found["share"], found["anew"]) == (1.0, ["dense_optimizer", "sparse_optimizer"])


def test_a_checkpoint_of_nothing_that_the_model_has_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has none of the model's 2 parameters"):
        cover(Shapes({"a": (4, 2)}, {"w": (3,)}), Shapes({"b": (4, 2)}, {"w": (4,)}), {})


def test_coverage_is_told_exactly() -> None:
    wanted = Shapes({"a": (4, 2), "b": (4, 2), "c": (1, 2)}, {"w": (3,), "v": (5,)})
    saved = Shapes({"a": (4, 2), "old_b": (4, 2), "d": (9, 9)}, {"w": (3,), "v": (6,)})
    coverage = cover(wanted, saved, {"b": "old_b"})
    assert coverage.tables == {"a": "a", "b": "old_b"}
    assert coverage.dense == {"w": "w"}
    assert (coverage.missing, coverage.unfit, coverage.unused) == (("c",), ("v (5, in the checkpoint 6)",), ("d",))
    assert coverage.share == (8 + 8 + 3) / (8 + 8 + 2 + 3 + 5)
    assert not coverage.is_exact
    assert cover(wanted, wanted, {}).is_exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\na\tc\n", "map.txt:2: 'a' is there twice"),
        ("a\n", "map.txt:1: 'a' isn't a new name and an old one, separated by a tab"),
        ("a b c\n", "map.txt:1: 'a b c' isn't a new name"),
    ],
)
def test_a_wrong_line_of_the_map_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_parameter_map(text, where="map.txt")


def test_unknown_names_of_the_map_are_errors() -> None:
    shapes = Shapes({"user_emb": (4, 2)}, {})
    with pytest.raises(ConfigError, match="the model has no parameter 'user_em'; did you mean 'user_emb'"):
        cover(shapes, shapes, {"user_em": "user_emb"})
    with pytest.raises(ConfigError, match="the checkpoint has no parameter 'x'"):
        cover(shapes, shapes, {"user_emb": "x"})
