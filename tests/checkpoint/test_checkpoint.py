"""Checkpoints: what is saved comes back bit for bit, whatever the number of ranks, and only from a whole checkpoint."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.checkpoint.ranks import TABLES, Ranks, ShortWaits, assert_tables_of, capture_of, empty_shards, fill, shard
from tidemill.checkpoint.capture import Staging
from tidemill.checkpoint.discovery import (
    latest_checkpoint,
    read_arrays_of,
    read_checkpoint,
    read_dataloader_state,
    read_pipeline,
    read_rank_states,
)
from tidemill.checkpoint.restore import read_table, restore_tables
from tidemill.contracts import layout
from tidemill.contracts.files import TableSpec
from tidemill.errors import CheckpointError, CorruptError, FencedError
from tidemill.lineage.terms import open_term
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def saved(storage, step=5, world_size=1, **options):
    """The manifest of a fresh save."""
    ranks = Ranks(storage, world_size, **options)
    try:
        assert ranks.save(step)
    finally:
        ranks.close()
    return read_checkpoint(storage, step)[1]


@pytest.mark.parametrize("restoring", [1, 2, 3])
@pytest.mark.parametrize("saving", [1, 2, 3])
def test_tables_and_optimizer_come_back_bit_for_bit_on_any_number_of_ranks(storage, saving, restoring):
    manifest = saved(storage, 5, saving)
    assert manifest.world_size == saving
    assert_tables_of(storage, manifest, 5, restoring)


def test_everything_else_comes_back_too(storage):
    manifest = saved(storage, 5, 2, pipeline="model_dir: x")
    assert (manifest.step, manifest.term, manifest.examples, manifest.watermark) == (5, 1, 50, 1.7e9 + 5)
    assert manifest.state == {"passes_completed": 1, "schedule": {"steps": 5}}
    assert np.array_equal(read_arrays_of(storage, manifest, "dense")["layer.weight"], np.full((2, 2), 5, np.float32))
    assert np.array_equal(
        read_arrays_of(storage, manifest, "dense_optimizer")["layer.weight/exp_avg"], np.full((2, 2), -5, np.float32)
    )
    assert storage.read(manifest.files["pipeline"].key) == b"model_dir: x"
    state = read_dataloader_state(storage, manifest)
    assert (state.passes_completed, state.watermark) == (1, 1.7e9 + 5)
    assert [(split.split, split.intervals) for split in state.splits] == [("part-0", [(0, 5)]), ("part-1", [(0, 5)])]


def test_rank_states_come_back_in_rank_order_arrays_and_values(storage):
    manifest = saved(storage, 5, 3)
    states = read_rank_states(storage, manifest)
    assert [state["feed"]["nested"] for state in states] == [{"of": [rank, None, "x"]} for rank in range(3)]
    for rank, state in enumerate(states):
        assert state.keys() == {"feed", "random"}
        assert np.array_equal(state["feed"]["marks"], np.arange(rank + 2))
        assert state["feed"]["marks"].dtype == np.int64
        assert state["random"]["torch"].tolist() == [rank] * 3


def test_what_training_changes_after_the_capture_is_not_saved(storage):
    ranks = Ranks(storage)
    number = ranks.begin(5)
    for one in ranks.shards[0]:
        one.weight.add_(1.0)
        one.optimizer["momentum1"].zero_()
    ranks.wait()
    ranks.close()
    assert ranks.managers[0].settled == (number, True)
    assert_tables_of(storage, read_checkpoint(storage, 5)[1], 5)


def test_staging_copies_into_the_same_memory_each_time():
    staging, shards = Staging(), empty_shards(0, 1)
    first = staging.copy(shards)[0].weight
    fill(shards, 3)
    second = staging.copy(shards)[0].weight
    assert np.shares_memory(first, second)
    assert np.array_equal(second, shards[0].weight.numpy())


def test_all_rows_of_a_table_can_be_read_alone(storage):
    manifest = saved(storage, 5, 3)
    whole = empty_shards(0, 1)
    fill(whole, 5)
    assert np.array_equal(read_table(storage, manifest, "pooled/user"), whole[0].weight.numpy())
    assert np.array_equal(read_table(storage, manifest, "pooled/user", "momentum1"), whole[0].optimizer["momentum1"].numpy())
    with pytest.raises(CheckpointError, match="no table 'pooled/ad'"):
        read_table(storage, manifest, "pooled/ad")


def test_the_newest_is_by_term_and_then_step(storage):
    assert latest_checkpoint(storage) is None
    for term, step in [(1, 10), (1, 20), (2, 15)]:
        saved(storage, step, term=term)
    assert latest_checkpoint(storage)[0] == layout.checkpoint_manifest(15, 2)
    assert read_checkpoint(storage, 20)[1].term == 1
    saved(storage, 20, term=2)
    assert read_checkpoint(storage, 20)[1].term == 2
    with pytest.raises(CheckpointError, match="step 7"):
        read_checkpoint(storage, 7)


def test_damaged_ones_without_a_whole_one_are_refused(storage):
    for step in (5, 10):
        storage.delete(saved(storage, step).table_files[0].file.key)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-10, model\.ckpt-5: saved, but damaged"):
        latest_checkpoint(storage)


def test_what_is_not_whole_is_skipped_by_name(storage, tmp_path, caplog):
    """DCL 9.14. DCL 9.14: an empty folder, a suffix that is no number, torn manifests and files."""
    saved(storage, 10)
    (tmp_path / "model.ckpt-999").mkdir()
    storage.write("model.ckpt-best/weights.bin", b"x")
    storage.write("model.ckpt-800/00000001/000001/part-00000.json", b"{}")
    storage.write(layout.checkpoint_manifest(700, 1), b"{ torn")
    storage.write(layout.checkpoint_manifest(600, 1), storage.read(layout.checkpoint_manifest(10, 1)))
    lacking = saved(storage, 500)
    storage.delete(lacking.table_files[0].file.key)
    shortened = saved(storage, 400)
    storage.write(shortened.files["dense"].key, b"short")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(storage)[1].step == 10
    for name in ["model.ckpt-best", "model.ckpt-800", "model.ckpt-700", "model.ckpt-600", lacking.table_files[0].file.key]:
        assert name in caplog.text
    assert shortened.files["dense"].key in caplog.text


def test_a_checkpoint_below_a_folder_named_like_one_is_no_trouble(tmp_path):
    """DCL 9.14. DCL 9.14."""
    nested = LocalStorage(tmp_path / "model.ckpt-3" / "run")
    saved(nested, 5)
    assert latest_checkpoint(nested)[1].step == 5
    assert latest_checkpoint(LocalStorage(tmp_path)) is None


def flip(storage, key):
    data = bytearray(storage.read(key))
    data[-1] ^= 1
    storage.write(key, bytes(data))


def test_a_flipped_bit_anywhere_is_found_its_file_and_the_newest_whole_one_before_it_named(storage):
    """DCL 9.14: over each kind of file; an older one that is damaged too is passed over."""
    for step in (3, 4, 5):
        manifest = saved(storage, step, 2, pipeline="model_dir: x")
    flip(storage, read_checkpoint(storage, 4)[1].files["dense_optimizer"].key)
    lost = ", ".join(layout.checkpoint_manifest(step, 1) for step in (5, 4))
    for entry in manifest.all_files:
        before = storage.read(entry.key)
        flip(storage, entry.key)
        with pytest.raises(CorruptError) as caught:
            _read_all(storage, manifest)
        storage.write(entry.key, before)
        text = str(caught.value)
        assert entry.key in text
        assert f"{storage.url}/model.ckpt-3: give it as --checkpoint_path" in text
        assert text.count("before it that is whole") == 1
        assert "train_config.fine_tune_checkpoint" in text
        assert f"move {lost} out" in text
    _read_all(storage, manifest)


def test_what_the_error_advises_works(storage, tmp_path):
    for step in (4, 5):
        manifest = saved(storage, step)
    flip(storage, manifest.files["dense"].key)
    with pytest.raises(CorruptError, match=r"move model\.ckpt-5/manifest-00000001\.json out of the folder"):
        read_arrays_of(storage, manifest, "dense")
    (tmp_path / layout.checkpoint_manifest(5, 1)).rename(tmp_path / "aside.json")
    _, older = latest_checkpoint(storage)
    assert older.step == 4
    assert_tables_of(storage, older, 4)
    assert_tables_of(storage, saved(storage, 5, term=2), 5)


def test_without_an_older_whole_one_the_error_says_so(storage):
    """Neither a newer one, nor another save at the same step that a path couldn't name, is offered."""
    ranks = Ranks(storage)
    assert all(ranks.save(step) for step in (5, 5, 6))
    ranks.close()
    manifest = read_checkpoint(storage, 5)[1]
    flip(storage, manifest.files["dense"].key)
    with pytest.raises(CorruptError, match=r"no checkpoint before it in file:.* is whole: put the damaged file back"):
        read_arrays_of(storage, manifest, "dense")


