"""Ranks for tests of checkpoints: plain shards of two tables, and managers that save them together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tidemill.checkpoint.capture import Capture, Staging
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.checkpoint.restore import restore_tables
from tidemill.clock import Clock
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import TableSpec
from tidemill.contracts.progress import SplitState
from tidemill.distributed.sharding import LocalShard
from tidemill.lineage.terms import Writer
from tidemill.storage.base import Storage

TABLES = [
    TableSpec(name="pooled/user", num_embeddings=11, embedding_dim=4),
    TableSpec(name="sequence/item", num_embeddings=7, embedding_dim=3),
]
SETTLE_S = 20.0


def empty_shards(rank: int, world_size: int) -> list[LocalShard]:
    """This rank's rows of "pooled/user", which is spread over all ranks, and of "sequence/item", which the last rank holds."""
    user, item = TABLES
    each = -(-user.num_embeddings // world_size)
    start, stop = min(rank * each, user.num_embeddings), min((rank + 1) * each, user.num_embeddings)
    shards = [shard(user, start, stop)]
    if rank == world_size - 1:
        shards.append(shard(item, 0, item.num_embeddings))
    return shards


def shard(spec: TableSpec, start: int, stop: int) -> LocalShard:
    """Rows of a table, zero, with a rowwise and an elementwise optimizer state."""
    rows = stop - start
    optimizer = {"momentum1": torch.zeros(rows), "momentum2": torch.zeros(rows, spec.embedding_dim)}
    return LocalShard(spec.name, start, stop, torch.zeros(rows, spec.embedding_dim), optimizer)


def full_table(spec: TableSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (spec.num_embeddings, spec.embedding_dim)
    return {
        "weight": torch.randn(shape, generator=generator),
        "momentum1": torch.rand(shape[0], generator=generator),
        "momentum2": torch.rand(shape, generator=generator),
    }


def fill(shards: Sequence[LocalShard], seed: int) -> None:
    """The shards' rows of tables that depend on the seed alone."""
    for one in shards:
        spec = next(spec for spec in TABLES if spec.name == one.table)
        for name, values in full_table(spec, seed).items():
            live = one.weight if name == "weight" else one.optimizer[name]
            live.copy_(values[one.row_start : one.row_stop])


def capture_of(shards: Sequence[LocalShard], rank: int, world_size: int, step: int, staging: Staging | None = None) -> Capture:
    """A capture whose every part depends on rank and step."""
    splits = [
        SplitState(
            kind="parquet", split=f"part-{n}", intervals=[(0, step)] if n == rank else [], num_rows=100, fingerprint={"n": n}
        )
        for n in range(world_size)
    ]
    state: dict[str, Any] = {"position": step, "nested": {"of": [rank, None, "x"]}, "marks": np.arange(rank + 2, dtype=np.int64)}
    return Capture(
        step=step,
        examples=10 * step,
        watermark=1.7e9 + step,
        full=True,
        tables=(staging or Staging()).copy(shards),
        dense_files=dense_files(step) if rank == 0 else {},
        splits=splits,
        rank_state={"feed": state, "random": {"torch": np.full(3, rank, np.uint8)}},
        shared_state={"passes_completed": 1, "schedule": {"steps": step}},
    )


def dense_files(step: int) -> dict[str, dict[str, np.ndarray]]:
    return {
        "dense": {"layer.weight": np.full((2, 2), step, np.float32)},
        "dense_optimizer": {"layer.weight/exp_avg": np.full((2, 2), -step, np.float32)},
    }


class Ranks:
    """The managers of one run and the shards that they save; `save` fills the shards by its step."""

    def __init__(self, storage: Storage | Sequence[Storage], world_size: int = 1, *, term: int = 1, **options: Any) -> None:
        storages = [storage] * world_size if isinstance(storage, Storage) else list(storage)
        self.world_size = world_size
        self.shards = [empty_shards(rank, world_size) for rank in range(world_size)]
        self.stagings = [Staging() for _ in range(world_size)]
        self.managers = [
            CheckpointManager(store, Writer(term, f"run-{term}", rank, world_size), tables=TABLES, **options)
            for rank, store in enumerate(storages)
        ]

    def begin(self, step: int) -> int:
        """Save on all ranks without waiting; the save's number."""
        number = 0
        for rank, manager in enumerate(self.managers):
            fill(self.shards[rank], step)
            number = manager.save(capture_of(self.shards[rank], rank, self.world_size, step, self.stagings[rank]))
        return number

    def save(self, step: int) -> bool:
        """Save on all ranks, and wait for rank 0's word."""
        number = self.begin(step)
        self.wait()
        settled, committed = self.managers[0].settled
        assert settled == number
        return committed

    def wait(self) -> None:
        until = time.monotonic() + SETTLE_S
        for manager in self.managers:
            while not manager.ready:
                manager.check()
                assert time.monotonic() < until, "a save hangs"
                time.sleep(0.002)

    def close(self) -> None:
        for manager in self.managers:
            manager.abort()


def assert_tables_of(storage: Storage, manifest: CheckpointManifest, step: int, world_size: int = 1) -> None:
    """Restoring gives, bit for bit, what `Ranks.save(step)` saved, whatever the number of ranks."""
    for rank in range(world_size):
        shards, wanted = empty_shards(rank, world_size), empty_shards(rank, world_size)
        fill(wanted, step)
        restore_tables(storage, manifest, shards, tables=TABLES)
        for got, want in zip(shards, wanted, strict=True):
            assert torch.equal(got.weight, want.weight)
            assert got.optimizer.keys() == want.optimizer.keys()
            assert all(torch.equal(got.optimizer[name], want.optimizer[name]) for name in got.optimizer)


class ShortWaits(Clock):
    """A clock whose every sleep lasts a moment. `rushing`: time passes as if it had lasted, so that deadlines come at once."""

    def __init__(self) -> None:
        self.rushing = False
        self._ahead = 0.0

    def time(self) -> float:
        return 1.7e9 + self.monotonic()

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def sleep(self, seconds: float) -> None:
        if self.rushing:
            self._ahead += seconds
        time.sleep(0.001)
