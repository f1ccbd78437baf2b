"""Predict on several ranks: the rows are shared, the output is one, and a rank that fails takes all with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.workshop import Workshop, kill
from tidemill.jobs.predict import PredictRequest, predict

pytestmark = pytest.mark.usefixtures("quiet")


def command(request: PredictRequest) -> list[str]:
    arguments = ["predict", "--predict_input_path", request.input_path, "--predict_output_path", request.output_path]
    arguments += ["--reserved_columns", "event_id", "--batch_size", "7"]
    if request.scripted_model:
        return [*arguments, "--scripted_model_path", request.scripted_model]
    return [*arguments, "--pipeline_config_path", str(request.pipeline)]


def run(folder: Path, request: PredictRequest, *more: str, ranks: int = 2, expect: int = 0) -> str:
    workshop = Workshop(folder, folder / "unused", folder)
    workshop.run(*command(request), *more, ranks=ranks, expect=expect)
    return workshop.read_log()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["served", "trained"])
def test_two_ranks_give_what_one_gives_in_the_same_order(life, tmp_path: Path, kind: str) -> None:
    source = {"scripted_model": str(life.lineage)} if kind == "served" else {"pipeline": str(life.pipeline)}
    alone = PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "one"), reserved=["event_id"], batch_rows=7, **source)
    predict(alone)
    log = run(tmp_path, replace(alone, output_path=str(tmp_path / "two")))
    assert "160 rows in 2 parts" in log
    one, two = pq.read_table(tmp_path / "one"), pq.read_table(tmp_path / "two")
    assert two["event_id"].to_pylist() == one["event_id"].to_pylist()
    assert two.column_names == one.column_names
    np.testing.assert_allclose(two["probs"].to_numpy(), one["probs"].to_numpy(), rtol=1e-5)
    assert not (tmp_path / "two" / "_temporary").exists()


@pytest.mark.slow
def test_more_ranks_than_rows(life, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(life.day).slice(0, 2), tmp_path / "two.parquet")
    run(tmp_path, PredictRequest(str(tmp_path / "two.parquet"), str(tmp_path / "out"), pipeline=str(life.pipeline)), ranks=3)
    assert pq.read_table(tmp_path / "out").num_rows == 2


@pytest.mark.slow
def test_one_ranks_failure_is_all_ranks_and_leaves_the_old_output(life, tmp_path: Path) -> None:
    """The last row, which rank 1 reads, can't be read as a price."""
    table = pq.read_table(life.day)
    prices = pa.array([str(price) for price in table["price"].to_pylist()[:-1]] + ["dear"])
    pq.write_table(table.set_column(table.column_names.index("price"), "price", prices), tmp_path / "bad.parquet")
    request = PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "out"), str(life.lineage), reserved=["event_id"])
    predict(request)
    before = pq.read_table(tmp_path / "out")
    log = run(tmp_path, replace(request, input_path=str(tmp_path / "bad.parquet")), "--overwrite", expect=1)
    assert "price" in log
    assert "rank 1: " in log
    assert pq.read_table(tmp_path / "out").equals(before)
    assert not (tmp_path / "out" / "_temporary").exists()


@pytest.mark.slow
def test_a_killed_run_leaves_no_output_and_the_next_one_is_whole(life, tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, tmp_path / "unused", tmp_path)
    request = PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "out"), pipeline=str(life.pipeline))
    process = workshop.tidemill(*command(request), ranks=2)
    kill(process)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    run(tmp_path, request)
    assert pq.read_table(tmp_path / "out").num_rows == 160