def test_of_a_damaged_one_below_a_newer_one_no_manifest_is_to_be_moved(storage):
    for step in (4, 5, 6):
        saved(storage, step)
    manifest = read_checkpoint(storage, 5)[1]
    flip(storage, manifest.files["dense"].key)
    with pytest.raises(CorruptError, match=r"model\.ckpt-4: give it") as caught:
        read_arrays_of(storage, manifest, "dense")
    assert "move" not in str(caught.value)


def test_a_step_whose_manifest_is_damaged_is_refused_with_the_newest_whole_one_before_it(storage):
    for step in (4, 5):
        saved(storage, step)
    storage.write(layout.checkpoint_manifest(5, 1), b"{ torn")
    with pytest.raises(CheckpointError, match=r"of step 5 .*model\.ckpt-4: give it as --checkpoint_path"):
        read_checkpoint(storage, 5)


def test_a_store_that_fails_while_older_ones_are_looked_for_leaves_the_error_as_it_is(storage):
    manifest = saved(storage, 5)
    flip(storage, manifest.files["dense"].key)
    faulty = FaultyStorage(storage)
    faulty.fail_at(2)
    with pytest.raises(CorruptError, match=r"dense\.safetensors.*can't be told"):
        read_arrays_of(faulty, manifest, "dense")


