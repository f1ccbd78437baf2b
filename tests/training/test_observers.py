"""What a run writes down about each step, and what can be read of it after a kill."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
import torch

from tidemill.clock import ManualClock
from tidemill.data.split import Delivery, Provenance, Run, Scattered, SplitId
from tidemill.errors import StorageError
from tidemill.features.batch import Batch, IdColumns
from tidemill.training.observers import LateRows, ScoreLog, StepLog, read_scores

NO_IDS = IdColumns((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


def delivery(ids, *, size=4, start=0):
    """A padded batch of rows with these event ids and labels 1, 0, 1, ..."""
    rows = len(ids)
    batch = Batch(
        num_rows=rows,
        size=size,
        dense=torch.zeros(size, 0),
        ids=NO_IDS,
        sequences=NO_IDS,
        labels={"click": torch.tensor([float(n % 2 == 0) for n in range(rows)] + [0.0] * (size - rows))},
        weights=torch.tensor([1.0] * rows + [0.0] * (size - rows)),
        extras={"event_id": pa.array(ids)},
    )
    return Delivery(Provenance((Run(SplitId("kafka", "clicks:0"), start, start + rows, rows),), rows), batch)


def scores(*values):
    return {"probs": np.array(values, np.float64)}


@pytest.fixture
def clock():
    return ManualClock(1000.0)


def test_a_step_is_written_before_it_is_trained(tmp_path, clock):
    log = StepLog(tmp_path / "runs" / "a" / "steps-00000.jsonl", clock=clock)
    log.entering(7, delivery(["a", "b"], start=40).provenance)
    (line,) = (tmp_path / "runs" / "a" / "steps-00000.jsonl").read_bytes().splitlines()
    assert orjson.loads(line) == {"step": 7, "at": 1000.0, "runs": [["kafka", "clicks:0", 40, 42, 2, 1, 0]]}
    log.close()


def test_shuffled_rows_are_written_as_runs_of_their_positions(tmp_path, clock):
    a, b = SplitId("parquet", "/a"), SplitId("parquet", "/b")
    scattered = (
        Scattered(a, np.array([0, 2, 3]), np.array([9, 4, 5]), 1.0),
        Scattered(b, np.array([1]), np.array([7]), 1.0),
    )
    hole = Run(a, 6, 8, 0, gap=2)
    log = StepLog(tmp_path / "steps.jsonl", clock=clock)
    log.entering(0, Provenance((hole,), 4, scattered=scattered))
    log.close()
    (line,) = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["runs"] == [
        ["parquet", "/a", 6, 8, 0, 1, 2],
        ["parquet", "/a", 4, 6, 2, 1, 0],
        ["parquet", "/a", 9, 10, 1, 1, 0],
        ["parquet", "/b", 7, 8, 1, 1, 0],
    ]


def test_rows_below_the_watermark_that_was_agreed_on_before_are_late():
    published = [None]
    late = LateRows(lambda: published[0])
    times = np.array([99.0, 100.0, np.nan, 101.0, -5.0])
    provenance = Provenance((), 5, event_time=times)
    late.entering(0, provenance)
    assert late.count == 0, "nothing is late before there is a watermark"
    published[0] = 100.0
    late.entering(1, provenance)
    late.entering(2, Provenance((), 5))
    assert late.count == 2


def test_steps_follow_each_other_line_by_line_also_in_a_file_that_was_there(tmp_path, clock):
    path = tmp_path / "steps.jsonl"
    for first in (0, 2):
        log = StepLog(path, clock=clock)
        for step in (first, first + 1):
            log.entering(step, delivery(["a"]).provenance)
        log.close()
    assert [orjson.loads(line)["step"] for line in path.read_bytes().splitlines()] == [0, 1, 2, 3]


def test_a_line_that_does_not_fit_on_the_disk_is_an_error(tmp_path, clock, monkeypatch):
    log = StepLog(tmp_path / "steps.jsonl", clock=clock)
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:10]))
    with pytest.raises(StorageError, match=r"steps\.jsonl: only 10 of \d+ bytes of step 3"):
        log.entering(3, delivery(["a"]).provenance)
    log.close()


def test_a_disk_that_is_full_is_a_store_that_failed(clock):
    log = StepLog(Path("/dev/full"), clock=clock)
    with pytest.raises(StorageError, match=r"/dev/full: No space left on device"):
        log.entering(3, delivery(["a"]).provenance)
    log.close()


def test_scores_come_back_without_padding(tmp_path, clock):
    path = tmp_path / "scores.arrows"
    log = ScoreLog(path, label="click", clock=clock)
    log.trained(3, delivery(["a", "b", "c"]), scores(0.1, 0.2, 0.3))
    log.trained(4, delivery(["d"]), scores(0.4))
    log.close()
    table = read_scores(path)
    assert table.schema.field("step").type == pa.int64()
    assert table.schema.field("score").type == table.schema.field("label").type == pa.float32()
    assert table["step"].to_pylist() == [3, 3, 3, 4]
    assert table["score"].to_pylist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert table["label"].to_pylist() == [1.0, 0.0, 1.0, 1.0]
    assert table["event_id"].to_pylist() == ["a", "b", "c", "d"]


def test_scores_are_written_about_once_a_second(tmp_path, clock):
    path = tmp_path / "scores.arrows"
    log = ScoreLog(path, label="click", clock=clock)
    log.trained(0, delivery(["a"]), scores(0.1))
    clock.advance(0.5)
    log.trained(1, delivery(["b"]), scores(0.1))
    assert read_scores(path) is None
    clock.advance(0.5)
    log.trained(2, delivery(["c"]), scores(0.1))
    assert read_scores(path)["event_id"].to_pylist() == ["a", "b", "c"], "readable while the writer is at work"
    log.trained(3, delivery(["d"]), scores(0.1))
    log.close()
    assert read_scores(path).num_rows == 4


def test_a_column_may_lack_its_values_in_one_batch(tmp_path, clock):
    log = ScoreLog(tmp_path / "scores.arrows", label="click", clock=clock)
    log.trained(0, delivery(["a"]), scores(0.1))
    log.trained(1, delivery([None]), scores(0.1))
    log.close()
    assert read_scores(tmp_path / "scores.arrows")["event_id"].to_pylist() == ["a", None]


def test_of_a_torn_log_all_whole_batches_are_read(tmp_path, clock):
    path = tmp_path / "scores.arrows"
    log = ScoreLog(path, label="click", clock=clock)
    ends = []
    for step in range(3):
        log.trained(step, delivery(["x", "y"]), scores(0.5, 0.6))
        log.flush()
        ends.append(path.stat().st_size)
    log.close()
    whole, torn = path.read_bytes(), tmp_path / "torn.arrows"
    near = {end + off for end in ends for off in (-1, 0, 1)}
    for size in sorted(near | {*range(0, len(whole), 13), len(whole)}):
        torn.write_bytes(whole[:size])
        table = read_scores(torn)
        expected = sum(end <= size for end in ends)
        assert (0 if table is None else table.num_rows) == 2 * expected, f"{size} bytes"


def test_a_log_without_rows_holds_none(tmp_path, clock):
    ScoreLog(tmp_path / "scores.arrows", label="click", clock=clock).close()
    assert read_scores(tmp_path / "scores.arrows") is None
    assert read_scores(tmp_path / "elsewhere.arrows") is None


def test_a_log_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_scores(tmp_path)
