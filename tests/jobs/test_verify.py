from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tidemill.checkpoint.discovery import read_checkpoint, read_rank_states
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import FileEntry
from tidemill.contracts.release import ReleaseManifest
from tidemill.errors import CheckpointError
from tidemill.jobs.verify import Difference, same_moment, verify
from tidemill.storage.arrays import read_arrays, write_arrays
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.shards import read_shards, write_shards


def change_row(lineage: Path, step: int, table: str, row: int) -> None:
    """Make one weight of a checkpoint's row differ in its last bit."""
    storage = LocalStorage(lineage)
    key, manifest = read_checkpoint(storage, step)
    file = next(file for file in manifest.table_files if file.table == table)
    (shard,) = read_shards(storage, file.file.key)
    weight = shard.tensors["weight"].copy()
    weight.view(np.int32)[row, 0] ^= 1
    shard.tensors["weight"] = weight
    replace(storage, key, manifest, file.file, write_shards(storage, file.file.key + ".changed", [shard]))


def replace(storage: LocalStorage, key: str, manifest: CheckpointManifest, old: FileEntry, new: object) -> None:
    entry = FileEntry(key=new.key, size=new.size, sha256=new.sha256)  # type: ignore[attr-defined]
    text = manifest.model_dump_json()
    for name in ("key", "sha256"):
        text = text.replace(getattr(old, name), getattr(entry, name))
    changed = CheckpointManifest.model_validate_json(text.replace(f'"size":{old.size},', f'"size":{entry.size},'))
    storage.write(key, changed.to_bytes())


def test_a_run_that_ended_well_serves_exactly_what_it_trained(life) -> None:
    found = verify(str(life.lineage))
    assert found.is_equal
    assert (found.checkpoint_step, found.checkpoint_term, found.step, found.term) == (14, 3, 14, 3)
    assert found.keys_compared == 2 * 64
    assert found.keys_excluded == 0
    assert found.dense_compared > 0
    assert found.differences == ()
    assert "all rows and all dense weights" in found.scope()


def test_an_older_checkpoint_is_compared_with_what_was_served_then(life) -> None:
    found = verify(str(life.lineage), step=4)
    assert found.is_equal
    assert (found.checkpoint_term, found.step) == (1, 4)
    # Run 3 went on from it: what it released before its first step, if it came to that, is of the same moment, and newer.
    storage = LocalStorage(life.lineage)
    keys = [info.key for info in storage.list("releases/")]
    releases = [ReleaseManifest.parse(storage.read(key), where=key) for key in keys]
    at_once = any(release.term == 3 and release.cut > 0 and release.step == 4 for release in releases)
    assert found.term == (3 if at_once else 1)
    assert found.dense_compared > 0


def test_without_a_release_of_its_step_a_checkpoint_vouches_for_rows_not_touched_since(lineage: Path) -> None:
    final = read_releases(lineage)[-1]
    (lineage / layout.release(final.sequence)).unlink()
    found = verify(str(lineage))
    assert found.is_equal
    assert found.sequence < final.sequence
    assert found.keys_excluded > 0
    assert found.keys_compared > 0
    assert found.keys_compared + found.keys_excluded == 2 * 64
    assert found.dense_compared == 0
    assert f"{found.keys_excluded} rows touched in between" in found.scope()


def test_a_row_that_was_not_touched_must_be_equal_even_without_a_release_of_its_step(lineage: Path) -> None:
    (lineage / layout.release(read_releases(lineage)[-1].sequence)).unlink()
    _, manifest = read_checkpoint(LocalStorage(lineage), 14)
    touched = read_rank_states(LocalStorage(lineage), manifest)[0]["touched"]["pooled/user_id_emb"]
    untouched = min(set(range(64)) - set(touched.tolist()))
    change_row(lineage, 14, "pooled/user_id_emb", untouched)
    change_row(lineage, 14, "pooled/item_id_emb", 0)
    assert Difference("pooled/user_id_emb", untouched) in verify(str(lineage)).differences


def test_only_a_cut_of_the_checkpoints_own_run_is_of_the_same_moment(life) -> None:
    """Steps are counted anew after a crash, and a term's opening release repeats what was served before."""
    _, manifest = read_checkpoint(LocalStorage(life.lineage), 14)
    own = read_releases(life.lineage)[-1]
    assert same_moment(manifest, [own]) == own
    for change in ({"run_id": "another"}, {"cut": 0}, {"step": 13}):
        assert same_moment(manifest, [own.model_copy(update=change)]) is None
    later = own.model_copy(update={"sequence": own.sequence + 1, "run_id": "later", "term": own.term + 1})
    assert same_moment(manifest, [own, later]) == own
    assert same_moment(manifest, [own, later], {"later"}) == later, "cut by a run that had gone on from it, before its first step"
    assert same_moment(manifest, [own, own.model_copy(update={"sequence": own.sequence + 1, "cut": 0})]) == own


def read_releases(lineage: Path) -> list[ReleaseManifest]:
    return [ReleaseManifest.parse(path.read_bytes(), where=str(path)) for path in sorted(lineage.glob("releases/*.json"))]


def test_a_single_bit_is_a_difference_and_is_named(lineage: Path) -> None:
    change_row(lineage, 14, "pooled/item_id_emb", 17)
    found = verify(str(lineage))
    assert found.keys_different == 1
    assert not found.is_equal
    assert found.differences == (Difference("pooled/item_id_emb", 17),)
    assert str(found.differences[0]) == "table pooled/item_id_emb, id 17"


def test_dense_weights_are_compared_byte_for_byte(lineage: Path) -> None:
    storage = LocalStorage(lineage)
    key, manifest = read_checkpoint(storage, 14)
    old = manifest.files["dense"]
    arrays = {name: np.array(array) for name, array in read_arrays(storage, old.key).items()}
    name = sorted(arrays)[0]
    arrays[name].reshape(-1).view(np.int32)[0] ^= 1
    replace(storage, key, manifest, old, write_arrays(storage, old.key + ".changed", arrays))
    found = verify(str(lineage))
    assert (found.keys_different, found.dense_different) == (0, 1)
    assert found.differences == (Difference(name, None),)


def test_a_folder_without_a_checkpoint_is_an_error_that_names_it(lineage: Path) -> None:
    for folder in lineage.glob("model.ckpt-*"):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        verify(str(lineage))


def test_a_daily_checkpoint_has_nothing_to_be_compared_with(life) -> None:
    with pytest.raises(CheckpointError, match="isn't of a run that publishes releases"):
        verify(str(life.daily))
