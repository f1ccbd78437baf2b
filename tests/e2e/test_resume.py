"""A killed training run goes on as if nothing had happened: bitwise with as many ranks, row-exact with any number (D4)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.workshop import Workshop, eventually, kill
from tidemill.checkpoint.discovery import read_arrays_of, read_checkpoint, read_dataloader_state
from tidemill.checkpoint.restore import read_table
from tidemill.data.split import SplitId
from tidemill.jobs.ledger import check_ledger, read_steps
from tidemill.storage.open import open_storage

NUM_ROWS = 8000


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Everything that training has made: rows, their optimizer state, dense weights and their optimizer state."""
    storage = open_storage(folder)
    _, manifest = read_checkpoint(storage)
    arrays = {f"{spec.name}": read_table(storage, manifest, spec.name) for spec in manifest.tables}
    arrays |= {f"{spec.name}/m": read_table(storage, manifest, spec.name, "momentum1") for spec in manifest.tables}
    for name in ("dense", "dense_optimizer"):
        arrays |= {f"{name}/{key}": array for key, array in read_arrays_of(storage, manifest, name).items()}
    return arrays


def assert_every_row_once(folder: Path) -> None:
    storage = open_storage(folder)
    state = read_dataloader_state(storage, read_checkpoint(storage)[1])
    expected = {SplitId(split.kind, split.split): np.arange(split.num_rows) for split in state.splits}
    assert sum(len(rows) for rows in expected.values()) == NUM_ROWS
    ledger = check_ledger(read_steps(storage), expected)
    assert ledger.is_clean, ledger
    assert state.passes_completed == 1


def kill_after_checkpoint(workshop: Workshop, folder: Path, *arguments: str, ranks: int) -> None:
    """Start training, and SIGKILL it as soon as it has written its first checkpoint."""
    process = workshop.tidemill(*arguments, ranks=ranks, log="killed")
    try:
        eventually(
            lambda: any(folder.glob("model.ckpt-*/manifest-*.json")) or process.poll() is not None,
            timeout_s=90,
            what="a first checkpoint",
        )
        assert process.poll() is None, workshop.read_log("killed")
    finally:
        kill(process)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_ends_bitwise_as_an_uninterrupted_one(workshop, ranks):
    straight, killed = workshop.root / "straight", workshop.root / "killed"
    train = ("train", str(workshop.config))
    workshop.run(*train, f"--model_dir={straight}", ranks=ranks)
    kill_after_checkpoint(workshop, killed, *train, f"--model_dir={killed}", ranks=ranks)
    workshop.run(*train, f"--model_dir={killed}", "--continue_train", ranks=ranks)
    expected, found = weights(straight), weights(killed)
    assert expected.keys() == found.keys()
    different = [name for name in expected if not np.array_equal(expected[name], found[name])]
    assert not different
    assert_every_row_once(killed)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_trains_every_row_once(workshop, before, after):
    folder = workshop.root / "moved"
    train = ("train", str(workshop.config), f"--model_dir={folder}")
    kill_after_checkpoint(workshop, folder, *train, ranks=before)
    workshop.run(*train, "--continue_train", ranks=after)
    assert_every_row_once(folder)
