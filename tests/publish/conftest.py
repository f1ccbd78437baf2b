"""A trainer as small as can be (a few rows of NumPy on several ranks in one process), and a reader that folds its releases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import numpy as np
import pytest
import torch

from tidemill.clock import Clock
from tidemill.contracts import layout
from tidemill.contracts.files import TableFile, TableSpec
from tidemill.contracts.progress import SplitState
from tidemill.contracts.release import ReleaseManifest
from tidemill.contracts.snapshot import ProgramInputs, SnapshotManifest
from tidemill.errors import AlreadyExistsError, NotFoundError
from tidemill.lineage.records import snapshot_digest
from tidemill.lineage.terms import Writer, open_term
from tidemill.publish.cut import Cutter, Moment
from tidemill.publish.publisher import Publisher, PublishSettings
from tidemill.publish.recovery import PublishCursor, absorb, open_releases
from tidemill.publish.tracker import TouchedRows
from tidemill.storage.arrays import read_arrays, write_arrays
from tidemill.storage.base import Chunk, ObjectInfo, Storage, check_key

TABLES = [
    TableSpec(name="pooled/user", num_embeddings=41, embedding_dim=3),
    TableSpec(name="sequence/item", num_embeddings=12, embedding_dim=2),
]
DEADLINE_S = 20.0


class MemoryStorage(Storage):
    """Objects in a dict: the tests here cut thousands of times, and have no use for a disk's durability."""

    def __init__(self) -> None:
        self.url = "memory://"
        self.objects: dict[str, bytes] = {}
        self._lock = RLock()

    def read(self, key: str) -> bytes:
        with self._lock:
            if key not in self.objects:
                raise NotFoundError(f"no object {key!r}")
            return self.objects[key]

    def write(self, key: str, *chunks: Chunk) -> None:
        with self._lock:
            self.objects[check_key(key)] = b"".join(chunks)

    def create(self, key: str, *chunks: Chunk) -> None:
        with self._lock:
            if key in self.objects:
                raise AlreadyExistsError(f"{key!r} is there")
            self.write(key, *chunks)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        with self._lock:
            return sorted(ObjectInfo(key, len(data), 0.0) for key, data in self.objects.items() if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._lock:
            self.objects.pop(key, None)

    def local_path(self, key: str) -> Path | None:
        return None


class Interrupted(Storage):
    """Passes everything on, and calls `before` (once) ahead of the first operation of a kind on a key with a prefix."""

    def __init__(self, inner: Storage, *when: object) -> None:
        self.inner, self.url = inner, inner.url
        self._when: tuple[str, str] | None = None
        if when:
            self.arm(*when)

    def arm(self, method: str, prefix: str, before: Callable[[], None]) -> None:
        self._when, self._before = (method, prefix), before

    def _visit(self, method: str, key: str) -> None:
        if self._when and method == self._when[0] and key.startswith(self._when[1]):
            self._when = None
            self._before()

    def read(self, key: str) -> bytes:
        self._visit("read", key)
        return self.inner.read(key)

    def write(self, key: str, *chunks: Chunk) -> None:
        self._visit("write", key)
        self.inner.write(key, *chunks)

    def create(self, key: str, *chunks: Chunk) -> None:
        self._visit("create", key)
        self.inner.create(key, *chunks)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._visit("list", prefix)
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def local_path(self, key: str) -> Path | None:
        return None


@dataclass(frozen=True, slots=True)
class Shard:
    """What `distributed.sharding.LocalShard` gives."""

    table: str
    row_start: int
    row_stop: int
    weight: torch.Tensor
    optimizer: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Served:
    """What a reader holds after a release."""

    sequence: int
    term: int
    step: int
    tables: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]

    def equals(self, tables: dict[str, np.ndarray], dense: dict[str, np.ndarray]) -> bool:
        same_tables = all(np.array_equal(self.tables[name], rows) for name, rows in tables.items())
        return same_tables and all(np.array_equal(self.dense[name], array) for name, array in dense.items())


@dataclass(frozen=True, slots=True)
class Saved:
    """A tiny checkpoint."""

    step: int
    tables: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]
    touched: list[dict]
    cursors: list[dict]


