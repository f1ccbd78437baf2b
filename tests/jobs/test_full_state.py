"""A checkpoint holds the full training state (DCL 9.15): N steps, a resume and N steps more end as 2N steps do, bit for bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from tests.jobs.conftest import BATCH, BOUNDARY, pipeline_config, rows
from tidemill.checkpoint.discovery import read_arrays_of, read_checkpoint
from tidemill.checkpoint.restore import read_table
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.jobs import pipeline
from tidemill.jobs.evaluate import EvaluateRequest, evaluate
from tidemill.jobs.export import ExportRequest, export
from tidemill.jobs.learner import build_learner
from tidemill.jobs.train import TrainRequest, train
from tidemill.serving.loader import load_generation
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.ranks import single_process

N = 5
"""Not a multiple of the accumulation: the checkpoint is within one."""
WARM_UP = {"decay_size": 4, "decay_factor": 0.7, "warmup_size": 7, "warmup_learning_rate": 0.001}
STATEFUL: dict[str, Any] = {
    "train_config.log_step_count_steps": 1,
    "train_config.gradient_accumulation_steps": 4,
    "train_config.grad_scaler": {"init_scale": 1024.0, "growth_interval": 1},
    "train_config.grad_clipping": {"clipping_type": "norm", "max_gradient": 0.01},
    "train_config.dense_optimizer": {
        "adam_optimizer": {"lr": 0.02},
        "exponential_decay_learning_rate": WARM_UP,
        "ema": {"decay": 0.8},
    },
    "train_config.sparse_optimizer": {"adagrad_optimizer": {"lr": 0.05}, "exponential_decay_learning_rate": WARM_UP},
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The pipeline's config: a model with dropout, three batches a pass."""
    day = tmp_path / "day"
    day.mkdir()
    pq.write_table(rows(3 * BATCH, BOUNDARY - 1000, seed=0), day / "a.parquet")
    config = copy.deepcopy(pipeline_config(tmp_path / "root", day))
    config["model_config"]["multi_tower"]["towers"][0]["mlp"]["dropout_ratio"] = [0.5]
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(written: Path, folder: Path, steps: int, **edits: Any) -> None:
    changes = {**STATEFUL, "train_config.num_steps": steps, **edits}
    overrides = {"model_dir": str(folder), "eval_input_path": ""}
    assert train(TrainRequest(str(written), overrides, json.dumps(changes), continue_train=folder.exists())) == 0


def newest(folder: Path) -> tuple[LocalStorage, CheckpointManifest]:
    storage = LocalStorage(folder)
    return storage, read_checkpoint(storage)[1]


def reported(folder: Path) -> dict[int, tuple[float, float]]:
    """(dense, sparse) learning rates by step, of all runs."""
    lines = [line for log in folder.glob("runs/*/events.jsonl") for line in log.read_text().splitlines()]
    found = [event for event in map(json.loads, lines) if event["event"] == "train.progress"]
    return {event["step"]: (event["dense_rate"], event["sparse_rate"]) for event in found}


