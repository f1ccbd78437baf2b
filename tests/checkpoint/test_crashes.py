"""Whatever operation of the store a save dies or fails at, the newest checkpoint is whole, old or new (DCL 9.14)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.ranks import Ranks, ShortWaits, assert_tables_of
from tidemill.checkpoint.discovery import latest_checkpoint, read_arrays_of, read_dataloader_state, read_rank_states
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash

MANY = 200
"""More operations than any save here takes."""


def require_whole(storage, steps) -> int:
    """The newest checkpoint is of one of the steps, and every part of it can be read."""
    newest = latest_checkpoint(storage)
    assert newest is not None
    manifest = newest[1]
    assert manifest.step in steps
    assert_tables_of(storage, manifest, manifest.step, 2)
    assert read_arrays_of(storage, manifest, "dense")["layer.weight"][0, 0] == manifest.step
    assert read_dataloader_state(storage, manifest).watermark == 1.7e9 + manifest.step
    assert [state["feed"]["position"] for state in read_rank_states(storage, manifest)] == [manifest.step] * manifest.world_size
    return manifest.step


def save_once(storage, step, world_size=1, **options):
    """A run that saves a step; what rank 0 was told."""
    ranks = Ranks(storage, world_size, clock=ShortWaits(), **options)
    try:
        return ranks.save(step)
    finally:
        ranks.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_dying_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(tmp_path, world_size):
    """DCL 9.14."""
    outcomes = []
    for k in itertools.count(1):
        assert k < MANY
        storage = LocalStorage(tmp_path / str(k))
        assert save_once(storage, 5, world_size)
        faulty = FaultyStorage(storage)
        faulty.crash_at(k)
        try:
            done = save_once(faulty, 6, world_size, keep=1)
        except SimulatedCrash:
            done = False
        outcomes.append(require_whole(storage, (5, 6)))
        assert save_once(storage, 7, world_size, term=2, keep=1), "the next run saves as if nothing had happened"
        assert require_whole(storage, (7,)) == 7
        left = {info.key.partition("/")[0] for info in storage.list("model.ckpt-")}
        assert left == {"model.ckpt-7"}, "and clears what the dead one left behind"
        if done and k > faulty.num_operations:
            break
    # With two ranks the same number isn't the same operation each time.
    assert world_size > 1 or outcomes == sorted(outcomes), "new from its commit on"
    assert {5, 6} == set(outcomes)


@pytest.mark.parametrize("after", [False, True], ids=["before it happens", "after it happened"])
def test_a_store_that_fails_at_any_operation_stops_nothing(tmp_path, after):
    """DCL 9.14."""
    for k in itertools.count(1):
        assert k < MANY
        storage = LocalStorage(tmp_path / str(k))
        assert save_once(storage, 5)
        faulty = FaultyStorage(storage)
        (faulty.fail_after if after else faulty.fail_at)(k)
        ranks = Ranks(faulty, keep=2, clock=ShortWaits())
        committed = ranks.save(6)
        assert require_whole(storage, (6,) if committed else (5, 6))
        last = faulty.num_operations < k
        assert ranks.save(7)
        ranks.close()
        assert require_whole(storage, (7,)) == 7
        if last:
            break


def test_a_store_that_is_down_for_good_fails_each_save_and_loses_nothing(tmp_path):
    storage = LocalStorage(tmp_path)
    assert save_once(storage, 5)
    faulty = FaultyStorage(storage)
    faulty.fail_at(*range(1, 1000))
    ranks = Ranks(faulty, clock=ShortWaits())
    assert [ranks.save(step) for step in (6, 7)] == [False, False]
    ranks.close()
    assert require_whole(storage, (5,)) == 5


def test_killed_at_random_moments_the_newest_checkpoint_is_always_whole(tmp_path):
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.killed_saver", str(tmp_path), "10"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0
    steps = [int(line) for line in output.split()]
    assert len(steps) == 10
    assert steps == sorted(steps)
    assert steps[-1] > 2, "saves got through between the kills"
