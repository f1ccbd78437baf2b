"""Which checkpoints stay."""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.ranks import Ranks, ShortWaits, assert_tables_of
from tidemill.checkpoint.best import best_step
from tidemill.checkpoint.discovery import CHECKPOINTS, latest_checkpoint, read_checkpoint
from tidemill.checkpoint.leases import LEASE_S, reading
from tidemill.checkpoint.retention import UNFINISHED_S, prune, sweep, to_delete
from tidemill.contracts import layout
from tidemill.contracts.layout import CheckpointName
from tidemill.errors import CheckpointError
from tidemill.storage.backends import local
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage

names = st.builds(CheckpointName, st.integers(1, 3), st.integers(0, 20), st.integers(0, 2))


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


def test_nothing_is_deleted_on_the_training_thread(storage):
    """DCL 9.18."""
    deleting = set()

    class Watched(FaultyStorage):
        def delete(self, key):
            deleting.add(threading.current_thread())
            super().delete(key)

    save_all(Watched(storage), [1, 2, 3], keep=1)
    assert steps_left(storage) == {"model.ckpt-3"}
    assert deleting
    assert threading.current_thread() not in deleting


def test_without_a_limit_all_stay(storage):
    save_all(storage, [1, 2, 3])
    assert steps_left(storage) == {"model.ckpt-1", "model.ckpt-2", "model.ckpt-3"}


def test_of_two_saves_at_one_step_the_first_goes_alone(storage):
    """Both lie in one folder; what a third one at that step has begun is newer than both."""
    save_all(storage, [1, 5, 5], keep=0)
    kept = {entry.key for entry in latest_checkpoint(storage)[1].all_files}
    under_way = f"{layout.checkpoint_files(5, 1, 4)}/part-00000.json"
    storage.write(under_way, b"{}")
    prune(storage, keep=1)
    left = {info.key for info in storage.list("model.ckpt-")}
    assert {key for key in left if layout.checkpoint_of_manifest(key)} == {layout.checkpoint_manifest(5, 1, 3)}
    assert left >= {under_way, *kept}
    assert not [key for key in left if layout.checkpoint_of_file(key) == (1, 5, 0)]
    assert_tables_of(storage, latest_checkpoint(storage)[1], 5)


def test_both_saves_at_a_step_that_is_read_stay(storage):
    """DCL 9.18: a lease names a step."""
    save_all(storage, [1, 1, 2])
    with reading(storage, 1):
        prune(storage, keep=1)
        assert storage.list(layout.checkpoint_manifest(1, 1))
        assert read_checkpoint(storage, 1)[0] == layout.checkpoint_manifest(1, 1, 2)
        assert_tables_of(storage, read_checkpoint(storage, 1)[1], 1)
    prune(storage, keep=1)
    assert steps_left(storage) == {"model.ckpt-2"}


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


@given(st.sets(names, min_size=1), st.sets(names), st.integers(1, 5), st.data())
def test_protected_ones_stay_besides_the_newest_few(whole, unfinished, keep, data):
    """DCL 9.18."""
    protected = data.draw(st.sets(st.sampled_from(sorted(whole))))
    going = to_delete(whole | unfinished, whole, keep, protected)
    assert whole - set(going) == {*sorted(whole)[-keep:], *protected}
    assert set(going) == {one for one in to_delete(whole | unfinished, whole, keep) if one not in protected}


def evaluations(storage, *lines):
    storage.write(layout.BEST_EVALUATIONS, "".join(f"{line}\n" for line in lines).encode())


def best_of(storage, *, larger=True):
    return lambda steps: best_step(storage, "auc", larger=larger, steps=steps)


def test_the_best_stays_besides_the_newest(storage):
    """DCL 9.18: keep N + best."""
    save_all(storage, [1, 2, 3, 4, 5])
    evaluations(storage, '{"global_step": 2, "auc": 0.8}', '{"global_step": 3, "auc": 0.7}', '{"global_step": 9, "auc": 0.9}')
    prune(storage, keep=1, best=best_of(storage))
    assert steps_left(storage) == {"model.ckpt-2", "model.ckpt-5"}
    assert_tables_of(storage, read_checkpoint(storage, 2)[1], 2)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("not json",),
        ('{"global_step": 2, "other": 1}',),
        ('{"global_step": 2, "auc": null}',),
        ('{"global_step": 77, "auc": 1.0}',),
    ],
)
def test_a_best_that_isnt_known_never_blocks_pruning(storage, lines):
    """DCL 9.18: no evaluations, lines of something else, metrics that are undefined, steps that are gone."""
    save_all(storage, [1, 2, 3])
    if lines:
        evaluations(storage, *lines)
    prune(storage, keep=1, best=best_of(storage))
    assert steps_left(storage) == {"model.ckpt-3"}


