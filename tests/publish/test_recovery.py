"""After a crash the next release makes served rows equal the trainer's for every key (D4)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.contracts.files import TableSpec
from tidemill.errors import CorruptError, FencedError
from tidemill.publish.publisher import PublishSettings
from tidemill.storage.arrays import read_arrays


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_touched_between_a_release_and_a_checkpoint_are_not_lost(world, ranks):
    """Publish at step 10, checkpoint at 15, killed at 16: rows touched in (10, 15] are in the checkpoint's touched ids."""
    storage, saved = world.lineage()
    run = world.start(storage, saved, ranks=2)
    _train(run, world.rng, 10)
    assert run.publish()
    _train(run, world.rng, 5)
    checkpoint = run.save()
    _train(run, world.rng, 1)
    run.stop()
    successor = world.start(storage, checkpoint, ranks=ranks)
    assert successor.publish(), "a term's first cut is made before any step"
    assert successor.is_served(storage)
    assert successor.publishers[0].newest.dense is not None


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_the_dead_timeline_go_back(world, ranks):
    """Checkpoint at step 15, publish at 20, killed: rows touched only in (15, 20] are served with values that the trainer lost."""
    storage, saved = world.lineage()
    run = world.start(storage, saved, ranks=2)
    _train(run, world.rng, 15)
    assert run.publish()
    checkpoint = run.save()
    _train(run, world.rng, 5)
    assert run.publish()
    run.stop()
    successor = world.start(storage, checkpoint, ranks=ranks)
    assert not successor.is_served(storage)
    _train(successor, np.random.default_rng(99), 1)
    assert successor.publish()
    assert successor.is_served(storage)


def test_a_run_without_a_checkpoint_takes_up_all_releases(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    for _ in range(3):
        run.train(world.rng)
        run.publish()
    run.stop()
    successor = world.start(storage, saved)
    assert successor.publish()
    assert successor.is_served(storage)
    assert world.fold(storage).step == 0


def test_releases_that_the_checkpoint_knows_of_are_not_taken_up(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.train(world.rng)
    run.publish()
    checkpoint = run.save()
    run.stop()
    successor = world.start(storage, checkpoint)
    assert all(touched.count() == 0 for touched in successor.touched)
    assert successor.publish()
    assert successor.publishers[0].newest.segments == []


def test_a_cut_in_flight_at_the_checkpoint_may_end_either_way(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.train(world.rng)
    run.cut()
    checkpoint = run.save()
    run.settle()
    run.stop()
    assert world.fold(storage).sequence == 2
    successor = world.start(storage, checkpoint)
    assert successor.publish()
    assert successor.is_served(storage)


def test_keys_that_the_trainer_no_longer_has_become_deletes_until_a_release_holds_them(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.change("pooled/user", np.array([0, 30, 40]), world.rng)
    run.publish()
    run.stop()
    smaller = [TableSpec(name="pooled/user", num_embeddings=30, embedding_dim=3), world.tables[1]]
    successor = world.start(storage, saved, tables=smaller, settings=PublishSettings(part_timeout_s=0.05))
    successor.cut(ranks=[0])
    successor.publishers[0].drain(deadline_s=10)
    successor.publishers[1].cut(successor.moment(1))
    assert not successor.settle()
    assert successor.publish()
    newest = successor.publishers[0].newest
    deleted = read_arrays(storage, newest.files[0].key)["pooled/user/deleted"]
    assert deleted.tolist() == [30, 40]
    served = world.fold(storage).tables["pooled/user"]
    assert np.array_equal(served[:30], successor.tables["pooled/user"])
    assert not served[[30, 40]].any()
    assert successor.publish()
    assert successor.publishers[0].newest.segments == []


def test_a_release_whose_segment_is_damaged_stops_the_opening(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.train(world.rng)
    run.publish()
    run.stop()
    key = run.publishers[0].newest.files[0].key
    data = bytearray(storage.objects[key])
    data[-1] ^= 1
    storage.objects[key] = bytes(data)
    with pytest.raises(CorruptError, match="SHA-256"):
        world.start(storage, saved)
    del storage.objects[key]
    with pytest.raises(CorruptError, match="isn't there"):
        world.start(storage, saved)


def test_the_first_release_of_a_term_changes_nothing(world):
    storage, saved = world.lineage()
    world.start(storage, saved)
    served = world.fold(storage)
    assert served.equals(saved.tables, saved.dense)
    (first,) = world.releases(storage)
    assert (first.sequence, first.term, first.cut, first.step, first.examples, first.watermark) == (1, 1, 0, 0, 700, 50.0)


def _train(run, rng, steps):
    for _ in range(steps):
        run.train(rng)


EVENTS = ["train", "publish", "reject", "checkpoint", "crash", "crash_in_flight", "race", "zombie"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=25),
    seed=st.integers(0, 2**32 - 1),
    ranks=st.lists(st.integers(1, 3), min_size=26, max_size=26),
)
def test_any_story_ends_with_served_rows_equal_to_the_trainers(new_world, events, seed, ranks):
    """Whatever happened: readers can always follow, a committed cut leaves exactly the trainer's rows, and zombies are shut out."""
    world = new_world()
    rng = np.random.default_rng(seed)
    storage, saved = world.lineage()

    def start(count: int, store=None):
        return world.start([store or world.interrupted(storage), *[storage] * (count - 1)], saved, ranks=count)

    try:
        run = start(ranks[-1])
        replaced = []
        for event, count in zip(events, ranks, strict=False):
            match event:
                case "train":
                    run.train(rng)
                case "publish":
                    assert run.publish()
                    assert run.is_served(storage)
                case "reject":
                    _publish_a_nan(run)
                case "checkpoint":
                    saved = run.save()
                case "crash" | "crash_in_flight":
                    if event == "crash_in_flight":
                        run.cut()
                        run.publishers[0].drain(deadline_s=10)
                    replaced.append(run)
                    run = start(count)
                case "race":
                    run.train(rng)
                    replaced.append(run)
                    run = _replaced_while_it_commits(world, storage, run, lambda store, count=count: start(count, store))
                case "zombie" if replaced:
                    _publish_in_vain(replaced.pop(), rng)
            world.fold(storage)
        assert run.publish()
        assert run.is_served(storage)
    finally:
        world.stop()


def _publish_a_nan(run):
    """The gate rejects the cut."""
    kept = run.dense["top.weight"].clone()
    run.dense["top.weight"].fill_(np.nan)
    assert not run.publish()
    run.dense["top.weight"].copy_(kept)


def _replaced_while_it_commits(world, storage, run, start):
    """`run` found no newer term and is about to commit when its successor opens one; it commits just before the successor does."""
    at_commit, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        at_commit.set()
        assert go_on.wait(10)

    def let_it_commit() -> None:
        go_on.set()
        run.publishers[0].drain(deadline_s=10)
        assert run.publishers[0].settled[1]

    run.writers_storage.arm("create", "releases/", wait)
    run.cut()
    assert at_commit.wait(10)
    return start(world.interrupted(storage, "create", "releases/", let_it_commit))


def _publish_in_vain(zombie, rng):
    """It doesn't know that it has been replaced: it trains on and tries to release, whether or not a cut is under way."""
    zombie.train(rng)
    if zombie.under_way:
        zombie.settle()
    zombie.cut()
    with pytest.raises(FencedError):
        zombie.publishers[0].drain(deadline_s=10)