def test_a_changed_digit_in_the_dataloader_state_is_found(storage):
    manifest = saved(storage, 5)
    entry = manifest.files["dataloader_state"]
    storage.write(entry.key, storage.read(entry.key).replace(b'"passes_completed": 1', b'"passes_completed": 2'))
    with pytest.raises(CorruptError, match=layout.DATALOADER_STATE):
        read_dataloader_state(storage, manifest)


def _read_all(storage, manifest):
    for rank in range(2):
        restore_tables(storage, manifest, empty_shards(rank, 2))
    read_arrays_of(storage, manifest, "dense")
    read_arrays_of(storage, manifest, "dense_optimizer")
    read_dataloader_state(storage, manifest)
    read_rank_states(storage, manifest)
    read_pipeline(storage, manifest)


def test_a_model_that_does_not_fit_is_refused_by_name(storage):
    manifest = saved(storage, 5)
    user = TABLES[0]

    def restore(spec, stop, **changes):
        one = shard(spec, 0, stop)
        if changes:
            one.optimizer.clear()
            one.optimizer.update(changes)
        restore_tables(storage, manifest, [one], tables=[spec])

    with pytest.raises(CheckpointError, match="no table 'pooled/ad'"):
        restore(TableSpec(name="pooled/ad", num_embeddings=5, embedding_dim=4), 5)
    with pytest.raises(CheckpointError, match=r"11 x 4 in the checkpoint, the model wants rows to 11 x 8"):
        restore(user.model_copy(update={"embedding_dim": 8}), 11)
    with pytest.raises(CheckpointError, match="11 rows in the checkpoint, 12 in the model"):
        restore(user.model_copy(update={"num_embeddings": 12}), 6)
    with pytest.raises(CheckpointError, match="11 rows in the checkpoint, 9 in the model"):
        restore(user.model_copy(update={"num_embeddings": 9}), 9)
    with pytest.raises(CheckpointError, match="no momentum3 of table 'pooled/user'"):
        restore(user, 11, momentum3=torch.zeros(11))
    with pytest.raises(CheckpointError, match="momentum1 of table 'pooled/user' is"):
        restore(user, 11, momentum1=torch.zeros(11, 4))


