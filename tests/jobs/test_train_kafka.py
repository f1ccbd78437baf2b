"""A training job on a topic: backfills end, committed checkpoints show in the group, wrong settings stop it before it starts."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from tests.jobs.conftest import BATCH, BOUNDARY, TOPIC, pipeline_config, rows
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state
from tidemill.cli.main import app
from tidemill.contracts.progress import ROW_BITS
from tidemill.errors import ConfigError
from tidemill.jobs.train import TrainRequest, train
from tidemill.lineage.records import run_records
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.broker import DevelopmentBroker

NUM_ROWS = 5 * BATCH + 3


@pytest.fixture
def broker(tmp_path):
    """Two partitions, the second of them empty; the end of the first is a transaction's marker."""
    with DevelopmentBroker(tmp_path / "broker") as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap, "log_level": 0})
        admin.create_topics([NewTopic(TOPIC, 2)])[TOPIC].result(10)
        producer = Producer({"bootstrap.servers": running.bootstrap, "log_level": 0})
        for row in rows(NUM_ROWS, BOUNDARY, seed=2).to_pylist():
            producer.produce(TOPIC, json.dumps(row).encode(), partition=0)
        assert producer.flush(10) == 0
        running.control(f"marker {TOPIC} 0 commit")
        yield running


@pytest.fixture
def written(tmp_path):
    """A pipeline of one pass without evaluation."""
    config = pipeline_config(tmp_path / "root", tmp_path)
    config["eval_input_path"] = ""
    del config["train_config"]["num_steps"]
    config["train_config"] |= {"num_epochs": 1, "save_checkpoints_steps": 2}
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def backfill(written: Path, broker: DevelopmentBroker, folder: Path, end: int) -> int:
    kafka = {
        "brokers": broker.bootstrap,
        "topic": TOPIC,
        "group_id": "dashboard",
        "max_wait_s": 5.0,
        "end_offsets": {f"{TOPIC}:0": end, f"{TOPIC}:1": 0},
        "client": {"log_level": 0, "sasl.password": "hunter2"},
    }
    edits = {"data_config.dataset_type": "KafkaDataset", "data_config.kafka": kafka}
    request = TrainRequest(str(written), {"model_dir": str(folder)}, json.dumps(edits), continue_train=True)
    return train(request)


def test_a_backfill_is_a_run_that_finishes(tmp_path, written, broker, quiet):
    """It is exhausted at its end, goes on to a later end, and does nothing when started once more; its last checkpoint shows in
    the group."""
    folder = tmp_path / "model"
    storage = LocalStorage(folder)
    assert backfill(written, broker, folder, 2 * BATCH + 1) == 0
    assert read_checkpoint(storage)[1].examples == 2 * BATCH + 1
    assert backfill(written, broker, folder, NUM_ROWS + 1) == 0
    manifest = read_checkpoint(storage)[1]
    assert manifest.examples == NUM_ROWS
    states = {state.split: state.intervals for state in read_dataloader_state(storage, manifest).splits}
    assert states == {f"{TOPIC}:0": [(0, (NUM_ROWS + 1) << ROW_BITS)], f"{TOPIC}:1": []}
    assert [(record.status, record.reason) for record in run_records(storage)] == [("completed", "exhausted")] * 2
    group = {"bootstrap.servers": broker.bootstrap, "group.id": "dashboard", "log_level": 0}
    with closing(Consumer(group)) as reader:
        assert reader.committed([TopicPartition(TOPIC, 0)], timeout=10.0)[0].offset == NUM_ROWS + 1
    assert backfill(written, broker, folder, NUM_ROWS + 1) == 0
    assert read_checkpoint(storage)[1] == manifest
    saved = [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert saved == []


def test_a_wrong_client_setting_is_an_error_before_anything_starts(tmp_path, written, quiet):
    kafka = {"brokers": "127.0.0.1:1", "topic": "t", "client": {"sasl.pasword": "hunter2"}}
    edits = json.dumps({"data_config.dataset_type": "KafkaDataset", "data_config.kafka": kafka, "model_dir": str(tmp_path / "m")})
    result = CliRunner().invoke(app, ["config", "check", str(written), f"--edit_config_json={edits}"])
    assert result.exit_code == ConfigError.exit_code
    with pytest.raises(ConfigError) as raised:
        train(TrainRequest(str(written), {}, edits))
    for text in (result.output, str(raised.value)):
        assert "sasl.pasword" in text
        assert "hunter2" not in text
    assert not (tmp_path / "m").exists()
