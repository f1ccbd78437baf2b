"""A small life, once for all tests: a day trained and exported, then a stream that loses a checkpoint and goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill import logs
from tidemill.jobs.export import ExportRequest, export
from tidemill.jobs.train import TrainRequest, train
from tidemill.testing.broker import DevelopmentBroker

DATE = "20240102"
BOUNDARY = 1704240000.0
BATCH = 16
NUM_EVENTS = 20 * BATCH
TOPIC = "events"


@dataclass(frozen=True)
class Life:
    """Where everything is. The stream's runs: 1 to step 4, 2 to step 10, whose checkpoint is lost, 3 from step 4 to 14."""

    root: Path
    pipeline: Path
    day: Path

    @property
    def daily(self) -> Path:
        return self.root / "daily" / DATE

    @property
    def lineage(self) -> Path:
        return self.root / "lineages" / DATE


def rows(count: int, first_time: float, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 40, count), rng.integers(0, 30, count)
    return pa.table(
        {
            "event_id": [f"e{seed}-{n}" for n in range(count)],
            "event_time": first_time + np.arange(count, dtype=np.float64),
            "user_id": [f"u{user}" for user in users],
            "item_id": [f"i{item}" for item in items],
            "price": rng.random(count),
            "click": ((users + items) % 3 == 0).astype(np.int64),
        }
    )


def pipeline_config(root: Path, day: Path) -> dict[str, Any]:
    ids = [
        {
            "id_feature": {
                "feature_name": f"{name}_id",
                "expression": f"{side}:{name}_id",
                "hash_bucket_size": 64,
                "embedding_dim": 4,
            }
        }
        for name, side in (("user", "user"), ("item", "item"))
    ]
    return {
        "train_input_path": f"{day}/*.parquet",
        "eval_input_path": f"{day}/*.parquet",
        "model_dir": str(root / "daily" / DATE),
        "train_config": {
            "sparse_optimizer": {"adagrad_optimizer": {"lr": 0.05}, "constant_learning_rate": {}},
            "dense_optimizer": {"adam_optimizer": {"lr": 0.01}, "constant_learning_rate": {}},
            "num_steps": 10,
            "lineage": {"boundary": BOUNDARY},
            "runtime": {"threads": 1},
        },
        "data_config": {
            "dataset_type": "ParquetDataset",
            "batch_size": BATCH,
            "fg_mode": "FG_DAG",
            "label_fields": ["click"],
            "event_time": {"column": "event_time"},
            "id_column": "event_id",
            "input_fields": [
                {"input_name": "event_time", "input_type": "DOUBLE"},
                {"input_name": "price", "input_type": "DOUBLE"},
                {"input_name": "click", "input_type": "INT64"},
            ],
        },
        "feature_configs": [*ids, {"raw_feature": {"feature_name": "price", "expression": "item:price"}}],
        "model_config": {
            "feature_groups": [{"group_name": "deep", "feature_names": ["user_id", "item_id", "price"], "group_type": "DEEP"}],
            "multi_tower": {"towers": [{"input": "deep", "mlp": {"hidden_units": [8]}}], "final": {"hidden_units": [8]}},
            "losses": [{"binary_cross_entropy": {}}],
            "metrics": [{"auc": {}}],
        },
    }


def stream(life: Life, brokers: str, num_steps: int) -> int:
    edits = {
        "data_config.dataset_type": "KafkaDataset",
        "data_config.kafka": {"brokers": brokers, "topic": TOPIC, "message_format": "json"},
        "train_config.num_steps": num_steps,
        "train_config.save_checkpoints_steps": 1000,
        "train_config.publish": {"interval_steps": 3},
    }
    overrides = {
        "model_dir": str(life.lineage),
        "train_input_path": f"kafka://{brokers}/{TOPIC}",
        "eval_input_path": "",
        "train_config.fine_tune_checkpoint": str(life.daily),
    }
    return train(TrainRequest(str(life.pipeline), overrides, json.dumps(edits), continue_train=True))


def produce(brokers: str) -> None:
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(10)
    producer = Producer({"bootstrap.servers": brokers})
    for row in rows(NUM_EVENTS, BOUNDARY, seed=2).to_pylist():
        producer.produce(TOPIC, json.dumps(row).encode(), partition=0)
    assert producer.flush(10) == 0


@pytest.fixture(scope="session")
def _life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("life")
    life = Life(folder / "root", folder / "pipeline.yaml", folder / "day")
    life.day.mkdir()
    pq.write_table(rows(100, BOUNDARY - 1000, seed=0), life.day / "a.parquet")
    pq.write_table(rows(60, BOUNDARY - 500, seed=1), life.day / "b.parquet")
    life.pipeline.write_text(yaml.safe_dump(pipeline_config(life.root, life.day)))
    threads = torch.get_num_threads()
    try:
        assert train(TrainRequest(str(life.pipeline), {})) == 0
        export(ExportRequest(str(life.pipeline), str(life.lineage), None, {}))
        with DevelopmentBroker(folder / "broker") as broker:
            produce(broker.bootstrap)
            assert stream(life, broker.bootstrap, 4) == 0
            assert stream(life, broker.bootstrap, 10) == 0
            # What a crash before the save at step 10 leaves: releases that know more than the trainer.
            shutil.rmtree(life.lineage / "model.ckpt-10")
            assert stream(life, broker.bootstrap, 14) == 0
    finally:
        torch.set_num_threads(threads)
        logs.log.handlers[:] = []
        logs.log.propagate = True
    return life


@pytest.fixture
def life(_life: Life) -> Life:
    """To look at, not to change."""
    return _life


@pytest.fixture
def lineage(_life: Life, tmp_path: Path) -> Path:
    """The stream's lineage, to change as one likes."""
    return Path(shutil.copytree(_life.lineage, tmp_path / "lineages" / DATE))


@pytest.fixture
def quiet() -> Iterator[None]:
    """Undo what a job does to its process: torch's threads, the log."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    logs.log.handlers[:] = []
    logs.log.propagate = True
