"""A stream on a live Kafka, from the day's checkpoint: every row once, releases all the while, and an end that leaves nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.e2e.stream import BOUNDARY, DAILY, ReleaseReader, Stream, StreamSettings
from tests.e2e.test_resume import weights
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state, read_rank_states
from tidemill.contracts.progress import ROW_BITS
from tidemill.storage.open import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def assert_idle_end(stream: Stream, run: int) -> None:
    """A run that was stopped left a checkpoint and a release of its last step, with all rows that were produced."""
    record = stream.records()[run]
    assert (record.status, record.reason, record.exit_code, record.kind) == ("interrupted", "preempted", 75, "train_stream")
    _, checkpoint = read_checkpoint(open_storage(stream.folder))
    assert checkpoint.step == record.step
    assert checkpoint.run_id == record.run_id
    assert stream.releases()[-1].sequence == record.sequence
    ledger = stream.ledger()
    assert ledger.is_clean, ledger
    stream.verify_head()


def covered(stream: Stream) -> dict[str, list[tuple[int, int]]]:
    """Offsets that the newest checkpoint is done with, by partition."""
    storage = open_storage(stream.folder)
    states = read_dataloader_state(storage, read_checkpoint(storage)[1]).splits
    return {state.split: [(start >> ROW_BITS, stop >> ROW_BITS) for start, stop in state.intervals] for state in states}


def test_day_then_stream_then_stopped_while_idle_then_on(make_stream):
    stream = make_stream(StreamSettings())
    topic = stream.topic
    topic.send(BOUNDARY - 7200 + np.arange(40.0))  # before the margin: never read
    # Within the margin: rows of the table among rows of the stream.
    late = BOUNDARY - 500 + np.arange(600.0)
    topic.send(np.where(np.arange(600) % 3, late + 500, late))
    with ReleaseReader(stream.folder) as reader, stream.trainer() as process:
        stream.await_steps(process)
        with topic.feeding(300.0, BOUNDARY + 1200):
            stream.await_that(process, lambda: len(stream.releases()) > 10, "ten releases")
        stream.await_trained(process)
        stream.end(process)
    assert_idle_end(stream, 0)
    reader.assert_sound(stream.releases())
    times = np.array([release.stages.committed_at for release in stream.releases() if release.cut > 1])
    assert 0.4 < np.median(np.diff(times)) < 1.5  # published every 0.5 s
    rows = sum(len(rows) for rows in topic.expected(BOUNDARY).values())
    parent = read_checkpoint(open_storage(stream.workshop.root / DAILY))[1].examples
    assert stream.releases()[-1].examples == parent + rows
    first = {f"{topic.name}:{partition}": 20 for partition in range(2)}  # 40 rows lie before the margin
    assert {split: starts for split, ((starts, _),) in covered(stream).items()} == first

    with stream.trainer() as process:
        stream.await_steps(process, number=0)
        topic.send(BOUNDARY + 9000 + np.arange(300.0))
        stream.await_trained(process)
        stream.end(process)
    assert_idle_end(stream, 1)
    assert [release.term for release in stream.releases()] == sorted(release.term for release in stream.releases())
    for split, ((start, stop),) in covered(stream).items():
        assert start == first[split]
        assert stop == topic.ends[split]


def test_arrow_messages_larger_than_a_batch_are_cut_anywhere(make_stream):
    stream = make_stream(StreamSettings(batch_size=16, message_format="arrow", publish_s=None, publish_steps=3, checkpoint_steps=7))
    topic = stream.topic
    times = BOUNDARY + np.arange(2000.0)
    times[np.arange(2000) % 50 == 25] = BOUNDARY - 1  # in the middle of each message, a row of the table
    topic.send_arrow(times[:1000], 50)
    with stream.trainer() as process:
        stream.await_steps(process, number=5)
        stream.end(process)
    middle = stream.ledger()
    assert middle.lost > 0
    assert (middle.doubled, middle.unlisted) == (0, 0)
    topic.send_arrow(times[1000:], 50, partition=1)
    with ReleaseReader(stream.folder) as reader, stream.trainer() as process:
        stream.await_trained(process)
        stream.end(process)
    assert_idle_end(stream, 1)
    reader.assert_sound(stream.releases())


def test_training_is_bitwise_the_same_whether_or_not_it_publishes(make_stream):
    """Full batches of one partition: both runs see the same ones."""
    settings = StreamSettings(max_wait_s=30.0, publish_s=0.2, checkpoint_steps=1000)
    stream = make_stream(settings, partitions=1)
    stream.topic.send(BOUNDARY + np.arange(32.0 * 60))
    silent = Stream(stream.workshop, stream.topic, replace(settings, publish_s=None), "lineages/silent")
    shutil.copytree(stream.folder, silent.folder)
    found, randoms = [], []
    for one in (stream, silent):
        with one.trainer() as process:
            one.await_trained(process)
            one.end(process)
        storage = open_storage(one.folder)
        _, manifest = read_checkpoint(storage)
        assert manifest.step == 60
        found.append(weights(one.folder))
        randoms.append(read_rank_states(storage, manifest)[0]["random"]["torch"])
    assert len(stream.releases()) > 3
    assert not silent.releases()
    published, unpublished = found
    assert published.keys() == unpublished.keys()
    assert not [name for name in published if not np.array_equal(published[name], unpublished[name])]
    assert np.array_equal(*randoms)
