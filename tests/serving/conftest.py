"""Lineages written by hand, and what they should score: plain Python over the same tables, in numbers that float32 holds."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry, TableFile, TableSpec
from tidemill.contracts.lineage import Deployment
from tidemill.contracts.release import CurrentHint, ReleaseManifest, SegmentEntry, Stages
from tidemill.contracts.snapshot import (
    PooledLookup,
    ProbeRows,
    ProgramInputs,
    SequenceInput,
    SnapshotManifest,
    StepLookup,
)
from tidemill.features.feature_set import FeatureSet
from tidemill.features.kinds.id import IdFeature, SequenceIdFeature
from tidemill.features.kinds.raw import RawFeature
from tidemill.storage.arrays import write_arrays
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage

USER, ITEM, TAG, STEP = "pooled/user_emb", "pooled/item_emb", "pooled/tag_emb", "sequence/item_emb"
SPECS = (
    TableSpec(name=USER, num_embeddings=40, embedding_dim=4),
    TableSpec(name=ITEM, num_embeddings=100, embedding_dim=4),
    TableSpec(name=TAG, num_embeddings=30, embedding_dim=2),
    TableSpec(name=STEP, num_embeddings=100, embedding_dim=3),
)
MAX_STEPS = 4
WIDTH = 1 + 10 + 3 + 3 + 1
INPUTS = ProgramInputs(
    num_dense=1,
    pooled=[
        PooledLookup(feature="user_id", table=USER, pooling="sum"),
        PooledLookup(feature="item_id", table=ITEM, pooling="sum"),
        PooledLookup(feature="tags", table=TAG, pooling="mean"),
    ],
    sequences=[
        SequenceInput(
            group="history",
            query=[StepLookup(feature="item_id", table=STEP)],
            steps=[StepLookup(feature="clicked", table=STEP)],
            max_steps=MAX_STEPS,
        )
    ],
)
CLOCK_ZERO = 1_700_000_000.0
STAGES = Stages(
    newest_event_at=CLOCK_ZERO - 2, cut_at=CLOCK_ZERO, written_at=CLOCK_ZERO, gated_at=CLOCK_ZERO, committed_at=CLOCK_ZERO
)


class Scorer(torch.nn.Module):
    """A dense graph with every kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = inputs["history.lengths"].unsqueeze(1)
        steps = inputs["history.sequence"].sum(1)
        parts = [inputs["dense"], inputs["pooled"], inputs["history.query"], steps, lengths.to(torch.float32)]
        logits = self.linear(torch.cat(parts, 1)).squeeze(1)
        return {"logits": logits, "probs": torch.sigmoid(logits / 1000)}


@pytest.fixture(scope="session")
def archive() -> bytes:
    """The exported dense graph."""
    example = {
        "dense": torch.zeros(3, 1),
        "pooled": torch.zeros(3, 10),
        "history.query": torch.zeros(3, 3),
        "history.sequence": torch.zeros(3, MAX_STEPS, 3),
        "history.lengths": torch.zeros(3, dtype=torch.int64),
    }
    rows = torch.export.Dim("B", min=1, max=8192)
    exported = torch.export.export(Scorer().eval(), (example,), dynamic_shapes=({name: {0: rows} for name in example},))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    return buffer.getvalue()


def feature_set() -> FeatureSet:
    return FeatureSet.compile(
        [
            ("id_feature", IdFeature.Config(feature_name="user_id", expression="user:user_id", num_buckets=40, embedding_dim=4)),
            ("id_feature", IdFeature.Config(feature_name="item_id", expression="item:item_id", num_buckets=100, embedding_dim=4)),
            (
                "id_feature",
                IdFeature.Config(feature_name="tags", expression="item:tags", separator="|", num_buckets=30, embedding_dim=2),
            ),
            (
                "sequence_id_feature",
                SequenceIdFeature.Config(
                    feature_name="clicked", expression="user:clicked", sequence_length=MAX_STEPS, num_buckets=100, embedding_dim=3
                ),
            ),
            ("raw_feature", RawFeature.Config(feature_name="price", expression="item:price")),
        ],
        labels=["label"],
    )


