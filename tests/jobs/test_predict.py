from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.errors import ConfigError, DataError, SchemaError
from tidemill.jobs.predict import PredictRequest, predict
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.backends.local import LocalStorage

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def served(life, tmp_path: Path) -> PredictRequest:
    return PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "out"), scripted_model=str(life.lineage), overwrite=True)


@pytest.fixture
def trained(life, tmp_path: Path) -> PredictRequest:
    return PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "out"), pipeline=str(life.pipeline), overwrite=True)


def result(request: PredictRequest) -> pa.Table:
    return pq.read_table(request.output_path)


def test_a_lineage_scores_with_its_newest_release_row_by_row(life, served: PredictRequest) -> None:
    written = predict(replace(served, reserved=["event_id", "click"], batch_rows=7))
    assert written.rows == 160
    found = result(served)
    assert found.column_names[:2] == ["event_id", "click"]
    day = pq.read_table(life.day)
    assert found["event_id"].to_pylist() == day["event_id"].to_pylist()
    expected = Predictor(load_generation(LocalStorage(life.lineage), "")).score_table(day)
    np.testing.assert_allclose(found["probs"].to_numpy(), expected["probs"], rtol=1e-6)


def test_a_checkpoint_scores_as_the_snapshot_that_was_exported_from_it(life, trained: PredictRequest, tmp_path: Path) -> None:
    predict(trained)
    day = pq.read_table(life.day)
    snapshot = Predictor(load_generation(LocalStorage(life.lineage), "", up_to=(0, 0)))
    np.testing.assert_allclose(result(trained)["probs"].to_numpy(), snapshot.score_table(day)["probs"], rtol=1e-5)


def test_another_checkpoint_can_be_named(life, trained: PredictRequest) -> None:
    predict(trained)
    before = result(trained)["probs"].to_numpy()
    predict(replace(trained, checkpoint=str(life.lineage)))
    assert not np.allclose(result(trained)["probs"].to_numpy(), before)


def test_all_columns_or_those_that_features_read_can_be_kept(life, served: PredictRequest) -> None:
    predict(replace(served, reserved=["ALL_COLUMNS"], outputs=["probs"]))
    assert result(served).column_names == [*pq.read_table(life.day).column_names, "probs"]
    predict(replace(served, reserved=["click", "ALL_EFFECTIVE_COLUMNS"], outputs=["probs"]))
    assert sorted(result(served).column_names) == ["click", "item_id", "price", "probs", "user_id"]


def test_an_unknown_column_is_refused_with_the_nearest_name(served: PredictRequest) -> None:
    with pytest.raises(ConfigError, match=r"no column 'event_idd'; did you mean 'event_id'\?"):
        predict(replace(served, reserved=["event_idd"]))
    with pytest.raises(ConfigError, match=r"no output 'prob'; did you mean 'probs'\?"):
        predict(replace(served, outputs=["prob"]))


def test_a_column_named_like_an_output_is_refused(served: PredictRequest, tmp_path: Path, life) -> None:
    table = pq.read_table(life.day)
    pq.write_table(table.append_column("probs", table["price"]), tmp_path / "clash.parquet")
    with pytest.raises(ConfigError, match="'probs' has the name of an output"):
        predict(replace(served, input_path=str(tmp_path / "clash.parquet"), reserved=["probs"]))


def test_exactly_one_model_must_be_named(served: PredictRequest, trained: PredictRequest) -> None:
    for request in (replace(served, scripted_model=None), replace(served, pipeline=trained.pipeline)):
        with pytest.raises(ConfigError, match="either --scripted_model_path"):
            predict(request)


def test_a_run_that_fails_leaves_the_output_of_the_one_before(served: PredictRequest, tmp_path: Path, life) -> None:
    predict(replace(served, reserved=["event_id"]))
    before = result(served)
    table = pq.read_table(life.day)
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(table.drop_columns(["user_id"]), tmp_path / "1.parquet")
    with pytest.raises(SchemaError, match="no column 'user_id'"):
        predict(replace(served, input_path=f"{tmp_path}/[01].parquet"))
    bad = table.set_column(table.schema.get_field_index("price"), "price", pa.array(["x"] * table.num_rows))
    pq.write_table(bad, tmp_path / "2.parquet")
    with pytest.raises(DataError):
        predict(replace(served, input_path=f"{tmp_path}/2.parquet"))
    assert result(served).equals(before)
    assert not [info.key for info in LocalStorage(served.output_path).list("_temporary/")]


def test_a_smaller_result_leaves_no_part_of_a_larger_one(served: PredictRequest, tmp_path: Path, life) -> None:
    stale = Path(served.output_path) / "part-00007.parquet"
    predict(served)
    stale.write_bytes(b"of an earlier run")
    pq.write_table(pq.read_table(life.day).slice(0, 3), tmp_path / "few.parquet")
    written = predict(replace(served, input_path=str(tmp_path / "few.parquet")))
    assert [entry.key for entry in written.files] == ["part-00000.parquet"]
    assert not stale.exists()
    assert result(served).num_rows == 3