def test_a_model_without_optimizer_state_restores_weights_alone(storage):
    manifest = saved(storage, 5)
    (user, _), wanted = empty_shards(0, 1), empty_shards(0, 1)[0]
    fill([wanted], 5)
    restore_tables(storage, manifest, [user], optimizer=False)
    assert torch.equal(user.weight, wanted.weight)
    assert not user.optimizer["momentum1"].any()


def test_a_fenced_run_commits_nothing_more_and_says_so(storage):
    assert open_term(storage, run_id="old", nonce="a") == 1
    ranks = Ranks(storage)
    assert ranks.save(5)
    assert open_term(storage, run_id="new", nonce="b") == 2
    ranks.begin(6)
    with pytest.raises(FencedError, match="term 2 has taken over from term 1"):
        ranks.wait()
    with pytest.raises(FencedError):
        ranks.managers[0].check()
    ranks.close()
    assert latest_checkpoint(storage)[1].step == 5
    assert ranks.managers[0].newest[1].step == 5


def test_the_same_step_twice_in_one_run_keeps_both_and_the_second_counts(storage):
    """Issue 4: rows may have been done with, or a pass, though no step followed."""
    ranks = Ranks(storage, 2)
    assert ranks.save(4)
    assert ranks.save(5)
    first = storage.read(layout.checkpoint_manifest(5, 1))
    files = {entry.key: storage.read(entry.key) for entry in latest_checkpoint(storage)[1].all_files}
    assert ranks.save(5)
    ranks.close()
    key, manifest = latest_checkpoint(storage)
    assert key == layout.checkpoint_manifest(5, 1, 3)
    assert ranks.managers[0].newest == (key, manifest)
    assert read_checkpoint(storage, 5) == (key, manifest)
    assert storage.read(layout.checkpoint_manifest(5, 1)) == first
    assert {name: storage.read(name) for name in files} == files, "a reader of the first one isn't disturbed"
    assert files.keys().isdisjoint(entry.key for entry in manifest.all_files)
    assert_tables_of(storage, manifest, 5)


def test_the_next_run_names_its_own_second_save_and_wins_by_its_term(storage):
    ranks = Ranks(storage)
    assert ranks.save(5)
    assert ranks.save(5)
    ranks.close()
    later = Ranks(storage, term=2)
    assert later.save(5)
    later.close()
    assert latest_checkpoint(storage)[0] == layout.checkpoint_manifest(5, 2)


def test_another_runs_checkpoint_of_the_same_term_and_step_is_never_replaced(storage):
    manifest = saved(storage, 5)
    other = manifest.model_copy(update={"run_id": "somebody else"})
    storage.write(layout.checkpoint_manifest(5, 1), other.to_bytes())
    ranks = Ranks(storage)
    assert not ranks.save(5)
    ranks.close()
    assert storage.read(layout.checkpoint_manifest(5, 1)) == other.to_bytes()
    assert latest_checkpoint(storage)[1].run_id == "somebody else"


def test_a_rank_that_never_writes_fails_the_save_and_the_next_one_works(storage):
    silent = FaultyStorage(storage)
    silent.fail_at(1, 2, 3)
    clock = ShortWaits()
    clock.rushing = True
    ranks = Ranks([storage, silent], 2, clock=clock)
    assert not ranks.save(5)
    clock.rushing = False
    assert ranks.managers[1].settled == (1, False)
    assert latest_checkpoint(storage) is None
    assert ranks.save(6)
    ranks.close()
    assert_tables_of(storage, latest_checkpoint(storage)[1], 6, 2)


def test_a_part_that_fails_once_is_written_again(storage):
    faulty = FaultyStorage(storage)
    faulty.fail_at(2)
    faulty.fail_after(5)
    ranks = Ranks([storage, faulty], 2, clock=ShortWaits())
    assert ranks.save(5)
    ranks.close()
    assert_tables_of(storage, latest_checkpoint(storage)[1], 5, 3)


def test_ranks_that_do_not_hold_every_row_are_refused(storage):
    ranks = Ranks(storage)
    capture = capture_of([shard(TABLES[0], 0, 6), *ranks.shards[0][1:]], 0, 1, 5)
    ranks.managers[0].save(capture)
    with pytest.raises(CheckpointError, match=r"'pooled/user': the ranks hold rows \[\(0, 6\)\], not \[0, 11\)"):
        ranks.wait()
    ranks.close()
    assert latest_checkpoint(storage) is None