def test_a_torn_best_is_of_no_use(storage):
    save_all(storage, [1, 2, 3])
    evaluations(storage, '{"global_step": 1, "auc": 0.8}')
    storage.write(layout.checkpoint_manifest(1, 1), b"{ torn")
    prune(storage, keep=1, best=best_of(storage))
    assert steps_left(storage) == {"model.ckpt-3"}


def test_what_is_best(storage):
    evaluations(
        storage,
        '{"global_step": 1, "auc": 0.8, "loss": 0.3}',
        '{"global_step": 2, "auc": 0.9, "loss": 0.2}',
        '{"global_step": 3, "auc": 0.9, "loss": 0.5}',
        '{"global_step": 2, "auc": 0.5, "loss": 0.4}',
    )
    assert best_step(storage, "auc", larger=True, steps={1, 2, 3}) == 3
    assert best_step(storage, "auc", larger=True, steps={1, 2}) == 1, "the last evaluation of a step counts"
    assert best_step(storage, "loss", larger=False, steps={1, 2, 3}) == 1
    assert best_step(storage, "loss", larger=False, steps={7}) is None


def test_a_checkpoint_that_is_being_read_stays(storage):
    """DCL 9.18: a lease of another process."""
    save_all(storage, [1, 2, 3])
    with reading(storage, 1):
        prune(storage, keep=1)
        assert steps_left(storage) == {"model.ckpt-1", "model.ckpt-3"}
        assert_tables_of(storage, read_checkpoint(storage, 1)[1], 1)
        with reading(storage, 3):
            prune(storage, keep=1)
        assert steps_left(storage) == {"model.ckpt-1", "model.ckpt-3"}
    prune(storage, keep=1)
    assert steps_left(storage) == {"model.ckpt-3"}
    assert storage.list(layout.CHECKPOINT_READERS) == []


def test_a_lease_of_a_dead_reader_expires_by_the_stores_clock(storage, tmp_path):
    save_all(storage, [1, 2])
    dead = layout.checkpoint_reader(1, "dead")
    storage.write(dead, b"reading\n")
    now = next(info.modified_at for info in storage.list(layout.checkpoint_manifest(2, 1)))
    for age, left in ((LEASE_S - 1, {"model.ckpt-1", "model.ckpt-2"}), (LEASE_S + 1, {"model.ckpt-2"})):
        os.utime(tmp_path / dead, (now - age, now - age))
        prune(storage, keep=1)
        assert steps_left(storage) == left
    assert storage.list(layout.CHECKPOINT_READERS) == []


def test_a_reader_renews_its_lease_until_it_is_done(storage, tmp_path):
    with reading(storage, 1, renew_s=0.001):
        (lease,) = storage.list(layout.CHECKPOINT_READERS)
        os.utime(tmp_path / lease.key, (0, 0))
        deadline = time.monotonic() + 20
        while storage.list(layout.CHECKPOINT_READERS)[0].modified_at == 0:
            assert time.monotonic() < deadline
    assert storage.list(layout.CHECKPOINT_READERS) == []


class Meets(FaultyStorage):
    """A reader of checkpoint 1 begins just before operation n. `promised`: it has the lease, and has seen the manifest after."""

    def __init__(self, storage, n):
        super().__init__(storage)
        self.n, self.lease, self.promised = n, ExitStack(), False
        self.came = False

    def _operate(self, method, key, call):
        if self.num_operations + 1 == self.n:
            self.came = True
            with suppress(CheckpointError):
                self.lease.enter_context(reading(self.inner, 1))
                self.promised = bool(self.inner.list(layout.checkpoint_manifest(1, 1)))
        return super()._operate(method, key, call)


def test_reader_and_pruner_see_each_other_whatever_their_order(tmp_path):
    """The reader comes before any one of the pruner's operations: what it was promised stays whole."""
    promises = []
    for operation in itertools.count(1):
        storage = LocalStorage(tmp_path / str(operation))
        save_all(storage, [1, 2])
        met = Meets(storage, operation)
        prune(met, keep=1)
        if not met.came:
            break
        promises.append(met.promised)
        with met.lease:
            if met.promised:
                assert_tables_of(storage, read_checkpoint(storage, 1)[1], 1)
    assert set(promises) == {True, False}
    assert promises == sorted(promises, reverse=True), "the later it comes, the less it is promised"