def make_lineage(storage: Storage) -> Saved:
    """A lineage's folder with a snapshot; the checkpoint that it was made of."""
    rng = np.random.default_rng(0)
    tables = {spec.name: rng.normal(size=(spec.num_embeddings, spec.embedding_dim)).astype(np.float32) for spec in TABLES}
    dense = {"top.weight": rng.normal(size=(2, 3)).astype(np.float32), "seen": np.array(0, np.int64)}
    entry = write_arrays(storage, "snapshot/tables.safetensors", {f"{name}/weight": rows for name, rows in tables.items()})
    dense_entry = write_arrays(storage, "snapshot/dense.safetensors", dense)
    manifest = SnapshotManifest(
        model="tiny",
        checkpoint_step=7,
        checkpoint_term=1,
        checkpoint_digest="00",
        examples=700,
        created_at=0.0,
        watermark=50.0,
        boundary=50.0,
        features={},
        inputs=ProgramInputs(num_dense=0, pooled=[], sequences=[]),
        outputs=["probs"],
        tables=TABLES,
        table_files=[TableFile(table=s.name, file=entry, row_start=0, row_stop=s.num_embeddings) for s in TABLES],
        dense=dense_entry,
        program=entry,
        pipeline=entry,
        probes=None,
    )
    storage.write(layout.SNAPSHOT, manifest.to_bytes())
    return Saved(0, tables, dense, [], [])


def read_releases(storage: Storage) -> list[ReleaseManifest]:
    keys = [info.key for info in storage.list("releases/")]
    return [ReleaseManifest.parse(storage.read(key), where=key) for key in keys]


def fold(storage: Storage) -> Served:
    """The snapshot and all its releases, with every file checked against its hash, as a server would hold them."""
    data = storage.read(layout.SNAPSHOT)
    snapshot = SnapshotManifest.parse(data, where="snapshot")
    base = read_arrays(storage, "snapshot/tables.safetensors")
    tables = {spec.name: base[f"{spec.name}/weight"].copy() for spec in snapshot.tables}
    dense = read_arrays(storage, snapshot.dense.key)
    term = step = 0
    releases = read_releases(storage)
    for sequence, manifest in enumerate(releases, start=1):
        assert manifest.sequence == sequence
        assert manifest.term >= term
        assert manifest.snapshot_digest == hashlib.sha256(data).hexdigest()
        term, step = manifest.term, manifest.step
        files = {f.key: read_arrays(storage, f.key, sha256=f.sha256, size=f.size) for f in manifest.files}
        for segment in manifest.segments:
            arrays = files[segment.file]
            ids, deleted = (
                arrays.get(f"{segment.table}/ids", np.empty(0, int)),
                arrays.get(f"{segment.table}/deleted", np.empty(0, int)),
            )
            assert (len(ids), len(deleted)) == (segment.upserts, segment.deletes)
            if len(ids):
                tables[segment.table][ids] = arrays[f"{segment.table}/rows"]
            tables[segment.table][deleted] = 0
        if manifest.dense is not None:
            dense = files[manifest.dense.key]
    return Served(len(releases), term, step, tables, dense)


