"""Which checkpoints stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.ranks import Ranks, assert_tables_of
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.checkpoint.retention import prune, to_delete
from tidemill.contracts import layout
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage

names = st.tuples(st.integers(1, 3), st.integers(0, 20))


@given(st.sets(names), st.sets(names), st.integers(0, 5))
def test_what_goes_is_older_than_the_newest_and_not_among_the_newest_few(whole, unfinished, keep):
    found = whole | unfinished
    going = to_delete(found, whole, keep)
    left = whole - set(going)
    if keep == 0 or not whole:
        assert going == []
        return
    assert left == set(sorted(whole)[-keep:])
    assert max(whole) in left
    assert set(going) <= found
    assert all(checkpoint < max(whole) for checkpoint in going)
    assert {one for one in found if one > max(whole)}.isdisjoint(going), "it may be under way"


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def steps_left(storage) -> set[str]:
    return {info.key.partition("/")[0] for info in storage.list("model.ckpt-")}


def save_all(storage, steps, keep=0):
    ranks = Ranks(storage, 2, keep=keep)
    for step in steps:
        assert ranks.save(step)
    ranks.close()


def test_the_newest_few_stay(storage):
    save_all(storage, [1, 2, 3, 4], keep=2)
    assert steps_left(storage) == {"model.ckpt-3", "model.ckpt-4"}


def test_without_a_limit_all_stay(storage):
    save_all(storage, [1, 2, 3])
    assert steps_left(storage) == {"model.ckpt-1", "model.ckpt-2", "model.ckpt-3"}


def test_manifests_go_before_any_file(storage):
    save_all(storage, [1, 2, 3])
    watched = FaultyStorage(storage)
    prune(watched, keep=1)
    deleted = [operation.key for operation in watched.operations if operation.method == "delete"]
    assert deleted[:2] == [layout.checkpoint_manifest(1, 1), layout.checkpoint_manifest(2, 1)]
    assert len(deleted) > 10
    assert steps_left(storage) == {"model.ckpt-3"}


def test_a_torn_checkpoint_neither_counts_nor_survives(storage):
    save_all(storage, [1, 2, 3])
    storage.write(layout.checkpoint_manifest(2, 1), b"{ torn")
    prune(storage, keep=2)
    assert steps_left(storage) == {"model.ckpt-1", "model.ckpt-3"}


def test_what_is_newer_than_the_newest_whole_one_is_left_alone(storage):
    save_all(storage, [1, 2])
    storage.write("model.ckpt-1/00000002/000001/part-00000.json", b"{}")
    prune(storage, keep=1)
    assert "model.ckpt-1/00000002/000001/part-00000.json" in {info.key for info in storage.list("model.ckpt-1/")}
    assert latest_checkpoint(storage)[1].step == 2


def test_a_run_goes_on_with_a_store_that_cannot_delete_and_clears_up_later(storage):
    class Undeletable(FaultyStorage):
        broken = True

        def delete(self, key: str) -> None:
            if self.broken and not key.endswith(layout.checkpoint_manifest(1, 1)):
                self.fail_at(self.num_operations + 1)
            super().delete(key)

    store = Undeletable(storage)
    ranks = Ranks(store, keep=1)
    assert ranks.save(1)
    assert ranks.save(2)
    assert ranks.save(3)
    assert {"model.ckpt-1", "model.ckpt-2", "model.ckpt-3"} == steps_left(storage)
    assert_tables_of(storage, latest_checkpoint(storage)[1], 3)
    store.broken = False
    assert ranks.save(4)
    ranks.close()
    assert steps_left(storage) == {"model.ckpt-4"}