def test_what_died_is_swept_by_the_next_run_even_if_all_checkpoints_stay(storage, tmp_path):
    save_all(storage, [1, 3])
    torn = "model.ckpt-2/00000001/000002/part-00000.json"
    under_way = "model.ckpt-9/00000002/000001/part-00000.json"
    for key in (torn, under_way, "model.ckpt-best/x"):
        storage.write(key, b"{}")
    old, new = tmp_path / "model.ckpt-1" / ".tmp-old", tmp_path / "model.ckpt-3" / ".tmp-new"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * UNFINISHED_S,) * 2)
    ranks = Ranks(storage, 2, term=2)
    assert ranks.save(4)
    ranks.wait()
    ranks.close()
    left = {info.key for info in storage.list("model.ckpt-")}
    assert torn not in left
    assert {under_way, "model.ckpt-best/x"} <= left, "not ours to judge"
    assert (old.exists(), new.exists()) == (False, True)
    assert steps_left(storage) >= {"model.ckpt-1", "model.ckpt-3", "model.ckpt-4"}


def age(root, seconds):
    """Everything below was last touched so long ago."""
    for path in [*root.rglob("*")]:
        os.utime(path, (time.time() - seconds,) * 2)


def test_old_empty_folders_of_checkpoints_are_swept_and_no_others(storage, tmp_path):
    """What retention and kills have left; not what a live writer has just made, nor anything that holds a file."""
    save_all(storage, [1, 2, 3], keep=1)
    emptied = [tmp_path / f"model.ckpt-{step}" for step in (1, 2)]
    killed, held, other = (tmp_path / name for name in ("model.ckpt-7", "model.ckpt-8", "runs"))
    for folder in (killed, held, other):
        (folder / "00000001" / "000001").mkdir(parents=True)
    (killed / "00000001" / "000001" / ".tmp-dead").write_bytes(b"half")
    (held / "00000001" / "mine").write_bytes(b"x")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "model.ckpt-9").symlink_to(outside)
    age(tmp_path, 2 * UNFINISHED_S)
    live = [tmp_path / "model.ckpt-10" / "00000002", tmp_path / "model.ckpt-11"]
    for folder in live:
        folder.mkdir(parents=True)
    (tmp_path / "model.ckpt-12").mkdir()
    writing = tmp_path / "model.ckpt-12" / ".tmp-live"
    writing.write_bytes(b"half")
    os.utime(tmp_path / "model.ckpt-12", (0, 0))
    assert all(folder.is_dir() for folder in emptied)
    ranks = Ranks(storage, 2, term=2)
    assert ranks.save(4)
    ranks.wait()
    ranks.close()
    assert not any(folder.exists() for folder in [*emptied, killed])
    assert all(folder.is_dir() for folder in (held / "00000001", other / "00000001" / "000001", outside, *live))
    assert (tmp_path / "model.ckpt-9").is_symlink()
    assert writing.read_bytes() == b"half"
    assert_tables_of(storage, latest_checkpoint(storage)[1], 4)


def test_an_empty_folder_that_vanishes_under_a_writer_costs_it_another_try(storage, tmp_path, monkeypatch):
    """The sweep of one run meets the first write of another one, which slept for an hour where its folder was still empty."""
    make, slept = local._make_folder, []

    def make_and_sleep(folder):
        make(folder)
        if folder == tmp_path / layout.checkpoint_files(4, 1) and not slept:
            age(tmp_path, 2 * UNFINISHED_S)
            storage.sweep(time.time() - UNFINISHED_S, folders=CHECKPOINTS)
            slept.append(folder.exists())

    monkeypatch.setattr(local, "_make_folder", make_and_sleep)
    ranks = Ranks(storage, clock=ShortWaits())
    assert ranks.save(4)
    ranks.close()
    assert slept == [False]
    assert_tables_of(storage, latest_checkpoint(storage)[1], 4)


def test_nothing_is_swept_beside_a_damaged_checkpoint(storage):
    save_all(storage, [1, 3])
    storage.write(layout.checkpoint_manifest(1, 1), b"{ torn")
    torn = "model.ckpt-2/00000001/000002/part-00000.json"
    storage.write(torn, b"{}")
    sweep(storage, layout.checkpoint_manifest(3, 1))
    assert torn in {info.key for info in storage.list("model.ckpt-")}
