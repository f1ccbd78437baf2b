"""A stream without Kafka: files that appear in a folder, through kills, each row once."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.e2e.folder import DropFolder, FolderSettings
from tests.e2e.stream import BOUNDARY, DAILY, LINEAGE, ReleaseReader, Stream, copy_base
from tests.e2e.workshop import kill
from tidemill.checkpoint.discovery import read_checkpoint
from tidemill.storage.open import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture
def stream(tmp_path, base):
    workshop = copy_base(base, tmp_path)
    drop = DropFolder(tmp_path / "drop", workshop.root / LINEAGE)
    return Stream(workshop, drop, FolderSettings(publish_s=0.3, checkpoint_steps=10, idle_timeout_s=1.0, quorum=1.0), LINEAGE)


def await_released(stream, process):
    """Wait until the newest release holds all rows of the stream that were written."""
    parent = read_checkpoint(open_storage(stream.workshop.root / DAILY))[1].examples
    total = parent + int(np.count_nonzero(stream.topic.times >= BOUNDARY))
    stream.await_that(process, lambda: bool(stream.releases()) and stream.releases()[-1].examples >= total, "all rows released")
    assert stream.releases()[-1].examples == total


def test_killed_at_random_moments_while_files_keep_coming(stream):
    rng = np.random.default_rng(3)
    drop = stream.topic
    drop.send("00000.parquet", BOUNDARY - 300 + np.arange(600.0))  # half of its rows are the table's
    with ReleaseReader(stream.folder) as reader:
        with drop.feeding(23, BOUNDARY + 300):
            for ranks in (1, 2, 1):
                with stream.trainer(ranks=ranks) as process:
                    stream.await_steps(process, number=int(rng.integers(5, 40)))
                    time.sleep(rng.uniform(0.0, 0.5))
                    assert process.poll() is None, stream.log()
                    kill(process)
        with stream.trainer() as process:
            await_released(stream, process)
            # Each split counts until it is silent; the last one to be is some files behind at most.
            newest = float(drop.times.max())
            stream.await_that(process, lambda: stream.progress().get("data_ts", 0) > newest - 20, "the watermark")
            stream.end(process)
    ledger = stream.ledger()
    assert ledger.is_clean, ledger
    assert [record.term for record in stream.records()] == [1, 2, 3, 4]
    reader.assert_sound(stream.releases())
    stream.verify_head()