def everything(folder: Path) -> dict[str, bytes]:
    """All that the newest checkpoint holds of training, by name; random state and schedules included."""
    storage, manifest = newest(folder)
    found = {"state": json.dumps(manifest.state["schedule"], sort_keys=True).encode()}
    for spec in manifest.tables:
        for tensor in ("weight", "momentum1"):
            found[f"{spec.name}/{tensor}"] = read_table(storage, manifest, spec.name, tensor).tobytes()
    for file in manifest.files:
        if file.startswith("dense"):
            found |= {f"{file}/{name}": array.tobytes() for name, array in read_arrays_of(storage, manifest, file).items()}
    return found


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("incremental", [False, True])
def test_2n_steps_are_n_and_a_resume_and_n_more(tmp_path: Path, written: Path, incremental: bool) -> None:
    options = {"train_config.incremental_checkpoints": incremental, "train_config.save_checkpoints_steps": 2}
    run(written, tmp_path / "straight", 2 * N, **options)
    run(written, tmp_path / "resumed", N, **options)
    half = everything(tmp_path / "resumed")
    run(written, tmp_path / "resumed", 2 * N, **options)
    straight, resumed = everything(tmp_path / "straight"), everything(tmp_path / "resumed")
    assert any(name.startswith("dense_ema/") for name in straight)
    assert any(name.startswith("dense_gradients/") for name in half), "the checkpoint is within an accumulation"
    assert half["state"] != straight["state"]
    rates = reported(tmp_path / "straight")
    assert len(set(rates.values())) > N, "warm-up and decay"
    assert reported(tmp_path / "resumed") == rates
    assert [name for name in straight.keys() | resumed.keys() if straight.get(name) != resumed.get(name)] == []
    assert bool(newest(tmp_path / "resumed")[1].increments) == incremental


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("changed", ["train_config.gradient_accumulation_steps", "train_config.grad_clipping"])
def test_each_of_these_settings_matters(tmp_path: Path, written: Path, changed: str) -> None:
    """The other tests would pass if the settings did nothing."""
    run(written, tmp_path / "with", 8)
    run(written, tmp_path / "without", 8, **{changed: None})
    assert everything(tmp_path / "with") != everything(tmp_path / "without")


@pytest.mark.usefixtures("quiet")
def test_restoring_gives_back_the_very_moments_and_needs_no_step(tmp_path: Path, written: Path) -> None:
    run(written, tmp_path / "model", N)
    storage, manifest = newest(tmp_path / "model")
    config = pipeline.load(str(written), edits=json.dumps(STATEFUL)).config
    with single_process() as runtime:
        learner = build_learner(config, pipeline.feature_set(config), runtime, batch_size=BATCH)
        learner.restore(storage, manifest)
        files = learner.dense_files()
        assert learner.step.steps == N
    for name in ("dense", "dense_optimizer", "dense_gradients", "dense_ema"):
        saved = read_arrays_of(storage, manifest, name)
        assert saved
        assert files[name].keys() == saved.keys()
        assert all(np.array_equal(files[name][key], saved[key]) for key in saved), name
    assert any(np.any(array) for key, array in files["dense_optimizer"].items() if key.endswith("exp_avg"))


@pytest.mark.usefixtures("quiet")
def test_the_averages_are_what_is_exported_and_evaluated(tmp_path: Path, written: Path) -> None:
    folder, day = tmp_path / "model", tmp_path / "day"
    run(written, folder, 8)
    storage, manifest = newest(folder)
    scores = {}
    for use in (None, False):
        edits = json.dumps({**STATEFUL, "export_config.use_dense_ema": use, "eval_config.use_dense_ema": use})
        target = tmp_path / f"export-{use}"
        export(ExportRequest(str(written), str(target), None, {"model_dir": str(folder)}, edits))
        served = load_generation(LocalStorage(target), "").program.weights
        wanted = read_arrays_of(storage, manifest, "dense" if use is False else "dense_ema")
        assert all(np.array_equal(served[name].numpy(), wanted[name]) for name in wanted)
        found = evaluate(EvaluateRequest(str(written), {"model_dir": str(folder), "eval_input_path": f"{day}/*.parquet"}, edits))
        assert found is not None
        scores[use] = found.metrics
    assert scores[None] != scores[False]


@pytest.mark.usefixtures("quiet")
def test_an_export_of_an_incremental_checkpoint_serves_its_rows(tmp_path: Path, written: Path) -> None:
    folder = tmp_path / "model"
    run(written, folder, 8, **{"train_config.incremental_checkpoints": True, "train_config.save_checkpoints_steps": 2})
    storage, manifest = newest(folder)
    assert manifest.increments
    export(ExportRequest(str(written), str(tmp_path / "export"), None, {"model_dir": str(folder)}, json.dumps(STATEFUL)))
    served = load_generation(LocalStorage(tmp_path / "export"), "")
    for spec in manifest.tables:
        assert np.array_equal(
            served.tables[spec.name].lookup(np.arange(spec.num_embeddings)), read_table(storage, manifest, spec.name)
        )
