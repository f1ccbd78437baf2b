from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.errors import CheckpointError, ConfigError, DataError
from tidemill.jobs.evaluate import EvaluateRequest, Evaluation, evaluate
from tidemill.jobs.predict import PredictRequest, predict

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def request_(life, tmp_path: Path) -> EvaluateRequest:
    """Of a copy of the day's folder, so that results aren't appended to the shared one."""
    shutil.copytree(life.daily, tmp_path / "daily")
    return EvaluateRequest(str(life.pipeline), {"model_dir": str(tmp_path / "daily")})


def test_the_result_is_that_of_the_scores_and_is_appended_as_a_line(life, request_: EvaluateRequest, tmp_path: Path) -> None:
    first, second = evaluate(request_), evaluate(request_)
    assert first == second
    assert first is not None
    predict(PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "scores"), pipeline=str(life.pipeline), reserved=["click"]))
    assert first.metrics["auc"] == pytest.approx(_auc(pq.read_table(tmp_path / "scores")), abs=0.005)
    lines = (tmp_path / "daily" / "eval_result.txt").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"global_step": 10, "auc": first.metrics["auc"]}] * 2


def _auc(scored: pa.Table) -> float:
    """By its definition: how often a clicked row scores higher than another one, ties counting half."""
    scores, labels = scored["probs"].to_numpy(), scored["click"].to_numpy()
    clicked, other = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return float(np.mean((clicked > other) + 0.5 * (clicked == other)))


def test_a_checkpoint_and_a_file_can_be_named(life, request_: EvaluateRequest, tmp_path: Path) -> None:
    named = replace(request_, checkpoint=str(life.lineage / "model.ckpt-4"), result_filename="stream.txt")
    found = evaluate(named)
    assert found is not None
    assert found.step == 4
    assert json.loads((tmp_path / "daily" / "stream.txt").read_text())["global_step"] == 4


def test_metrics_are_sorted_and_an_undefined_one_is_null() -> None:
    line = Evaluation(3, {"b": 0.5, "a": float("nan")}).line()
    assert line == b'{"global_step":3,"a":null,"b":0.5}\n'


def test_without_data_or_checkpoint_there_is_nothing_to_evaluate(life, request_: EvaluateRequest, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--eval_input_path"):
        evaluate(replace(request_, overrides={**request_.overrides, "eval_input_path": ""}))
    with pytest.raises(CheckpointError, match="no whole checkpoint of step 7"):
        evaluate(replace(request_, checkpoint=str(life.daily / "model.ckpt-7")))
    assert not (tmp_path / "daily" / "eval_result.txt").exists()


@pytest.mark.parametrize("wrong", [7, -1])
def test_a_label_that_cross_entropy_cannot_take_is_named(life, request_: EvaluateRequest, tmp_path: Path, wrong: int) -> None:
    rows = pq.read_table(life.day).slice(0, 3)
    labels = pa.array([0, wrong, 1], rows.schema.field("click").type)
    pq.write_table(rows.set_column(rows.schema.get_field_index("click"), "click", labels), tmp_path / "rated.parquet")
    with pytest.raises(DataError, match=rf"rated\.parquet, row 1: label column 'click': value {wrong} isn't in 0..1"):
        evaluate(replace(request_, overrides={**request_.overrides, "eval_input_path": str(tmp_path / "rated.parquet")}))
