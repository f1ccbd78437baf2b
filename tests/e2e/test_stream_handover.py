"""Hand-over on a live Kafka, end to end (A2-A9, A13, A23)."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.stream import BOUNDARY, Stream, StreamSettings
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.config.env import SUCCESSOR_DIR, TOLERANCE_SECS
from tidemill.contracts import layout
from tidemill.errors import RetiredError
from tidemill.lineage.records import read_lineage
from tidemill.storage.open import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MALFORMED = [
    b"",
    b"{",
    b'{"data_ts": 99',
    b"\xff\xfe\x00garbage",
    b"[1000.0]",
    b"1000.0",
    b"null",
    b"{}",
    b'{"data_ts": -1}',
    b'{"data_ts": NaN}',
    b'{"data_ts": Infinity}',
    b'{"data_ts": "1000.0"}',
    b'{"data_ts": null}',
    b'{"data_ts": true}',
    b'{"data_ts": [1000.0]}',
    b'{"data_ts": 1' + b"0" * 400 + b"}",
]
"""What A9 lists, each of which must mean "no hand-over"; those that name a time name one that would hand over."""


def assert_retired(stream: Stream, successor: str) -> None:
    """The lineage is closed: final release, no final checkpoint, records, and it never starts again."""
    storage = open_storage(stream.folder)
    record = stream.records()[-1]
    assert (record.status, record.reason, record.exit_code) == ("retired", "handed_over", 0)
    assert record.successor == successor
    lineage = read_lineage(storage)
    head = stream.releases()[-1]
    assert (lineage.status, lineage.successor, lineage.last_sequence) == ("retired", successor, head.sequence)
    assert head.step == record.step
    saved = latest_checkpoint(storage)
    assert saved is None or saved[1].step < record.step
    with stream.trainer() as process:
        assert process.wait(120) == RetiredError.exit_code, stream.log()


def test_a_successor_that_has_caught_up_retires_its_predecessor(make_stream):
    """Both read the same topic; the successor's boundary is later, and it replays what came since then."""
    settings = StreamSettings(checkpoint_steps=1000)
    old = make_stream(settings)
    topic, middle = old.topic, BOUNDARY + 1000
    new = Stream(old.workshop, topic, replace(settings, boundary=middle), "lineages/20260304")
    shutil.copytree(old.folder, new.folder)
    topic.send(BOUNDARY + np.arange(1200.0))
    with old.trainer(environment={SUCCESSOR_DIR: str(new.folder), TOLERANCE_SECS: "60"}) as predecessor:
        old.await_that(predecessor, lambda: bool(old.events("handover.checked")), "a check")
        with new.trainer() as successor:
            with topic.feeding(200.0, BOUNDARY + 1200, speed=20.0):
                assert predecessor.wait(120) == 0, old.log()
                retired_at = new.ledger().rows
                new.await_that(successor, lambda: new.ledger().trained_once > retired_at + 100, "the successor to go on")
            new.await_trained(successor)
            new.end(successor)
    checks = old.events("handover.checked")
    assert [check["verdict"] for check in checks[:-1]] == ["none"] * (len(checks) - 1)
    assert checks[-1]["verdict"] == "hand_over"
    assert checks[-1]["lag_s"] <= 60
    assert_retired(old, "lineages/20260304")
    ledger = old.retired_ledger()
    assert ledger.is_clean, ledger
    ledger = new.ledger()
    assert ledger.is_clean, ledger
    new.verify_head()


def write_successor(folder: Path, data: bytes) -> None:
    """As tzrec does: a temporary file, then its place."""
    part = folder / "part"
    part.write_bytes(data)
    part.replace(folder / layout.PROGRESS)


def test_two_ranks_leave_together_for_a_successor_written_by_hand(make_stream, tmp_path):
    """DCL 9.19. Event times 1000 and 900 at quorum 1.0; nothing but {"data_ts": 850} makes them leave at a tolerance of 60."""
    stream = make_stream(StreamSettings(boundary=0.0, quorum=1.0, idle_timeout_s=600.0))
    successor = tmp_path / "successor"
    environment = {SUCCESSOR_DIR: str(successor), TOLERANCE_SECS: "60"}
    with (
        stream.topic.feeding(60.0, 1000.0, speed=0.0, partition=0),
        stream.topic.feeding(60.0, 900.0, speed=0.0, partition=1),
        stream.trainer(ranks=2, environment=environment) as process,
    ):
        stream.await_that(process, lambda: stream.progress().get("data_ts") == 900.0, "the quorum's value")
        assert_no_hand_over(stream, process)
        successor.mkdir()
        for data in [*MALFORMED, b'{"data_ts": 839.9}']:
            write_successor(successor, data)
            assert_no_hand_over(stream, process)
        write_successor(successor, b'{"data_ts": 850}')
        assert process.wait(60) == 0, stream.log()
    assert stream.progress()["data_ts"] == 900.0
    assert stream.events("handover.checked")[-1]["lag_s"] == 50.0
    head = stream.releases()[-1]
    parts = sorted((stream.folder / layout.segments(head.term, head.cut)).glob("part-*.json"))
    assert [json.loads(part.read_bytes())["step"] for part in parts] == [head.step] * 2
    assert_retired(stream, str(successor))
    ledger = stream.retired_ledger()
    assert ledger.is_clean, ledger


def assert_no_hand_over(stream: Stream, process: subprocess.Popen) -> None:
    """Two more checks, each without a verdict to leave, and a trainer that goes on."""
    seen, steps = len(stream.events("handover.checked")), stream.progress()["step"]
    stream.await_that(process, lambda: len(stream.events("handover.checked")) > seen + 1, "checks")
    stream.await_that(process, lambda: stream.progress()["step"] > steps, "steps")
    assert {check["verdict"] for check in stream.events("handover.checked")} == {"none"}
    assert process.poll() is None
