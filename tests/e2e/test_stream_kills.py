"""Stream trainers that are killed, frozen, or lose a peer: every row is trained once, and what is served is what was trained."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from tests.e2e.stream import BOUNDARY, ReleaseReader, StreamSettings, is_alive, rank_pid, stop_process
from tests.e2e.workshop import eventually, kill
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.errors import FencedError
from tidemill.storage.open import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_killed_at_random_moments_while_rows_keep_coming(make_stream):
    rng = np.random.default_rng(2)
    stream = make_stream(StreamSettings(publish_s=0.3, checkpoint_steps=10))
    with ReleaseReader(stream.folder) as reader:
        with stream.topic.feeding(200.0, BOUNDARY):
            for number in range(3):
                with stream.trainer() as process:
                    stream.await_steps(process, number=int(rng.integers(0, 60)))
                    time.sleep(rng.uniform(0.0, 0.5))
                    assert process.poll() is None, stream.log()
                    kill(process)
                assert stream.records()[number].status == "running"
        with stream.trainer() as process:
            stream.await_trained(process)
            stream.end(process)
    ledger = stream.ledger()
    assert ledger.is_clean, ledger
    assert [record.term for record in stream.records()] == [1, 2, 3, 4]
    reader.assert_sound(stream.releases())
    stream.verify_head()


def test_a_frozen_trainer_is_fenced_when_it_wakes(make_stream):
    stream = make_stream(StreamSettings(publish_s=0.3, checkpoint_steps=10))
    stream.topic.send(BOUNDARY + 0.1 * np.arange(3000.0))
    with ReleaseReader(stream.folder) as reader, stream.trainer() as zombie:
        stream.await_that(zombie, lambda: latest_checkpoint(open_storage(stream.folder)) is not None, "a checkpoint")
        stop_process(zombie.pid)
        with stream.trainer() as process:
            with stream.topic.feeding(150.0, BOUNDARY + 400):
                stream.await_steps(process, number=5)
                os.kill(zombie.pid, signal.SIGCONT)
                assert zombie.wait(60) == FencedError.exit_code, stream.log()
                woken = len(stream.releases())
                stream.await_that(process, lambda: len(stream.releases()) > woken + 3, "releases of the second trainer")
            stream.await_trained(process)
            stream.end(process)
    first, second = stream.records()
    assert (first.status, first.reason, first.exit_code) == ("failed", "failed", FencedError.exit_code)
    assert first.error.startswith("FencedError")
    assert second.status == "interrupted"
    ledger = stream.ledger()
    assert ledger.is_clean, ledger
    reader.assert_sound(stream.releases())
    stream.verify_head()


def test_a_rank_that_dies_takes_the_other_with_it_and_one_goes_on(make_stream):
    """Three partitions on two ranks, one of them silent: it holds nothing back once it counts as idle."""
    settings = StreamSettings(checkpoint_steps=10, idle_timeout_s=4.0, quorum=1.0, timeout_s=10.0)
    stream = make_stream(settings, partitions=3)
    topic = stream.topic
    with stream.trainer(ranks=2) as process:
        with topic.feeding(100.0, BOUNDARY, partition=0), topic.feeding(100.0, BOUNDARY, partition=1):
            stream.await_that(process, lambda: "data_ts" in stream.progress(), "the first watermark")
            topic.send(BOUNDARY + 9000 + np.arange(400.0), partition=0)
            topic.send(BOUNDARY + 9000 + np.arange(350.0), partition=1)
        # The quorum of all: what the rank that is behind has reached.
        stream.await_that(process, lambda: stream.progress()["data_ts"] == BOUNDARY + 9349, "the watermark")
        stream.await_trained(process)
        ticking = stream.progress()["heartbeat"]
        stream.await_that(process, lambda: stream.progress()["heartbeat"] > ticking + 8, "ticks without rows")
        # Once one of the two is idle too, what the other has reached counts alone.
        assert stream.progress()["data_ts"] in (BOUNDARY + 9349, BOUNDARY + 9399)
        # torchrun would end the survivor at once; it has to find out by itself.
        ranks = [rank_pid(process, rank) for rank in (0, 1)]
        stop_process(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        eventually(lambda: not is_alive(ranks[0]), timeout_s=settings.timeout_s + 30, what="the end of the other rank")
    record = stream.records()[0]
    assert (record.status, record.world_size) == ("failed", 2)
    assert record.error.startswith("PeerLostError")
    assert record.exit_code == 75
    with stream.trainer() as process:
        stream.await_steps(process, number=0)
        topic.send(BOUNDARY + 10000 + np.arange(300.0))
        stream.await_trained(process)
        stream.end(process)
    ledger = stream.ledger()
    assert ledger.is_clean, ledger
    assert BOUNDARY + 10000 <= stream.progress()["data_ts"] <= BOUNDARY + 10299
    stream.verify_head()
