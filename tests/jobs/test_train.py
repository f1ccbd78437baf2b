"""What a training job makes of its config, beside training."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.jobs.conftest import BATCH, BOUNDARY, DATE, TOPIC, pipeline_config, rows
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state
from tidemill.checkpoint.restore import dense_tensors, read_table
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import CheckpointError, ConfigError, DataError, LineageError, SchemaError
from tidemill.jobs import pipeline
from tidemill.jobs.export import best_checkpoint
from tidemill.jobs.place import place_of
from tidemill.jobs.report import open_handover
from tidemill.jobs.run import Run, open_recorder
from tidemill.jobs.start import Start, read_snapshot
from tidemill.jobs.train import TrainRequest, train
from tidemill.lineage.records import run_records
from tidemill.lineage.terms import Writer
from tidemill.models.metrics import scored_rows
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.rank_threads import ThreadGroup, run_threads


@pytest.fixture
def day(tmp_path: Path) -> Path:
    folder = tmp_path / "day"
    folder.mkdir()
    pq.write_table(rows(3 * BATCH, BOUNDARY - 1000, seed=0), folder / "a.parquet")
    return folder


@pytest.fixture
def written(tmp_path: Path, day: Path) -> Path:
    """The pipeline's config."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline_config(tmp_path / "root", day)))
    return path


