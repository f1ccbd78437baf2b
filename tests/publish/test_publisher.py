"""Releases: whole or not at all, in order of terms, and equal to the trainer's rows for every key."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tidemill import logs
from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.release import CurrentHint
from tidemill.errors import FencedError, LineageError, StorageError
from tidemill.publish.gate import Gate
from tidemill.publish.publisher import PublishSettings
from tidemill.publish.recovery import PublishCursor
from tidemill.storage.commit import TRIES
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash


def test_a_release_makes_served_rows_equal_the_trainers(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    for _ in range(4):
        run.train(world.rng)
        assert run.publish()
        assert run.is_served(storage)
    newest = world.releases(storage)[-1]
    assert newest == run.publishers[0].newest
    assert (newest.sequence, newest.term, newest.cut, newest.step, newest.examples) == (5, 1, 4, 4, 400)
    assert newest.watermark == 64.0
    assert [split.split for split in newest.splits] == ["clicks:0", "clicks:1"]
    assert newest.stages.newest_event_at == 1005.0
    stages = newest.stages
    assert stages.cut_at <= stages.written_at <= stages.gated_at <= stages.committed_at
    hint = CurrentHint.parse(storage.read(layout.CURRENT), where="current")
    assert (hint.sequence, hint.term, hint.checkpoint_step, hint.data_timestamp) == (5, 1, 4, 64.0)


def test_a_release_holds_exactly_the_rows_that_changed(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.publish()
    before = {table: rows.copy() for table, rows in run.tables.items()}
    run.train(world.rng)
    run.publish()
    newest = run.publishers[0].newest
    sent = {segment.table: 0 for segment in newest.segments}
    for segment in newest.segments:
        sent[segment.table] += segment.upserts
    assert sent == {table: int((before[table] != rows).any(axis=1).sum()) for table, rows in run.tables.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_served_does_not_depend_on_the_number_of_ranks(world, ranks):
    storage, saved = world.lineage()
    run = world.start(storage, saved, ranks=ranks)
    rng = np.random.default_rng(5)
    for _ in range(3):
        run.train(rng)
        run.publish()
    other_storage, other_saved = world.lineage()
    other = world.start(other_storage, other_saved, ranks=2)
    rng = np.random.default_rng(5)
    for _ in range(3):
        other.train(rng)
    other.publish()
    served, expected = world.fold(storage), world.fold(other_storage)
    assert run.is_served(storage)
    assert all(np.allclose(served.tables[table], rows) for table, rows in expected.tables.items())


def test_dense_weights_travel_only_if_their_bytes_changed(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.publish()
    assert run.publishers[0].newest.dense is not None
    run.change("pooled/user", np.array([3]), world.rng)
    run.publish()
    assert run.publishers[0].newest.dense is None
    run.dense["seen"] += 1
    run.publish()
    assert run.publishers[0].newest.dense is not None
    assert run.is_served(storage)


def test_an_idle_cut_moves_step_and_watermark_with_a_manifest_only(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved)
    run.train(world.rng)
    run.publish()
    run.step += 1
    assert run.publish()
    newest = run.publishers[0].newest
    assert (newest.step, newest.watermark, newest.segments, newest.files, newest.dense) == (2, 62.0, [], [], None)
    assert run.is_served(storage)


def test_rank_0_waits_for_a_slow_rank(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved, ranks=3)
    run.train(world.rng)
    number = run.cut(ranks=[0])
    assert run.cut(ranks=[2]) == run.cut(ranks=[1]) == number
    assert run.settle()
    assert run.is_served(storage)


def test_a_late_rank_fails_the_cut_and_the_next_one_holds_everything(world):
    storage, saved = world.lineage()
    run = world.start(storage, saved, settings=PublishSettings(part_timeout_s=0.05))
    run.train(world.rng)
    assert run.publish()
    run.train(world.rng)
    number = run.cut(ranks=[0])
    run.publishers[0].drain(deadline_s=10)
    assert run.publishers[0].settled == (number, False)
    assert "no part from rank 1" in run.publishers[0].counts.last_failure
    # Rank 1 comes too late with its part; nobody takes it.
    assert run.publishers[1].cut(run.moment(1)) == number
    assert not run.settle()
    assert len(world.releases(storage)) == 2
    run.train(world.rng)
    assert run.publish()
    assert run.publishers[0].newest.cut == number + 1
    assert run.is_served(storage)
    assert (run.publishers[0].counts.committed, run.publishers[0].counts.failed) == (2, 1)


def test_a_rank_that_is_still_writing_fails_the_cut_without_waiting(world):
    storage, saved = world.lineage()
    go_on = threading.Event()
    slow = world.interrupted(storage, "write", "segments/00000001/00000002/rank-00001", lambda: go_on.wait(10))
    run = world.start([storage, slow], saved, settings=PublishSettings(part_timeout_s=0.05))
    run.publish()
    try:
        run.train(world.rng)
        run.cut()
        run.publishers[0].drain(deadline_s=10)
        number, committed = run.publishers[0].settled
        assert not committed
        for publisher in run.publishers:
            publisher.on_settled(number, committed)
        assert not run.publishers[1].ready
        assert run.cut() == number + 1
    finally:
        go_on.set()
    assert not run.settle()
    assert run.publish()
    assert run.is_served(storage)


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_a_store_that_fails_does_not_stop_training(world, broken_rank):
    storage, saved = world.lineage()
    faulty = FaultyStorage(storage)
    storages = [faulty if rank == broken_rank else storage for rank in range(2)]
    run = world.start(storages, saved, settings=PublishSettings(part_timeout_s=0.2))
    run.train(world.rng)
    faulty.fail_at(faulty.num_operations + 1)
    assert not run.publish()
    run.publishers[0].check()
    run.train(world.rng)
    assert run.publish()
    assert run.is_served(storage)


def test_without_its_hint_a_release_stands(world):
    storage, saved = world.lineage()

    def fail() -> None:
        raise StorageError("no room for the hint")

    run = world.start(world.interrupted(storage, "write", layout.CURRENT, fail), saved, ranks=1)
    run.train(world.rng)
    assert run.publish()
    assert run.is_served(storage)
    assert layout.CURRENT not in storage.objects
    run.train(world.rng)
    assert run.publish()
    assert CurrentHint.parse(storage.read(layout.CURRENT), where="current").sequence == 3


def test_a_crash_at_any_operation_leaves_the_old_or_the_new_release(world):
    """And the run that follows makes served rows equal its own, whatever the crashed one got done."""
    crashes = 0
    for k in range(1, 100):
        storage, saved = world.lineage()
        faulty = FaultyStorage(storage)
        run = world.start(faulty, saved)
        run.train(world.rng)
        assert run.publish()
        checkpoint = run.save()
        old = world.fold(storage)
        run.train(world.rng)
        tables, dense = {table: rows.copy() for table, rows in run.tables.items()}, run.weights()
        faulty.crash_at(faulty.num_operations + k)
        try:
            finished = run.publish()
        except SimulatedCrash:
            crashes += 1
            finished = False
        run.stop()
        served = world.fold(storage)
        assert served.equals(tables, dense) if served.sequence > old.sequence else served.equals(old.tables, old.dense)
        successor = world.start(storage, checkpoint)
        successor.train(world.rng)
        assert successor.publish()
        assert successor.is_served(storage)
        if finished:
            break
    else:
        pytest.fail("a publication never got by without a crash")
    assert crashes >= 8


def test_a_commit_of_unknown_outcome_is_settled_by_trying_again(world):
    storage, saved = world.lineage()
    run = world.start(_silent(storage, creates=1), saved, ranks=1, clock=ManualClock())
    run.train(world.rng)
    assert run.publish()
    assert [manifest.sequence for manifest in world.releases(storage)] == [1, 2]
    assert run.is_served(storage)


def test_a_commit_that_stays_unknown_counts_as_failed_and_the_next_cut_follows_it(world):
    storage, saved = world.lineage()
    run = world.start(_silent(storage, creates=TRIES, sequence=3), saved, ranks=1, clock=ManualClock())
    run.train(world.rng)
    assert run.publish()
    run.train(world.rng)
    assert not run.publish()
    assert run.is_served(storage), "it was committed after all"
    # Back to the weights that the run knows to be committed: they aren't the ones that are served.
    run.dense["top.weight"][0, 0] -= 1
    run.change("pooled/user", np.array([1]), world.rng)
    assert run.publish()
    assert [manifest.cut for manifest in world.releases(storage)] == [0, 1, 2, 3]
    assert run.is_served(storage)


def _silent(storage, creates, sequence=2):
    """A store that creates a release, fails to say so, and is then down for the other `creates` - 1 tries."""

    class Silent(FaultyStorage):
        tries = 0

        def create(self, key, *chunks):
            if key == layout.release(sequence) and self.tries < creates:
                self.tries += 1
                fail = self.fail_after if self.tries == 1 else self.fail_at
                fail(self.num_operations + 1)
            super().create(key, *chunks)

    return Silent(storage)


def test_a_zombie_cannot_publish_once_a_newer_term_is_open(world):
    storage, saved = world.lineage()
    zombie = world.start(storage, saved)
    zombie.train(world.rng)
    assert zombie.publish()
    run = world.start(storage, saved)
    zombie.train(world.rng)
    zombie.cut()
    with pytest.raises(FencedError, match="term 2 has taken over from term 1"):
        zombie.publishers[0].drain(deadline_s=10)
    with pytest.raises(FencedError):
        zombie.publishers[0].check()
    assert run.publish()
    assert [manifest.term for manifest in world.releases(storage)] == [1, 1, 2, 2]
    assert run.is_served(storage)


def test_a_zombie_between_its_look_for_terms_and_its_commit_loses(world):
    storage, saved = world.lineage()
    successors = []
    slow = world.interrupted(storage, "create", layout.release(2), lambda: successors.append(world.start(storage, saved)))
    zombie = world.start([slow, storage], saved)
    zombie.train(world.rng)
    zombie.cut()
    with pytest.raises(FencedError, match="release 2 is of term 2"):
        zombie.publishers[0].drain(deadline_s=10)
    (run,) = successors
    assert run.publish()
    assert run.is_served(storage)


def test_a_zombies_last_commit_before_a_terms_first_is_taken_up(world):
    """It looked for terms before ours was opened, and commits after we have read the newest release."""
    storage, saved = world.lineage()
    at_commit, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        at_commit.set()
        assert go_on.wait(10)

    zombie = world.start([world.interrupted(storage, "create", layout.release(2), wait), storage], saved)
    zombie.train(world.rng)
    zombie.cut()
    assert at_commit.wait(10)

    def let_it_commit() -> None:
        go_on.set()
        zombie.publishers[0].drain(deadline_s=10)

    run = world.start([world.interrupted(storage, "create", layout.release(2), let_it_commit), storage], saved)
    assert zombie.publishers[0].settled == (1, True)
    assert [(m.sequence, m.term) for m in world.releases(storage)] == [(1, 1), (2, 1), (3, 2)]
    assert run.publish()
    assert run.is_served(storage)


def test_a_run_that_finds_another_ones_release_in_its_place_stops(world):
    """As if it had been started without shutting out earlier terms."""
    storage, saved = world.lineage()
    run = world.start(storage, saved, ranks=1)
    foreign = world.releases(storage)[0].model_copy(update={"sequence": 2, "run_id": "another", "term": 0})
    storage.create(layout.release(2), foreign.to_bytes())
    run.train(world.rng)
    run.cut()
    with pytest.raises(LineageError, match="start this run again"):
        run.publishers[0].drain(deadline_s=10)


def test_a_rejected_release_is_skipped_and_the_next_good_one_goes_out(world):
    storage, saved = world.lineage()
    scores = np.array([0.25, 0.5])
    run = world.start(storage, saved, settings=PublishSettings(gate=Gate(lambda candidate: {"probs": scores})))
    run.probe_scores = {"probs": np.array([0.25, 0.5])}
    run.train(world.rng)
    assert run.publish()
    _expect_rejection(run, "table 'pooled/user': the row of id 7 isn't finite", lambda: _spoil_row(run, 7))
    run.tables["pooled/user"][7] = 0
    _expect_rejection(run, "dense tensor 'top.weight' isn't finite", lambda: run.dense["top.weight"].fill_(np.inf))
    run.dense["top.weight"].fill_(1)
    _expect_rejection(run, "output 'probs': probe row 1 is 0.6 as served", lambda: scores.__setitem__(1, 0.6))
    scores[1] = 0.5
    _expect_rejection(run, "output 'probs': probe row 0", lambda: run.probe_scores["probs"].__setitem__(0, np.nan))
    run.probe_scores["probs"][0] = 0.25
    assert len(world.releases(storage)) == 2
    assert run.publish()
    assert run.is_served(storage)
    assert run.publishers[0].counts.failed == 4


def _spoil_row(run, row):
    run.change("pooled/user", np.array([row]), np.random.default_rng(0))
    run.tables["pooled/user"][row, 1] = np.nan


def _expect_rejection(run, reason, spoil):
    spoil()
    run.train(np.random.default_rng(2), rows=1)
    assert not run.publish()
    assert reason in run.publishers[0].counts.last_failure


def test_releases_and_failures_are_told_as_events(world, tmp_path):
    storage, saved = world.lineage()
    run = world.start(storage, saved, ranks=1)
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        run.publish()
        run.dense["top.weight"].fill_(np.nan)
        run.publish()
    finally:
        logs.send_events_to(None)
        sink.close()
    text = (tmp_path / "events.jsonl").read_text()
    assert '"event":"release.committed"' in text
    assert '"event":"release.failed"' in text


def test_a_cursor_of_another_lineage_is_ignored():
    cursor = PublishCursor("mine")
    cursor.load_state(
        [{"snapshot": "other", "sequence": 9}, {"snapshot": "mine", "sequence": 4}, {"snapshot": "mine", "sequence": 0}]
    )
    assert cursor.sequence == 4
    cursor.load_state([{"snapshot": "other", "sequence": 9}])
    assert cursor.sequence == 0
