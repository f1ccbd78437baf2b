"""A daily job over MaxCompute, in processes: two days, a kill, another number of ranks, and scores that go back into a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.workshop import PIPELINE, Workshop, eventually, kill
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state
from tidemill.contracts.progress import DataloaderState
from tidemill.data.click_world import World, write_day
from tidemill.data.split import SplitId
from tidemill.jobs.ledger import check_ledger, read_steps, trained_positions
from tidemill.storage.open import open_storage
from tidemill.testing.maxcompute import MaxComputeProcess

YESTERDAY, TODAY = "20260303", "20260304"
ROWS = 4000
CLICKS = "odps://prj/tables/clicks"


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MaxComputeProcess]:
    with MaxComputeProcess(tmp_path / "maxcompute") as running:
        credentials = tmp_path / "odps.ini"
        credentials.write_text(f"access_id=id\naccess_key=secret\nend_point={running.endpoint}\n")
        monkeypatch.setenv("ODPS_CONFIG_FILE_PATH", str(credentials))
        yield running


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    config = tmp_path / "pipeline.yaml"
    text = PIPELINE.format(data=tmp_path, root=tmp_path / "root")
    text = text.replace(f"{tmp_path}/day1/*.parquet", f"{CLICKS}/dt={YESTERDAY}")
    text = text.replace("dataset_type: ParquetDataset", "dataset_type: OdpsDataset\n  is_orderby_partition: true")
    config.write_text(text.replace("save_checkpoints_steps: 15", "save_checkpoints_steps: 8"))
    return Workshop(tmp_path, config, tmp_path)


def day(folder: Path, number: int) -> pa.Table:
    write_day(World(7), number, folder / f"day{number}", ROWS, num_files=1)
    return pq.read_table(folder / f"day{number}")


def folder_of(workshop: Workshop, date: str) -> Path:
    return workshop.root / "daily" / date


def state_of(folder: Path) -> DataloaderState:
    storage = open_storage(folder)
    return read_dataloader_state(storage, read_checkpoint(storage)[1])


def assert_every_row_once(folder: Path, partition: str) -> None:
    """By the steps that the surviving line logged: rows [0, ROWS) of the partition's session, each once, and of no other one."""
    [split] = [split for split in state_of(folder).splits if partition in split.split]
    assert split.num_rows == ROWS
    steps, only = read_steps(open_storage(folder)), SplitId(split.kind, split.split)
    assert trained_positions(steps).keys() == {only}
    ledger = check_ledger(steps, {only: np.arange(ROWS)})
    assert ledger.is_clean, ledger


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_days_with_a_kill_between(workshop: Workshop, emulator: MaxComputeProcess, tmp_path: Path) -> None:
    """Issue 3: day T-1, SIGKILL, two ranks, day T, predictions written and read back."""
    emulator.add_table("prj", "clicks", {f"dt={YESTERDAY}": day(tmp_path, 1)})
    first = folder_of(workshop, YESTERDAY)
    process = workshop.tidemill("train", str(workshop.config))
    try:
        eventually(
            lambda: any(first.glob("model.ckpt-*/manifest-*.json")) or process.poll() is not None,
            timeout_s=90,
            what="a first checkpoint",
        )
        assert process.poll() is None, workshop.read_log()
    finally:
        kill(process)
    [left] = state_of(first).splits
    assert 0 < sum(stop - start for start, stop in left.intervals) < ROWS
    workshop.run("train", str(workshop.config), "--continue_train", ranks=2)
    assert_every_row_once(first, YESTERDAY)

    emulator.add_table("prj", "clicks", {f"dt={TODAY}": day(tmp_path, 2)})
    second = folder_of(workshop, TODAY)
    both = f"{CLICKS}/dt={YESTERDAY}&dt={TODAY}"
    today = ("train", str(workshop.config), f"--model_dir={second}", f"--train_input_path={both}")
    workshop.run(*today, f"--fine_tune_checkpoint={first}", "--continue_train", ranks=2)
    assert_every_row_once(second, TODAY)

    scores = f"odps://prj/tables/scores/dt={TODAY}"
    predict = ("predict", str(workshop.config), "--checkpoint_path", str(second), "--predict_input_path", f"{CLICKS}/dt={TODAY}")
    predict = (*predict, "--predict_output_path", scores, "--reserved_columns", "event_id,click")
    workshop.run(*predict, ranks=2)
    found, rows = emulator.read_table("prj", "scores", f"dt={TODAY}"), pq.read_table(tmp_path / "day2")
    assert found.column_names[:2] == ["event_id", "click"]
    assert found["event_id"].to_pylist() == rows["event_id"].to_pylist()
    probs = found["probs"].to_numpy()
    assert ((probs > 0) & (probs < 1)).all()
    clicks = rows["click"].to_numpy()
    assert probs[clicks == 1].mean() > probs[clicks == 0].mean(), "the scores tell clicks apart"
    workshop.run(*predict, expect=2, log="again")
    assert "--overwrite" in workshop.read_log("again")
    workshop.run(*predict, "--overwrite")
    alone = emulator.read_table("prj", "scores", f"dt={TODAY}")
    np.testing.assert_allclose(alone["probs"].to_numpy(), probs, rtol=1e-5)