def newest_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Everything that the newest checkpoint holds of the model."""
    storage = LocalStorage(folder)
    _, manifest = read_checkpoint(storage)
    arrays = {spec.name: read_table(storage, manifest, spec.name) for spec in manifest.tables}
    return arrays | {name: tensor.numpy() for name, tensor in dense_tensors(storage, manifest).items()}


def states(folder: Path) -> list[tuple[int, int, bool]]:
    """Of each checkpoint: step, passes completed, whether rows of the next pass are done."""
    storage = LocalStorage(folder)
    keys = [info.key for info in storage.list("model.ckpt-") if "/manifest-" in info.key]
    manifests = [CheckpointManifest.parse(storage.read(key), where=key) for key in keys]
    found = [(manifest.step, read_dataloader_state(storage, manifest)) for manifest in manifests]
    return sorted((step, state.passes_completed, any(split.intervals for split in state.splits)) for step, state in found)


@pytest.mark.usefixtures("quiet")
def test_checkpoints_come_every_so_many_passes(tmp_path: Path, written: Path) -> None:
    edits = {"train_config.num_steps": None, "train_config.num_epochs": 3, "train_config.save_checkpoints_epochs": 2}
    folder = tmp_path / "model"
    assert train(TrainRequest(str(written), {"model_dir": str(folder), "eval_input_path": ""}, json.dumps(edits))) == 0
    assert states(folder) == [(6, 2, False), (9, 3, False)]


@pytest.mark.usefixtures("quiet")
def test_a_stream_says_what_it_left_out(tmp_path: Path, written: Path) -> None:
    late, taken = 5, 2 * BATCH
    with DevelopmentBroker(tmp_path / "broker") as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(10)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for row in [*rows(late, BOUNDARY - 5, seed=1).to_pylist(), *rows(taken, BOUNDARY, seed=2).to_pylist()]:
            producer.produce(TOPIC, json.dumps(row).encode(), partition=0)
        assert producer.flush(10) == 0
        kafka = {"brokers": broker.bootstrap, "topic": TOPIC, "max_wait_s": 5.0}
        edits = {"data_config.dataset_type": "KafkaDataset", "data_config.kafka": kafka, "train_config.num_steps": 2}
        overrides = {"model_dir": str(tmp_path / "stream"), "train_input_path": TOPIC, "eval_input_path": ""}
        assert train(TrainRequest(str(written), overrides, json.dumps(edits))) == 0
        (record,) = run_records(LocalStorage(tmp_path / "stream"))
        assert record.details == {
            "rows_before_boundary": late,
            "rows_skipped": 0,
            "rows_late": 0,
            "rows_oversized": 0,
            "rows_remainder": 0,
            "event_times_refused": 0,
            "event_times": {f"{TOPIC}:0": BOUNDARY + taken - 1},
            "idle_partitions": [],
        }


@pytest.mark.usefixtures("quiet")
def test_a_silent_partition_is_told_and_holds_nothing_back(tmp_path: Path, written: Path) -> None:
    """DCL 9.16 and the issue: idle partitions are left out after a timeout, and reported in an event and in the record."""
    folder = tmp_path / "stream"

    def told() -> bool:
        return any('"partitions.idle"' in path.read_text() for path in folder.glob("runs/*/events.jsonl"))

    with DevelopmentBroker(tmp_path / "broker") as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 2)])[TOPIC].result(10)
        producer = Producer({"bootstrap.servers": broker.bootstrap})

        def send(first_time: float, partition: int, count: int) -> None:
            for row in rows(count, first_time, seed=partition).to_pylist():
                producer.produce(TOPIC, json.dumps(row).encode(), partition=partition)
            assert producer.flush(10) == 0

        def send_the_rest() -> None:
            until = time.monotonic() + 60
            while not told() and time.monotonic() < until:
                time.sleep(0.02)
            send(BOUNDARY + 500, 0, BATCH)

        send(BOUNDARY + 10, 1, BATCH)
        send(BOUNDARY + 100, 0, BATCH)
        kafka = {"brokers": broker.bootstrap, "topic": TOPIC, "max_wait_s": 5.0, "idle_timeout_s": 0.5}
        edits = {
            "data_config.dataset_type": "KafkaDataset",
            "data_config.kafka": kafka,
            "train_config.num_steps": 3,
            "train_config.handover.report_interval_s": 0.05,
        }
        overrides = {"model_dir": str(folder), "train_input_path": TOPIC, "eval_input_path": ""}
        rest = threading.Thread(target=send_the_rest, daemon=True)
        rest.start()
        try:
            assert train(TrainRequest(str(written), overrides, json.dumps(edits))) == 0
        finally:
            rest.join()
        assert told()
        (record,) = run_records(LocalStorage(folder))
        assert record.details["idle_partitions"] == [f"{TOPIC}:1"]
        assert record.details["event_times"] == {f"{TOPIC}:0": BOUNDARY + 500 + BATCH - 1, f"{TOPIC}:1": BOUNDARY + 10 + BATCH - 1}
        assert record.watermark == BOUNDARY + 500 + BATCH - 1, "the silent one would have held it at its own last row"


@pytest.mark.usefixtures("quiet")
def test_shuffled_weighted_rows_by_cost_are_trained_by_several_threads_and_resumed_bitwise(tmp_path: Path, written: Path) -> None:
    """Two passes at once, and the same with a kill exactly at the end of the first: equal to the last bit."""
    edits = {
        "train_config.num_steps": None,
        "train_config.num_epochs": 2,
        "train_config.save_checkpoints_epochs": 1,
        "data_config.shuffle": True,
        "data_config.shuffle_buffer_size": 2,
        "data_config.reader_threads": 2,
        "data_config.transform_threads": 2,
        "data_config.sample_cost_field": "price",
        "data_config.batch_cost_size": 6,
        "data_config.sample_weight_fields": ["price"],
    }

    def run(folder: Path, **more: object) -> int:
        overrides = {"model_dir": str(folder), "eval_input_path": ""}
        return train(TrainRequest(str(written), overrides, json.dumps(edits | more), continue_train=True))

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run(whole) == 0
    saved = states(whole)
    per_pass = next(step for step, passes, _ in saved if passes == 1)
    assert per_pass > 3, "cost makes more batches than rows would"
    assert [(passes, begun) for step, passes, begun in saved if step == per_pass] == [(1, False)]
    assert run(halves, **{"train_config.num_epochs": 1}) == 0
    assert states(halves)[-1] == (per_pass, 1, False)
    assert run(halves) == 0
    assert states(halves) == saved
    one, other = (newest_arrays(folder) for folder in (whole, halves))
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)
    assert run(halves) == 0, "a finished job that goes on"
    assert states(halves) == saved


def test_the_first_sample_weight_field_weighs_the_rows(written: Path) -> None:
    edits = json.dumps({"data_config.sample_weight_fields": ["price"]})
    config = pipeline.load(written, edits=edits).config
    features = pipeline.feature_set(config)
    table = rows(5, BOUNDARY, seed=3)
    batch = pipeline.labelled(features, "click")(table, 8)
    np.testing.assert_array_equal(batch.weights.numpy(), [*table["price"].to_numpy().astype(np.float32), 0, 0, 0])
    scored = scored_rows(batch, np.full(5, 0.5, np.float32), "click", ())
    np.testing.assert_array_equal(scored.weights, batch.weights[:5].numpy())
    negative = table.set_column(table.schema.get_field_index("price"), "price", pa.array([1.0, -1.0, 0.0, 0.0, 0.0]))
    with pytest.raises(DataError, match=r"sample weight 'price', row 1: -1\.0 is negative"):
        pipeline.labelled(features, "click")(negative, 8)


@pytest.mark.usefixtures("quiet")
def test_an_input_without_rows_is_an_error_that_leaves_no_checkpoint(tmp_path: Path, written: Path, day: Path) -> None:
    pq.write_table(rows(3, BOUNDARY - 1000, seed=0).slice(0, 0), day / "a.parquet")
    overrides = {"model_dir": str(tmp_path / "model"), "eval_input_path": ""}
    with pytest.raises(DataError, match="holds no row to train on"):
        train(TrainRequest(str(written), overrides))
    (record,) = run_records(LocalStorage(tmp_path / "model"))
    assert (record.status, states(tmp_path / "model")) == ("failed", [])


@pytest.mark.usefixtures("quiet")
def test_the_best_checkpoint_stays_and_is_exported(tmp_path: Path, written: Path) -> None:
    """DCL 9.18: each checkpoint is evaluated; the newest and the best one stay."""
    edits: dict[str, object] = {
        "train_config.num_steps": None,
        "train_config.num_epochs": 1,
        "train_config.save_checkpoints_epochs": 1,
        "export_config.exporter_type": "best",
    }
    folder = tmp_path / "model"

    def run(**more: object) -> None:
        request = TrainRequest(str(written), {"model_dir": str(folder)}, json.dumps(edits | more), continue_train=True)
        assert train(request) == 0

    run()
    lines = folder / layout.BEST_EVALUATIONS
    (line,) = [json.loads(line) for line in lines.read_text().splitlines()]
    assert (line["global_step"], 0 <= line["auc"] <= 1) == (3, True)
    lines.write_text('{"global_step": 3, "auc": 2.0}\n')
    run(**{"train_config.num_epochs": 3, "train_config.keep_checkpoint_max": 1})
    assert json.loads(lines.read_text().splitlines()[-1])["global_step"] == 9
    assert {step for step, _, _ in states(folder)} == {3, 9}
    config = pipeline.load(written, edits=json.dumps(edits)).config
    assert best_checkpoint(config, LocalStorage(folder)) == 3
    (folder / layout.BEST_EVALUATIONS).unlink()
    with pytest.raises(CheckpointError, match=r"train_eval_result_v2.txt has no auc of any of its checkpoints"):
        best_checkpoint(config, LocalStorage(folder))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("label", "text"),
    [
        (pa.array([0.0, 1.0, 0.25]), ""),
        (pa.array([True, False, True]), ""),
        (pa.array([0, 1, 1], pa.int32()), ""),
        (pa.array([0, 1, 2]), "a.parquet, row 2: label column 'click': value 2 isn't in 0..1, as binary_cross_entropy needs"),
        (pa.array([0, None, 1]), "a.parquet, row 1: label column 'click': value None isn't a finite number"),
        (pa.array(["0", "1", "1"]), "label column 'click' has type string; accepted: float32, float64, int32, int64, bool"),
        (pa.array([[0], [1], [1]]), "label column 'click' has type list"),
    ],
)
def test_kinds_of_labels(tmp_path: Path, written: Path, day: Path, label: pa.Array, text: str) -> None:
    table = rows(3, BOUNDARY - 1000, seed=0)
    pq.write_table(table.set_column(table.schema.get_field_index("click"), "click", label), day / "a.parquet")
    overrides = {"model_dir": str(tmp_path / "model"), "eval_input_path": ""}
    edits = json.dumps({"train_config.num_steps": 1})
    if not text:
        assert train(TrainRequest(str(written), overrides, edits)) == 0
        return
    with pytest.raises((DataError, SchemaError)) as raised:
        train(TrainRequest(str(written), overrides, edits))
    assert text in str(raised.value)


class Sharing:
    """What `from_rank_zero` needs of an agreement, in memory."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def share(self, value: Any) -> Any:
        return json.loads(self._group.gather("shared", self._rank, json.dumps(value))[0])


