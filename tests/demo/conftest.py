from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from tidemill.contracts import layout
from tidemill.contracts.lineage import TermRecord
from tidemill.contracts.progress import ROW_BITS, SplitState
from tidemill.contracts.release import ReleaseManifest, Stages
from tidemill.demo.plan import TOPIC
from tidemill.demo.playlog import IMPRESSION_SCHEMA
from tidemill.storage.backends.local import LocalStorage


class RootWriter:
    """Writes step logs and releases as trainers would, with times that a test chooses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = LocalStorage(path)

    def steps(self, folder: str, run_id: str, term: int, steps: list[tuple[int, float, list[list[Any]]]]) -> None:
        """`steps`: (step, at, runs as in the step log)."""
        record = TermRecord(term=term, run_id=run_id, nonce="n", created_at=0.0)
        self.storage.write(f"{folder}/{layout.term(term)}", record.to_bytes())
        lines = [orjson.dumps({"step": step, "at": at, "runs": runs}) + b"\n" for step, at, runs in steps]
        self.storage.write(f"{folder}/{layout.run(run_id)}/{layout.step_log(0)}", b"".join(lines))

    def release(self, lineage: str, sequence: int, offsets: dict[int, int], cut_at: float, *, term: int = 1) -> None:
        """A release that covers each partition up to an offset; written 0.1 s after its cut, committed 0.2 s after that."""
        splits = [
            SplitState(kind="kafka", split=f"{TOPIC}:{p}", intervals=[(0, stop << ROW_BITS)] if stop else [], fingerprint={})
            for p, stop in offsets.items()
        ]
        manifest = ReleaseManifest(
            sequence=sequence,
            term=term,
            cut=sequence,
            run_id=f"run{term}",
            nonce="n",
            snapshot_digest="d",
            step=sequence,
            examples=0,
            watermark=None,
            segments=[],
            files=[],
            dense=None,
            splits=splits,
            stages=Stages(cut_at=cut_at, written_at=cut_at + 0.1, gated_at=cut_at + 0.2, committed_at=cut_at + 0.3),
        )
        self.storage.write(f"{lineage}/{layout.release(sequence)}", manifest.to_bytes())


def kafka_run(partition: int, first: int, rows: int) -> list[Any]:
    """One-row messages at consecutive offsets, as the step log has them."""
    return ["kafka", f"{TOPIC}:{partition}", first << ROW_BITS, (first + rows) << ROW_BITS, rows, 1 << ROW_BITS, 0]


def impressions(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([{"produced_at": 0.0, "delivered_at": 0.0, **row} for row in rows], IMPRESSION_SCHEMA)


@pytest.fixture
def root(tmp_path: Path) -> RootWriter:
    return RootWriter(tmp_path / "root")