@dataclass
class State:
    """Tables and dense weights as they should be served."""

    tables: dict[str, np.ndarray]
    weight: np.ndarray
    bias: float

    def copy(self) -> State:
        return State({name: rows.copy() for name, rows in self.tables.items()}, self.weight.copy(), self.bias)

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Logits of rows, one by one; exact in float32."""
        return np.array([self._score(row) for row in rows], np.float32)

    def _score(self, row: Mapping[str, Any]) -> float:
        tags = [int(tag) for tag in row["tags"].split("|")] if row["tags"] else []
        clicked = [int(step) for step in (row["clicked"] or "0").split(";")][:MAX_STEPS]
        parts = [
            [0.0 if row["price"] is None else row["price"]],
            self.tables[USER][row["user_id"]],
            self.tables[ITEM][row["item_id"]],
            sum((self.tables[TAG][tag] for tag in tags), np.zeros(2)) / max(1, len(tags)),
            self.tables[STEP][row["item_id"]],
            sum((self.tables[STEP][step] for step in clicked), np.zeros(3)),
            [float(len(clicked))],
        ]
        return float(np.dot(np.concatenate(parts).astype(np.float64), self.weight) + self.bias)

    def dense(self) -> dict[str, np.ndarray]:
        return {
            "linear.weight": self.weight[None].astype(np.float32),
            "linear.bias": np.array([self.bias], np.float32),
        }


def whole_rows(generator: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Rows of multiples of 12, so that means of up to 4 are whole."""
    return (12 * generator.integers(-9, 10, (count, dim))).astype(np.float32)