def stream_run(config: PipelineConfig, folder: Path, agreement: Any, rank: int) -> Run:
    storage = LocalStorage(folder)
    return Run(
        config=config,
        runtime=SimpleNamespace(rank=rank, world_size=2),
        agreement=agreement,
        storage=storage,
        place=place_of(str(folder)),
        start=Start(Writer(9, f"run-{rank}", rank, 2), None, None, None, read_snapshot(storage)),
        is_stream=True,
        boundary=BOUNDARY + 1,
        folder=None,
        resources=ExitStack(),
    )


def test_a_lineage_of_another_boundary_is_refused_on_every_rank_and_leaves_no_record(life, lineage: Path) -> None:
    config = pipeline.load(life.pipeline).config
    before = run_records(LocalStorage(lineage))
    results = run_threads(2, lambda group, rank: open_recorder(stream_run(config, lineage, Sharing(group, rank), rank)))
    assert [type(result.error) for result in results] == [LineageError, LineageError]
    assert DATE in str(results[1].error)
    assert run_records(LocalStorage(lineage)) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_successor_that_nobody_serves_is_refused_on_every_rank(life, lineage: Path, tmp_path: Path, rank: int) -> None:
    edits = json.dumps({"train_config.handover": {"successor_dir": str(tmp_path / "elsewhere"), "policy": "served"}})
    config = pipeline.load(life.pipeline, edits=edits).config
    run = stream_run(config, lineage, None, rank)
    with pytest.raises(ConfigError, match="inside a root"):
        open_handover(run)