class Trainer:
    """One run: opens a term, restores, takes up released keys, and trains random rows on all ranks in turn."""

    def __init__(
        self,
        storages: Sequence[Storage],
        saved: Saved,
        run_id: str,
        *,
        settings: PublishSettings | None = None,
        tables: Sequence[TableSpec] = TABLES,
        clock: Clock | None = None,
    ) -> None:
        self.step = saved.step
        self.under_way = False
        self.tables = {spec.name: saved.tables[spec.name][: spec.num_embeddings].copy() for spec in tables}
        self.dense = {name: torch.from_numpy(array.copy()) for name, array in saved.dense.items()}
        self.probe_scores: dict[str, np.ndarray] | None = None
        self.writers_storage = storages[0]
        world_size = len(storages)
        self.term = open_term(storages[0], run_id=run_id, nonce=run_id)
        self.writers = [Writer(self.term, run_id, rank, world_size) for rank in range(world_size)]
        self.shards = [self._shards(rank, world_size) for rank in range(world_size)]
        self.touched = [TouchedRows(shards) for shards in self.shards]
        self.cursors = [PublishCursor(snapshot_digest(storage)) for storage in storages]
        for touched, cursor in zip(self.touched, self.cursors, strict=True):
            touched.load_state(saved.touched)
            cursor.load_state(saved.cursors)
        sequence = open_releases(storages[0], self.writers[0], clock=clock)
        self.publishers = []
        for rank, storage in enumerate(storages):
            gone = absorb(storage, self.touched[rank], tables, after=self.cursors[rank].sequence, up_to=sequence)
            cutter = Cutter(
                self.shards[rank],
                self.touched[rank],
                dense=(lambda: self.dense) if rank == 0 else None,
                deletes=gone if rank == 0 else {},
            )
            self.publishers.append(
                Publisher(
                    storage, self.writers[rank], cutter, self.cursors[rank], sequence=sequence, settings=settings, clock=clock
                )
            )

    def _shards(self, rank: int, world_size: int) -> list[Shard]:
        shards = []
        for table, rows in self.tables.items():
            per_rank = -(-len(rows) // world_size)
            start, stop = min(rank * per_rank, len(rows)), min((rank + 1) * per_rank, len(rows))
            # A view: what is trained in the shard is trained in the table.
            shards.append(Shard(table, start, stop, torch.from_numpy(rows[start:stop]), {}))
        return shards

    def train(self, rng: np.random.Generator, rows: int = 5) -> None:
        """One step: some rows of each table, and one dense weight."""
        for table, weights in self.tables.items():
            self.change(table, rng.integers(0, len(weights), rows), rng)
        self.dense["top.weight"][0, 0] += 1
        self.step += 1

    def change(self, table: str, ids: np.ndarray, rng: np.random.Generator) -> None:
        updates = rng.normal(size=(len(ids), self.tables[table].shape[1])).astype(np.float32)
        for shards, touched in zip(self.shards, self.touched, strict=True):
            shard = next(shard for shard in shards if shard.table == table)
            own = (ids >= shard.row_start) & (ids < shard.row_stop)
            local = torch.from_numpy(ids[own] - shard.row_start)
            touched.mark(table, local)
            shard.weight.index_add_(0, local, torch.from_numpy(updates[own]))

    def moment(self, rank: int) -> Moment:
        split = SplitState(kind="kafka", split=f"clicks:{rank}", intervals=[(0, self.step + 1)], fingerprint={})
        scores = self.probe_scores if rank == 0 else None
        return Moment(self.step, 100 * self.step, 60.0 + self.step, 61.0 + self.step, [split], scores, 1000.0 + self.step + rank)

    def cut(self, ranks: Sequence[int] | None = None) -> int:
        """Cut on some ranks (all): the number."""
        self.under_way = True
        numbers = {self.publishers[rank].cut(self.moment(rank)) for rank in (ranks or range(len(self.publishers)))}
        assert len(numbers) == 1
        return numbers.pop()

    def settle(self) -> bool:
        """Wait for the cut under way, and tell all ranks what rank 0 says."""
        for publisher in reversed(self.publishers):
            publisher.drain(deadline_s=DEADLINE_S)
        number, committed = self.publishers[0].settled
        self.under_way = False
        for publisher in self.publishers:
            publisher.on_settled(number, committed)
        return committed

    def publish(self) -> bool:
        """A cut from beginning to end. Rank 0 begins last, so that no deadline depends on how busy the machine is."""
        for rank in reversed(range(len(self.publishers))):
            self.cut(ranks=[rank])
            self.publishers[rank].drain(deadline_s=DEADLINE_S)
        return self.settle()

    def save(self) -> Saved:
        """A checkpoint at this moment."""
        return Saved(
            self.step,
            {table: rows.copy() for table, rows in self.tables.items()},
            self.weights(),
            [touched.state() for touched in self.touched],
            [cursor.state() for cursor in self.cursors],
        )

    def weights(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.dense.items()}

    def is_served(self, storage: Storage) -> bool:
        """Whether a reader holds exactly this trainer's rows and weights, every key."""
        return fold(storage).equals(self.tables, self.weights())

    def stop(self) -> None:
        for publisher in self.publishers:
            publisher.abort()


class World:
    """What a test needs to build lineages, runs and readers; stops the runs' threads at the end."""

    tables = TABLES
    interrupted = Interrupted
    fold = staticmethod(fold)
    releases = staticmethod(read_releases)

    def __init__(self) -> None:
        self.runs: list[Trainer] = []
        self.rng = np.random.default_rng(1)

    def lineage(self) -> tuple[MemoryStorage, Saved]:
        storage = MemoryStorage()
        return storage, make_lineage(storage)

    def start(self, storage: Storage | Sequence[Storage], saved: Saved, *, ranks: int = 2, **options) -> Trainer:
        storages = [storage] * ranks if isinstance(storage, Storage) else storage
        run = Trainer(storages, saved, f"run-{len(self.runs)}", **options)
        self.runs.append(run)
        return run

    def stop(self) -> None:
        for run in self.runs:
            run.stop()


@pytest.fixture
def world():
    world = World()
    yield world
    world.stop()


@pytest.fixture(scope="session")
def new_world() -> type[World]:
    """For property tests, which need a new world for each example."""
    return World
