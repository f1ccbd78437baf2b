"""What a training job makes of its config, beside training."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.jobs.conftest import BATCH, BOUNDARY, DATE, TOPIC, pipeline_config, rows
from tidemill.checkpoint.discovery import read_dataloader_state
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import ConfigError, LineageError
from tidemill.jobs import pipeline
from tidemill.jobs.place import place_of
from tidemill.jobs.report import open_handover
from tidemill.jobs.run import Run, open_recorder
from tidemill.jobs.start import Start, read_snapshot
from tidemill.jobs.train import TrainRequest, train
from tidemill.lineage.records import run_records
from tidemill.lineage.terms import Writer
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
        assert record.details == {"rows_before_boundary": late, "event_times_refused": 0}


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
