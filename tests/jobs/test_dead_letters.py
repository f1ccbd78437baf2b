"""A stream's messages and rows that can't be used, as the training job treats them (DCL 9.9)."""

import json

import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.jobs.conftest import BATCH, BOUNDARY, TOPIC, pipeline_config, rows
from tidemill.data.dead_letters import DeadLetters
from tidemill.errors import DataError
from tidemill.jobs.dead_letters import DEAD_LETTERS, restore_dead_letters
from tidemill.jobs.restore import Restored
from tidemill.jobs.train import TrainRequest, train
from tidemill.lineage.records import run_records
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.broker import DevelopmentBroker


def bad(row, **values):
    return json.dumps({**row, **values}).encode()


@pytest.mark.usefixtures("quiet")
def test_a_stream_skips_and_keeps_what_it_cannot_use_and_goes_on_behind_it(tmp_path):
    """Garbage, a label that is none, and one that is missing: each of them would have stopped the stream for good."""
    (tmp_path / "day").mkdir()
    pq.write_table(rows(50, BOUNDARY - 100, seed=0), tmp_path / "day" / "a.parquet")
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(yaml.safe_dump(pipeline_config(tmp_path / "root", tmp_path / "day")))
    good = rows(2 * BATCH, BOUNDARY, seed=2).to_pylist()
    messages = [json.dumps(row).encode() for row in good]
    messages[3:3] = [b"garbage", bad(good[0], click=7), bad(good[0], click=None)]
    with DevelopmentBroker(tmp_path / "broker") as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(10)
        producer = Producer({"bootstrap.servers": broker.bootstrap})

        def produce(values):
            for value in values:
                producer.produce(TOPIC, value, partition=0)
            assert producer.flush(10) == 0

        def run(folder, steps, **kafka):
            settings = {"brokers": broker.bootstrap, "topic": TOPIC, "max_wait_s": 2.0, **kafka}
            edits = {"data_config.dataset_type": "KafkaDataset", "data_config.kafka": settings, "train_config.num_steps": steps}
            overrides = {"model_dir": str(tmp_path / folder), "train_input_path": TOPIC, "eval_input_path": ""}
            return train(TrainRequest(str(pipeline), overrides, json.dumps(edits), continue_train=True))

        produce(messages)
        with pytest.raises(DataError, match="max_poison allows 1"):
            run("strict", 3, max_poison=1)
        assert run("stream", 3, max_poison=3) == 0
        storage = LocalStorage(tmp_path / "stream")
        (first,) = run_records(storage)
        assert first.details["rows_skipped"] == 3
        (path,) = (tmp_path / "stream" / "runs").glob("*/dead-letters-00000.jsonl")
        lines = sorted((json.loads(line) for line in path.read_bytes().splitlines()), key=lambda line: line["offset"])
        assert [(line["offset"], line["row"]) for line in lines] == [(3, None), (4, 0), (5, 0)]
        assert "isn't in 0..1" in lines[1]["reason"]
        assert lines[1]["values"]["click"] == 7
        assert lines[1]["values"]["event_id"] == good[0]["event_id"]
        assert "isn't a finite number" in lines[2]["reason"]
        produce(json.dumps(row).encode() for row in rows(BATCH, BOUNDARY + 100, seed=3).to_pylist())
        assert run("stream", 4, max_poison=0) == 0
        assert [record.details["rows_skipped"] for record in run_records(storage)] == [3, 0]
        # The budget is the line's: the three of the first run count, though this is the third process.
        produce([b"rubbish", *(json.dumps(row).encode() for row in rows(BATCH, BOUNDARY + 200, seed=4).to_pylist())])
        with pytest.raises(DataError, match=r"4 messages or rows .* max_poison allows 3"):
            run("stream", 5, max_poison=3)


def test_the_budget_is_dealt_out_when_the_number_of_ranks_changes():
    def letters(*offsets):
        entries = [[0, {"topic": "t", "partition": 0, "offset": offset, "row": None}, "garbage", None] for offset in offsets]
        return {DEAD_LETTERS: {"recent": entries}}

    def restored(states, world_size):
        found = [DeadLetters(max_poison=9, window=100) for _ in range(world_size)]
        for rank, own in enumerate(found):
            restore_dead_letters(own, Restored(rank_states=states), rank=rank, world_size=world_size)
        return [[place["offset"] for _, place, *_ in own.state()["recent"]] for own in found]

    assert restored([letters(1, 2), letters(3)], 2) == [[1, 2], [3]]
    assert restored([letters(1, 2), letters(3)], 1) == [[1, 2, 3]]
    assert restored([letters(1, 2, 3, 4)], 3) == [[1, 4], [2], [3]]
    # Older checkpoints have none.
    assert restored([{}], 2) == [[], []]