def random_rows(generator: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Raw feature rows, with empty and null values among them."""
    return [
        {
            "user_id": int(generator.integers(40)),
            "item_id": int(generator.integers(100)),
            "tags": "|".join(map(str, generator.integers(30, size=generator.integers(5)))),
            "clicked": ";".join(map(str, generator.integers(100, size=generator.integers(7)))) or None,
            "price": None if generator.random() < 0.2 else float(generator.integers(50)),
        }
        for _ in range(count)
    ]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
    types = {"user_id": pa.int64(), "item_id": pa.int64(), "tags": pa.string(), "clicked": pa.string(), "price": pa.float32()}
    return {name: pa.array([row[name] for row in rows], type_) for name, type_ in types.items()}


def request_of(rows: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    types = {"user_id": "INT64", "item_id": "INT64", "tags": "BYTES", "clicked": "BYTES", "price": "FP32"}
    inputs = [
        {"name": name, "datatype": datatype, "shape": [len(rows)], "data": [row[name] for row in rows]}
        for name, datatype in types.items()
    ]
    return {"inputs": inputs, **extra}


@dataclass
class Lineage:
    """A lineage's folder under construction, and the state that each of its generations should serve."""

    storage: Storage
    folder: str
    archive: bytes
    seed: int = 0
    state: State = field(init=False)
    states: dict[tuple[int, int], State] = field(default_factory=dict)
    digest: str = ""
    sequence: int = 0

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        tables = {spec.name: whole_rows(generator, spec.num_embeddings, spec.embedding_dim) for spec in SPECS}
        self.state = State(tables, generator.integers(-3, 4, WIDTH).astype(np.float64), float(generator.integers(100)))

    def key(self, key: str) -> str:
        return f"{self.folder}/{key}" if self.folder else key

    def entry(self, stored: FileEntry) -> FileEntry:
        return stored.model_copy(update={"key": stored.key.removeprefix(f"{self.folder}/")})

    def write_file(self, key: str, data: bytes) -> FileEntry:
        self.storage.write(self.key(key), data)
        return FileEntry(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def snapshot(self, **changes: Any) -> Lineage:
        """Write the snapshot: two row ranges a table, program, dense weights, probe rows with their scores."""
        files = []
        for spec in SPECS:
            half = spec.num_embeddings // 2
            for start, stop in ((0, half), (half, spec.num_embeddings)):
                key = self.key(f"snapshot/{spec.name.replace('/', '.')}-{start}.safetensors")
                stored = write_arrays(self.storage, key, {f"{spec.name}/weight": self.state.tables[spec.name][start:stop]})
                files.append(TableFile(table=spec.name, file=self.entry(stored), row_start=start, row_stop=stop))
        rows = random_rows(np.random.default_rng(99), 64)
        buffer = io.BytesIO()
        table = pa.table(columns_of(rows))
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
        probes = ProbeRows(
            rows=self.write_file("snapshot/probes.arrow", buffer.getvalue()),
            scores={"logits": [float(score) for score in self.state.scores(rows)]},
        )
        fields: dict[str, Any] = {
            "model": "click",
            "checkpoint_step": 500,
            "checkpoint_term": 1,
            "checkpoint_digest": "0" * 64,
            "examples": 1000,
            "created_at": CLOCK_ZERO,
            "watermark": CLOCK_ZERO - 100,
            "boundary": None,
            "features": feature_set().spec(),
            "inputs": INPUTS,
            "outputs": ["logits", "probs"],
            "tables": list(SPECS),
            "table_files": files,
            "dense": self.entry(write_arrays(self.storage, self.key("snapshot/dense.safetensors"), self.state.dense())),
            "program": self.write_file("snapshot/program.pt2", self.archive),
            "pipeline": self.write_file("snapshot/pipeline.config", b"{}"),
            "probes": probes,
        }
        manifest = SnapshotManifest(**{**fields, **changes})
        self.storage.write(self.key(layout.SNAPSHOT), manifest.to_bytes())
        self.digest = manifest.digest()
        self.states[0, 0] = self.state.copy()
        return self

    def release(self, *, term: int = 1, dense: bool = True, everything: bool = False, **changes: Any) -> ReleaseManifest:
        """Commit a release of random upserts, some deletes and, with `dense`, new weights. `everything`: all rows change."""
        self.sequence += 1
        generator = np.random.default_rng((self.seed, self.sequence))
        folder = layout.segments(term, self.sequence)
        files: list[FileEntry] = []
        segments: list[SegmentEntry] = []
        for spec in SPECS:
            arrays = self._change(spec, generator, everything)
            key = f"{folder}/{spec.name.replace('/', '.')}.safetensors"
            files.append(self.entry(write_arrays(self.storage, self.key(key), arrays)))
            upserts, deletes = len(arrays[f"{spec.name}/ids"]), len(arrays[f"{spec.name}/deleted"])
            segments.append(SegmentEntry(table=spec.name, file=key, upserts=upserts, deletes=deletes))
        weights = None
        if dense:
            self.state.weight = generator.integers(-3, 4, WIDTH).astype(np.float64)
            self.state.bias = float(generator.integers(1000))
            weights = self.entry(write_arrays(self.storage, self.key(f"{folder}/dense.safetensors"), self.state.dense()))
            files.append(weights)
        fields: dict[str, Any] = {
            "sequence": self.sequence,
            "term": term,
            "cut": self.sequence,
            "run_id": "run",
            "nonce": f"{self.sequence}",
            "snapshot_digest": self.digest,
            "step": 10 * self.sequence,
            "examples": 100 * self.sequence,
            "watermark": CLOCK_ZERO + self.sequence,
            "segments": segments,
            "files": files,
            "dense": weights,
            "splits": [],
            "stages": Stages(
                newest_event_at=CLOCK_ZERO - 2,
                cut_at=CLOCK_ZERO,
                written_at=CLOCK_ZERO,
                gated_at=CLOCK_ZERO,
                committed_at=CLOCK_ZERO,
            ),
        }
        manifest = ReleaseManifest(**{**fields, **changes})
        self.states[term, self.sequence] = self.state.copy()
        self.storage.write(self.key(layout.release(self.sequence)), manifest.to_bytes())
        self.storage.write(self.key(layout.CURRENT), self._hint(manifest).to_bytes())
        return manifest

    def deploy(self, number: int, pin: tuple[int, int] | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "number": number,
            "lineage": self.folder,
            "snapshot_digest": self.digest,
            "pin_term": pin[0] if pin else None,
            "pin_sequence": pin[1] if pin else None,
            "created_at": CLOCK_ZERO,
            "nonce": "n",
            "reason": "test",
        }
        self.storage.write(layout.deployment(number), Deployment(**{**fields, **changes}).to_bytes())

    def _change(self, spec: TableSpec, generator: np.random.Generator, everything: bool) -> dict[str, np.ndarray]:
        count = spec.num_embeddings if everything else 7
        ids = np.sort(generator.permutation(spec.num_embeddings)[:count]).astype(np.int64)
        deleted, ids = (ids[:0], ids) if everything else (ids[::3], np.delete(ids, np.s_[::3]))
        rows = whole_rows(generator, len(ids), spec.embedding_dim)
        self.state.tables[spec.name][ids] = rows
        self.state.tables[spec.name][deleted] = 0
        return {f"{spec.name}/ids": ids, f"{spec.name}/rows": rows, f"{spec.name}/deleted": deleted}

    def _hint(self, manifest: ReleaseManifest) -> CurrentHint:
        return CurrentHint(
            version=str(manifest.sequence),
            checkpoint_step=manifest.step,
            data_timestamp=None,
            created_at="",
            sequence=manifest.sequence,
            term=manifest.term,
        )


LineageMaker = Callable[..., Lineage]


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def new_lineage(root: LocalStorage, archive: bytes) -> LineageMaker:
    """Makes lineages below the root, by date and seed, with their snapshot written."""

    def make(date: str = "20240101", seed: int = 0, **changes: Any) -> Lineage:
        return Lineage(root, layout.lineage(date), archive, seed).snapshot(**changes)

    return make
