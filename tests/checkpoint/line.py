"""A line of training in miniature: each step changes some rows, ranks save what has changed, others restore it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.checkpoint.ranks import SETTLE_S, TABLES, ShortWaits, dense_files, empty_shards, full_table
from tidemill.checkpoint.capture import Capture, Staging
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.checkpoint.manager import CheckpointManager, Increments
from tidemill.checkpoint.restore import restore_tables
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.distributed.sharding import LocalShard
from tidemill.lineage.terms import Writer
from tidemill.publish.tracker import TouchedRows
from tidemill.storage.base import Storage


def touched_by(step: int) -> dict[str, np.ndarray]:
    """By table: the rows that a step changes. Every third leaves the second table alone."""
    random = np.random.default_rng(step)
    user, item = TABLES
    rows = {user.name: np.unique(random.integers(0, user.num_embeddings, 3))}
    if step % 3:
        rows[item.name] = np.unique(random.integers(0, item.num_embeddings, 2))
    return rows


def train(shards: Sequence[LocalShard], step: int, touched: TouchedRows | None = None) -> None:
    """One step: the rows that it touches get values that depend on it alone."""
    rows_of = touched_by(step)
    for shard in shards:
        ids = rows_of.get(shard.table, np.empty(0, np.int64))
        ids = ids[(ids >= shard.row_start) & (ids < shard.row_stop)]
        if touched is not None:
            touched.mark(shard.table, ids - shard.row_start)
        local = torch.from_numpy(ids - shard.row_start)
        new = full_table(next(spec for spec in TABLES if spec.name == shard.table), step)
        shard.weight[local] = new["weight"][ids]
        for name, live in shard.optimizer.items():
            live[local] = new[name][ids]


def trained(step: int, rank: int = 0, world_size: int = 1) -> list[LocalShard]:
    """A rank's shards as they are after steps 1..step."""
    shards = empty_shards(rank, world_size)
    for one in range(1, step + 1):
        train(shards, one)
    return shards


def assert_equal(found: Sequence[LocalShard], wanted: Sequence[LocalShard]) -> None:
    """Bit for bit."""
    assert [shard.table for shard in found] == [shard.table for shard in wanted]
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got.weight, want.weight), got.table
        assert got.optimizer.keys() == want.optimizer.keys()
        assert all(torch.equal(got.optimizer[name], want.optimizer[name]) for name in got.optimizer), got.table


def assert_restores(storage: Storage, manifest: CheckpointManifest, world_size: int = 1) -> None:
    """The checkpoint gives the tables of its step on any rank."""
    for rank in range(world_size):
        shards = empty_shards(rank, world_size)
        restore_tables(storage, manifest, shards, tables=TABLES)
        assert_equal(shards, trained(manifest.step, rank, world_size))


class Line:
    """One run: it restores what is newest, trains, and saves incrementally."""

    def __init__(self, storage: Storage, world_size: int = 1, *, term: int = 1, fold_after: int = 3, keep: int = 0) -> None:
        newest = latest_checkpoint(storage)
        base = newest[1] if newest else None
        self.step = self.saved = base.step if base else 0
        self.shards = [empty_shards(rank, world_size) for rank in range(world_size)]
        for shards in self.shards:
            if base is not None:
                restore_tables(storage, base, shards, tables=TABLES)
        self.touched = [TouchedRows(shards) for shards in self.shards]
        self.stagings = [Staging() for _ in range(world_size)]
        self.storage = storage
        self.managers = [
            CheckpointManager(
                storage,
                Writer(term, f"run-{term}", rank, world_size),
                tables=TABLES,
                increments=Increments(base, fold_after),
                keep=keep,
                clock=ShortWaits(),
            )
            for rank in range(world_size)
        ]

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            for shards, touched in zip(self.shards, self.touched, strict=True):
                train(shards, self.step, touched)

    def save(self) -> bool:
        """Save, and let every rank know how it ended."""
        number = 0
        for rank, manager in enumerate(self.managers):
            number = manager.save(self._capture(rank, manager))
        self._await(lambda: all(manager.ready for manager in self.managers))
        settled, committed = self.managers[0].settled
        assert settled == number
        self.saved = self.step if committed else self.saved
        for manager in self.managers:
            manager.on_settled(number, committed)
        return committed

    def train_and_save(self, times: int = 1) -> None:
        for _ in range(times):
            self.train()
            assert self.save()

    def finish_fold(self) -> None:
        """Wait until all ranks' folds have ended."""
        self._await(lambda: not any(manager.folding for manager in self.managers))

    def close(self) -> None:
        for manager in self.managers:
            manager.abort()

    def _capture(self, rank: int, manager: CheckpointManager) -> Capture:
        full, touched = manager.wants_full, self.touched[rank].take_unsaved()
        staging, shards = self.stagings[rank], self.shards[rank]
        return Capture(
            step=self.step,
            examples=10 * self.step,
            watermark=None,
            full=full,
            tables=staging.copy(shards) if full else staging.copy_rows(shards, touched),
            dense_files=dense_files(self.step) if rank == 0 else {},
            splits=[],
            rank_state={},
            shared_state={"passes_completed": 0},
        )

    def _await(self, done: Any) -> None:
        until = time.monotonic() + SETTLE_S
        while not done():
            for manager in self.managers:
                manager.check()
            assert time.monotonic() < until, "it hangs"
            time.sleep(0.001)
