"""A stream whose windows are worse than the daily model's evaluation stops publishing, and says so once, also over a restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.jobs.conftest import DATE, TOPIC, Life, produce
from tidemill.contracts import layout
from tidemill.jobs.export import ExportRequest, export
from tidemill.jobs.train import TrainRequest, train
from tidemill.lineage.records import run_records
from tidemill.publish.recovery import newest_sequence, read_release
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.broker import DevelopmentBroker

WINDOW_S = 16.0
"""One batch: an event a second."""


def stream(life: Life, lineage: Path, daily: Path, brokers: str, *, num_steps: int) -> int:
    edits = {
        "data_config.dataset_type": "KafkaDataset",
        "data_config.kafka": {"brokers": brokers, "topic": TOPIC, "message_format": "json"},
        "train_config.num_steps": num_steps,
        "train_config.log_step_count_steps": 1,
        "train_config.progressive_window_s": WINDOW_S,
        "train_config.publish": {"interval_steps": 1, "quality": {"min_events": 1}},
    }
    overrides = {
        "model_dir": str(lineage),
        "train_input_path": f"kafka://{brokers}/{TOPIC}",
        "eval_input_path": "",
        "train_config.fine_tune_checkpoint": str(daily),
    }
    return train(TrainRequest(str(life.pipeline), overrides, json.dumps(edits), continue_train=True))


def alarms(lineage: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for path in lineage.glob("runs/*/events.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == "quality.alarm"]


def test_a_bad_window_pauses_publication_and_a_restart_does_not_end_the_pause(tmp_path: Path, life: Life, quiet: None) -> None:
    lineage = tmp_path / "lineages" / DATE
    export(ExportRequest(str(life.pipeline), str(lineage), None, {}))
    daily = Path(shutil.copytree(life.daily, tmp_path / "daily" / DATE))
    evaluations = daily / layout.BEST_EVALUATIONS
    # The daily model is said to have been perfect, so that any window of the stream is worse than allowed.
    evaluations.write_bytes(evaluations.read_bytes() + b'{"global_step": 10, "auc": 2.0}\n')
    storage = LocalStorage(lineage)
    with DevelopmentBroker(tmp_path / "broker") as broker:
        produce(broker.bootstrap)
        assert stream(life, lineage, daily, broker.bootstrap, num_steps=5) == 0
        assert stream(life, lineage, daily, broker.bootstrap, num_steps=6) == 0
    releases = [read_release(storage, sequence) for sequence in range(1, newest_sequence(storage) + 1)]
    # What opens a term holds no rows. The window of the first step is over at the second; not even an ending releases after that.
    assert [release.step for release in releases if release.files and release.step > 2] == []
    assert any(release.files for release in releases)
    (alarm,) = alarms(lineage)
    assert "the daily model 2.0000" in str(alarm["reason"])
    assert [run.details["publication_paused"] for run in run_records(storage)] == [True, True], "for whoever deploys to see"
    (exported,) = run_records(LocalStorage(tmp_path), prefix=layout.cycle(DATE))
    assert (exported.kind, exported.date, exported.status) == ("export", DATE, "completed")
