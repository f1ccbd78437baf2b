"""Incremental checkpoints (D12): a chain gives the very state of its step, and no crash leaves one that can't be restored."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.line import Line, assert_restores, trained
from tests.checkpoint.ranks import TABLES, empty_shards
from tidemill.checkpoint.discovery import checkpoint_keys, latest_checkpoint, list_checkpoints, read_checkpoint, whole_checkpoint
from tidemill.checkpoint.restore import read_table, restore_tables
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import CorruptError, FencedError
from tidemill.lineage.terms import open_term
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash

MANY = 400
"""More operations than any story here takes."""


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def newest(storage) -> CheckpointManifest:
    found = latest_checkpoint(storage)
    assert found is not None
    return found[1]


def assert_all_restore(storage) -> set[int]:
    """Every checkpoint that has a manifest gives the tables of its step; the steps."""
    found = list_checkpoints(storage)
    steps = set()
    for key in checkpoint_keys(found).values():
        manifest = whole_checkpoint(storage, key, found)
        assert manifest is not None, key
        assert_restores(storage, manifest)
        steps.add(manifest.step)
    return steps


@pytest.mark.parametrize("restoring", [1, 2, 3])
@pytest.mark.parametrize("saving", [1, 2, 3])
def test_a_chain_comes_back_bit_for_bit_on_any_number_of_ranks(storage, saving, restoring):
    line = Line(storage, saving, fold_after=100)
    line.train_and_save(4)
    line.close()
    manifest = newest(storage)
    assert (manifest.step, manifest.increments) == (4, 3)
    assert_restores(storage, manifest, restoring)
    assert assert_all_restore(storage) == {1, 2, 3, 4}
    (whole,) = [shard for shard in trained(4) if shard.table == TABLES[0].name]
    assert (read_table(storage, manifest, TABLES[0].name) == whole.weight.numpy()).all()


def test_an_increment_holds_touched_rows_alone(storage):
    line = Line(storage, fold_after=100)
    line.train_and_save(3)
    line.close()
    manifest = newest(storage)
    own = [file for file in manifest.table_files if file.file.key.startswith(layout.checkpoint(3) + "/")]
    assert [(file.table, file.subset) for file in own] == [(TABLES[0].name, True)], "step 3 leaves the other table alone"
    full = [file for file in manifest.table_files if not file.subset]
    assert {file.file.key.partition("/")[0] for file in full} == {layout.checkpoint(1)}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_another_run_goes_on_with_the_chain_on_another_number_of_ranks(storage, before, after):
    first = Line(storage, before, fold_after=100)
    first.train_and_save(3)
    first.close()
    second = Line(storage, after, term=2, fold_after=100)
    assert second.step == 3
    second.train_and_save(2)
    second.close()
    manifest = newest(storage)
    assert (manifest.step, manifest.term, manifest.increments) == (5, 2, 4)
    assert_restores(storage, manifest, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fold_takes_the_place_of_its_chain(storage, world_size):
    line = Line(storage, world_size, fold_after=2)
    line.train_and_save(3)
    line.finish_fold()
    line.train_and_save(1)
    manifest = newest(storage)
    assert manifest.increments == 1, "the one since the fold"
    full = [file.file.key for file in manifest.table_files if not file.subset]
    assert full
    assert all("/fold/" in key and key.startswith(layout.checkpoint(3)) for key in full)
    assert_restores(storage, manifest)
    line.train_and_save(4)
    line.finish_fold()
    line.train_and_save(1)
    line.close()
    assert newest(storage).increments < 4
    assert_all_restore(storage)


def test_increments_go_on_while_a_fold_is_slow(storage):
    """The fold of step 3 is adopted at step 6: what was saved meanwhile stays behind it."""
    line = Line(storage, fold_after=2)
    line.train_and_save(3)
    line.finish_fold()
    part = "model.ckpt-3/00000001/000000/fold/part-00000.json"
    held_back = storage.read(part)
    storage.delete(part)
    line.train_and_save(1)
    assert newest(storage).increments == 3
    storage.write(part, held_back)
    line.train_and_save(1)
    line.close()
    manifest = newest(storage)
    assert (manifest.step, manifest.increments) == (5, 2)
    assert_all_restore(storage)


def test_what_a_chain_is_made_of_is_not_called_unfinished(storage, caplog):
    line = Line(storage, fold_after=9, keep=1)
    line.train_and_save(4)
    line.close()
    assert set(checkpoint_keys(list_checkpoints(storage))) == {(1, 4, 0)}, "the others' files are there without their manifests"
    storage.write(f"{layout.checkpoint(9)}/00000001/000001/part-00000.json", b"torn")
    newest(storage)
    assert [record.args[0] for record in caplog.records if "was never finished" in record.getMessage()] == [
        f"{storage.url}/model.ckpt-9 has no manifest: its save was never finished, or it isn't one of ours"
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_retention_keeps_what_a_kept_checkpoint_needs_and_no_more(storage, world_size):
    line = Line(storage, world_size, fold_after=3, keep=1)
    for _ in range(14):
        line.train_and_save()
        line.finish_fold()
        assert assert_all_restore(storage) == {line.step}
    line.close()
    manifest = newest(storage)
    listed = {entry.key for entry in manifest.all_files}
    unlisted = {key for key in list_checkpoints(storage) if key not in listed and not key.startswith(layout.checkpoint(14) + "/")}
    # The fold that is pending isn't listed yet.
    assert all("/fold/" in key for key in unlisted)
    assert layout.checkpoint(1) not in {key.partition("/")[0] for key in listed}, "folded away"


def test_after_a_save_that_failed_the_next_one_is_full(storage):
    faulty = FaultyStorage(storage)
    line = Line(faulty, fold_after=100)
    line.train_and_save(2)
    line.train()
    faulty.fail_at(*range(faulty.num_operations + 1, faulty.num_operations + 40))
    assert not line.save()
    assert newest(storage).step == 2
    while faulty.num_operations < MANY:
        line.train()
        if line.save():
            break
    line.train_and_save()
    line.close()
    manifest = newest(storage)
    assert manifest.increments == 1
    assert assert_all_restore(storage) == {1, 2, line.step - 1, line.step}


def test_a_file_of_the_chain_that_is_gone_makes_the_next_one_full(storage):
    line = Line(storage, fold_after=100)
    line.train_and_save(2)
    storage.delete(newest(storage).table_files[0].file.key)
    line.train()
    assert not line.save(), "it could never be restored"
    line.train_and_save(2)
    line.close()
    assert newest(storage).increments == 1
    assert_restores(storage, newest(storage))


def test_a_damaged_file_of_the_chain_is_found_by_the_fold(storage):
    faulty = FaultyStorage(storage)
    line = Line(faulty, 2, fold_after=2)
    line.train_and_save(2)
    faulty.flip_byte(newest(storage).table_files[-1].file.key, -1)
    line.train_and_save(1)
    line.finish_fold()
    line.train()
    assert not line.save(), "one of the ranks has seen it"
    line.train_and_save(2)
    line.close()
    assert newest(storage).increments == 1
    assert_restores(faulty, newest(storage), 2)


def test_a_checkpoint_that_shares_the_damaged_file_of_a_chain_is_not_offered(storage, tmp_path):
    """DCL 9.14: all increments of a chain list its full shards."""
    line = Line(storage, fold_after=9)
    line.train_and_save(3)
    line.close()
    manifest = newest(storage)
    assert manifest.increments == 2
    for number, offered in ((0, "no checkpoint before it"), (-1, "model.ckpt-2: give it")):
        path = tmp_path / manifest.table_files[number].file.key
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptError, match=offered) as caught:
            restore_tables(storage, manifest, empty_shards(0, 1), tables=TABLES)
        assert manifest.table_files[number].file.key in str(caught.value)
        path.write_bytes(data)


def story(storage, world_size: int) -> None:
    """Full, increments, a fold that is adopted, retention."""
    line = Line(storage, world_size, fold_after=2, keep=2)
    try:
        for _ in range(5):
            line.train()
            line.save()
            line.finish_fold()
    finally:
        line.close()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dying_at_any_operation_of_increment_and_fold_leaves_a_checkpoint_to_go_on_from(tmp_path, world_size):
    """DCL 9.14."""
    steps = []
    for k in itertools.count(1):
        assert k < MANY
        storage = LocalStorage(tmp_path / str(k))
        faulty = FaultyStorage(storage)
        faulty.crash_at(k)
        done = True
        try:
            story(faulty, world_size)
        except SimulatedCrash:
            done = False
        found = latest_checkpoint(storage)
        if found is not None:
            assert_restores(storage, found[1])
        steps.append(found[1].step if found else 0)
        after = Line(storage, 1, term=2, fold_after=2, keep=1)
        assert after.step == steps[-1]
        for _ in range(5):
            after.train_and_save()
            after.finish_fold()
        after.close()
        assert assert_all_restore(storage) == {after.step}
        left = {key.split("/")[1] for key in list_checkpoints(storage)}
        assert left <= {"00000002", "manifest-00000002.json"}, "what the dead run left goes"
        if done:
            break
    # With two ranks the same number isn't the same operation each time.
    assert world_size > 1 or steps == sorted(steps)
    assert set(steps) == set(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before it happens", "after it happened"])
def test_a_store_that_fails_at_any_operation_stops_nothing(tmp_path, after):
    # The first operation looks for what to start from.
    for k in itertools.count(2):
        assert k < MANY
        storage = LocalStorage(tmp_path / str(k))
        faulty = FaultyStorage(storage)
        (faulty.fail_after if after else faulty.fail_at)(k)
        story(faulty, 1)
        assert_all_restore(storage)
        assert newest(storage).step >= 4
        if faulty.num_operations < k:
            break


def test_the_newest_of_a_step_is_found_with_its_chain(storage):
    line = Line(storage, fold_after=100)
    line.train_and_save(3)
    line.close()
    assert_restores(storage, read_checkpoint(storage, 2)[1])


def test_a_run_that_was_replaced_deletes_nothing_that_its_successor_builds_on(storage):
    open_term(storage, run_id="run-1", nonce="m")
    old = Line(storage, fold_after=2, keep=1)
    old.train_and_save(4)
    old.finish_fold()
    term = open_term(storage, run_id="run-2", nonce="n")
    new = Line(storage, 2, term=term, fold_after=2, keep=1)
    old.train()
    with pytest.raises(FencedError):
        old.save()
    old.close()
    new.train_and_save(2)
    assert assert_all_restore(storage) == {6}
    new.close()


SAVE, FAIL, FOLD, RESTART = "save", "fail", "fold", "restart"
moves = st.one_of(
    st.tuples(st.just(SAVE), st.integers(0, 2)),
    st.tuples(st.just(SAVE), st.integers(0, 2)),
    st.tuples(st.just(FAIL), st.integers(1, 25)),
    st.tuples(st.just(FOLD), st.just(0)),
    st.tuples(st.just(RESTART), st.integers(1, 3)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(moves, min_size=1, max_size=10), st.integers(1, 3), st.integers(0, 2))
def test_whatever_happens_the_newest_checkpoint_gives_the_state_of_its_step(story, fold_after, keep):
    """Saves after any number of steps, failures of the store, folds that are slow, other numbers of ranks; in any order."""
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(folder)
        faulty = FaultyStorage(storage)
        term, world_size = 1, 1
        line = Line(faulty, fold_after=fold_after, keep=keep)
        try:
            for move, number in story:
                if move == RESTART:
                    line.close()
                    line.finish_fold()
                    term, world_size = term + 1, number
                    # A failure that nobody met must not hit the start: that isn't told here.
                    faulty = FaultyStorage(storage)
                    line = Line(faulty, world_size, term=term, fold_after=fold_after, keep=keep)
                elif move == FOLD:
                    line.finish_fold()
                else:
                    line.train(number if move == SAVE else 1)
                    if move == FAIL:
                        faulty.fail_at(faulty.num_operations + number)
                    if line.step and line.step != line.saved:
                        line.save()
                found = latest_checkpoint(storage)
                if found is not None:
                    assert_restores(storage, found[1], 2)
        finally:
            line.close()
            line.finish_fold()


@pytest.mark.slow
def test_killed_at_random_moments_the_newest_chain_is_always_whole(tmp_path):
    """DCL 9.14, with SIGKILL on a process that saves increments and folds without pause."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.killed_line", str(tmp_path), "20"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0
    steps = [int(line) for line in output.split()]
    assert len(steps) == 20
    assert steps == sorted(steps)
    assert steps[-1] > 3, "saves got through between the kills"
