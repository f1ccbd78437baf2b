"""The full training state on one and two ranks (DCL 9.15), with full and with incremental checkpoints."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.e2e.test_resume import weights
from tests.e2e.workshop import Workshop
from tidemill.checkpoint.discovery import read_arrays_of, read_checkpoint
from tidemill.storage.open import open_storage

N = 13
"""Not a multiple of the accumulation."""
STATEFUL: dict[str, Any] = {
    "train_config.num_epochs": None,
    "train_config.save_checkpoints_steps": 4,
    "train_config.gradient_accumulation_steps": 4,
    "train_config.grad_scaler": {"init_scale": 256.0, "growth_interval": 2},
    "train_config.dense_optimizer.ema": {"decay": 0.9},
    "train_config.fold_checkpoints_after": 2,
}


def train(workshop: Workshop, name: str, steps: int, ranks: int, incremental: bool, *more: str) -> None:
    edits = {**STATEFUL, "train_config.num_steps": steps, "train_config.incremental_checkpoints": incremental}
    arguments = ("train", str(workshop.config), f"--model_dir={workshop.root / name}", f"--edit_config_json={json.dumps(edits)}")
    workshop.run(*arguments, *more, ranks=ranks, log=name)


def state(workshop: Workshop, name: str) -> dict[str, np.ndarray]:
    folder = workshop.root / name
    storage = open_storage(folder)
    manifest = read_checkpoint(storage)[1]
    arrays = weights(folder)
    for file in ("dense_ema", "dense_gradients"):
        arrays |= {f"{file}/{key}": array for key, array in read_arrays_of(storage, manifest, file).items()}
    return arrays | {"schedule": np.array(json.dumps(manifest.state["schedule"], sort_keys=True))}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "incremental"), [(1, True), (2, False), (2, True)])
def test_2n_steps_are_n_and_a_resume_and_n_more(workshop: Workshop, ranks: int, incremental: bool) -> None:
    train(workshop, "straight", 2 * N, ranks, incremental)
    train(workshop, "resumed", N, ranks, incremental)
    train(workshop, "resumed", 2 * N, ranks, incremental, "--continue_train")
    straight, resumed = state(workshop, "straight"), state(workshop, "resumed")
    assert straight.keys() == resumed.keys()
    assert [name for name in straight if not np.array_equal(straight[name], resumed[name])] == []
