"""The same rows make the same model, whatever kind of files they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from tests.jobs.conftest import BATCH, BOUNDARY, pipeline_config, rows
from tests.jobs.test_train import newest_arrays
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state
from tidemill.errors import ConfigError
from tidemill.jobs.train import TrainRequest, train
from tidemill.storage.backends.local import LocalStorage

DAY = rows(4 * BATCH + 5, BOUNDARY - 1000, seed=0)
pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.timeout(90)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline_config(tmp_path / "root", tmp_path / "day")))
    return path


def run(written: Path, folder: Path, **edits: Any) -> int:
    overrides = {"model_dir": str(folder), "eval_input_path": ""}
    settings = {"train_config.num_steps": None, "train_config.num_epochs": 1, **edits}
    return train(TrainRequest(str(written), overrides, json.dumps(settings), continue_train=True))


def write_csv(path: Path, table: pa.Table, **options: Any) -> None:
    with pa.CompressedOutputStream(str(path), "gzip") if path.suffix == ".gz" else pa.OSFile(str(path), "wb") as out:
        pyarrow.csv.write_csv(table, out, pyarrow.csv.WriteOptions(**options))


def assert_equal(one: Path, other: Path) -> None:
    arrays, others = newest_arrays(one), newest_arrays(other)
    assert arrays.keys() == others.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, others[name], err_msg=name)


def test_csv_trains_and_evaluates_as_parquet_does(tmp_path: Path, written: Path) -> None:
    for folder in ("day", "csv", "bare"):
        (tmp_path / folder).mkdir()
    pq.write_table(DAY, tmp_path / "day" / "a.parquet")
    half = DAY.num_rows // 2
    write_csv(tmp_path / "csv" / "a.csv", DAY.slice(0, half))
    write_csv(tmp_path / "csv" / "b.csv.gz", DAY.slice(half).select(DAY.column_names[::-1]))
    write_csv(tmp_path / "bare" / "a.csv", DAY, include_header=False, delimiter="\t")
    assert run(written, tmp_path / "parquet-model") == 0
    headed = {"data_config.dataset_type": "CsvDataset", "data_config.with_header": True}
    paths = {"train_input_path": str(tmp_path / "csv" / "*"), "eval_input_path": str(tmp_path / "csv" / "a.csv")}
    assert run(written, tmp_path / "csv-model", **headed, **paths) == 0
    columns = [{"input_name": name} for name in DAY.column_names]
    bare = {"data_config.dataset_type": "CsvDataset", "data_config.delimiter": "\t", "data_config.input_fields": columns}
    assert run(written, tmp_path / "bare-model", **bare, train_input_path=str(tmp_path / "bare" / "a.csv")) == 0
    assert_equal(tmp_path / "parquet-model", tmp_path / "csv-model")
    assert_equal(tmp_path / "parquet-model", tmp_path / "bare-model")


def test_a_folder_trains_as_the_same_rows_in_a_table_do(tmp_path: Path, written: Path) -> None:
    """One split, so that the rows come in one order."""
    for folder in ("day", "drop"):
        (tmp_path / folder).mkdir()
    whole = DAY.slice(0, 4 * BATCH)
    pq.write_table(whole, tmp_path / "day" / "a.parquet")
    for number, start in enumerate(range(0, whole.num_rows, 10)):
        pq.write_table(whole.slice(start, 10), tmp_path / "drop" / f"{number:03}.parquet")
    assert run(written, tmp_path / "table") == 0
    edits = {
        "train_input_path": f"{tmp_path}/drop/",
        "data_config.dataset_type": "FolderDataset",
        "data_config.folder": {"num_splits": 1, "poll_s": 0.05, "max_wait_s": 30.0},
        "train_config.num_steps": 4,
        "train_config.num_epochs": None,
        "train_config.lineage": {},
    }
    assert run(written, tmp_path / "stream", **edits) == 0
    assert_equal(tmp_path / "table", tmp_path / "stream")
    storage = LocalStorage(tmp_path / "stream")
    [state] = read_dataloader_state(storage, read_checkpoint(storage)[1]).splits
    assert (state.kind, state.split) == ("folder", f"{tmp_path}/drop:0")
    assert len(state.fingerprint["files"]) == 7


def test_a_folder_needs_a_column_of_event_times(tmp_path: Path, written: Path) -> None:
    edits = {"data_config.dataset_type": "FolderDataset", "data_config.event_time.column": ""}
    with pytest.raises(ConfigError, match=r"dataset_type: needs data_config\.event_time\.column"):
        run(written, tmp_path / "stream", **edits)
