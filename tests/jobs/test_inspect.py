from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.contracts import layout
from tidemill.contracts.output import OutputManifest
from tidemill.contracts.progress import FILE_ROW_BITS, DataloaderState, ProgressReport, SplitState
from tidemill.errors import NotFoundError
from tidemill.jobs.inspect import Inspection, inspect
from tidemill.lineage.deployments import deploy
from tidemill.storage.backends.local import LocalStorage


def text(found: Inspection) -> str:
    """All that is shown, a line a row."""
    return "\n".join(" | ".join(row) for section in found.sections for row in [(section.title,), *section.rows])


@pytest.fixture
def root(life, tmp_path: Path) -> Path:
    return Path(shutil.copytree(life.root, tmp_path / "root"))


def newest_file(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[-1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # it may be linked elsewhere
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (lambda life: life.root, "root"),
        (lambda life: life.daily, "job"),
        (lambda life: life.lineage, "lineage"),
        (lambda life: life.lineage / "model.ckpt-14", "checkpoint"),
        (lambda life: newest_file(life.lineage, "model.ckpt-14/manifest-*.json"), "tidemill.checkpoint/2"),
        (lambda life: newest_file(life.lineage, "model.ckpt-14/*/*/dataloader_state.json"), "tidemill.dataloader_state/1"),
        (lambda life: newest_file(life.lineage, "runs/*"), "run"),
        (lambda life: newest_file(life.lineage, "runs/*/record.json"), "tidemill.run/1"),
        (lambda life: life.lineage / "snapshot.json", "tidemill.snapshot/2"),
        (lambda life: newest_file(life.lineage, "releases/*.json"), "tidemill.release/1"),
        (lambda life: life.lineage / "dense_hot_export/current.json", "tidemill.current/1"),
        (lambda life: life.lineage / "lineage.json", "tidemill.lineage/1"),
        (lambda life: newest_file(life.lineage, "terms/*.json"), "tidemill.term/1"),
    ],
)
def test_everything_of_a_healthy_life_is_known_and_without_fault(life, of: Callable, kind: str) -> None:
    found = inspect(str(of(life)))
    assert (found.kind, found.faults) == (kind, [])
    assert found.sections


def test_a_lineage_shows_terms_head_checkpoints_runs_and_disk_use(life) -> None:
    found = inspect(str(life.lineage))
    titles = [section.title for section in found.sections]
    for title in ("snapshot", "terms", "checkpoints", "head", "progress", "runs", "disk use"):
        assert title in titles
    assert "kafka | events:0 | 0 to 224 | from 224" in text(found)
    assert "step | 14" in text(found)
    assert found.files_checked > 20


def test_what_is_left_of_each_split_is_shown(tmp_path: Path) -> None:
    state = DataloaderState(
        passes_completed=1,
        splits=[
            SplitState(kind="kafka", split="t:0", intervals=[(5 << 20, (9 << 20) + 3)], fingerprint={}),
            SplitState(kind="kafka", split="t:1", intervals=[], fingerprint={}),
            SplitState(kind="kafka", split="t:2", intervals=[], fingerprint={"start": 7, "end": 12}),
            SplitState(kind="kafka", split="t:3", intervals=[(7 << 20, 9 << 20)], fingerprint={"start": 7, "end": 12}),
            SplitState(kind="kafka", split="t:4", intervals=[(7 << 20, 12 << 20)], fingerprint={"start": 7, "end": 12}),
            SplitState(kind="parquet", split="a", intervals=[(0, 1000), (1500, 2000)], num_rows=3000, fingerprint={}),
            SplitState(kind="parquet", split="b", intervals=[(0, 10)], num_rows=10, fingerprint={}),
        ],
        watermark=1704240000.5,
    )
    (tmp_path / layout.DATALOADER_STATE).write_bytes(state.to_bytes())
    shown = text(inspect(str(tmp_path / layout.DATALOADER_STATE)))
    assert "kafka | t:0 | 5 to 9+3 | from 9+3" in shown
    assert "kafka | t:1 | nothing | all" in shown
    assert "kafka | t:2 | nothing | 7 to 12" in shown
    assert "kafka | t:3 | 7 to 9 | 9 to 12" in shown
    assert "kafka | t:4 | 7 to 12 | nothing" in shown
    assert "parquet | a | 1,500 of 3,000 rows | 1,500 rows: 1,000 to 1,500, 2,000 to 3,000" in shown
    assert "parquet | b | 10 of 10 rows | nothing" in shown
    assert "2024-01-03 00:00:00 (1704240000.5)" in shown


def test_files_of_a_streamed_folder_are_shown_by_their_names(tmp_path: Path) -> None:
    files = {"a.parquet": [0, 9], "b.parquet": [1, 9], "c.parquet": [3, 9]}
    fingerprint = {"num_splits": 1, "next": 4, "files": files}  # number 2 has left the folder
    done = [(0, (1 << FILE_ROW_BITS) + 70), (2 << FILE_ROW_BITS, 3 << FILE_ROW_BITS)]
    split = SplitState(kind="folder", split="/drop:0", intervals=done, fingerprint=fingerprint)
    fresh = SplitState(kind="folder", split="/drop:1", intervals=[], fingerprint={"num_splits": 1})
    state = DataloaderState(passes_completed=0, splits=[split, fresh], watermark=None)
    (tmp_path / "dataloader_state.json").write_bytes(state.to_bytes())
    shown = text(inspect(str(tmp_path / "dataloader_state.json")))
    assert "/drop:0 | 2 files | b.parquet from row 70, c.parquet from row 0, what appears" in shown
    assert "/drop:1 | 0 files | what appears" in shown


@pytest.mark.parametrize("progress", [b'{"data_ts": 1704240000.0}', ProgressReport(data_ts=1704240000.0, step=3).to_bytes()])
def test_a_progress_file_may_be_foreign(tmp_path: Path, progress: bytes) -> None:
    (tmp_path / layout.PROGRESS).write_bytes(progress)
    found = inspect(str(tmp_path / layout.PROGRESS))
    assert (found.kind, found.faults) == ("tidemill.progress/1", [])
    assert "2024-01-03 00:00:00" in text(found)


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b'{"data_ts": "soon"}', b'{"schema": "tidemill.nothing/1"}', b'{"schema": "tidemill.term/1"}']
)
def test_what_is_not_a_document_is_one_fault(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    (fault,) = inspect(str(tmp_path / "x.json")).faults
    assert "x.json" in fault


def test_a_flipped_bit_is_found_and_its_file_is_named(lineage: Path) -> None:
    table = newest_file(lineage, "model.ckpt-14/*/*/tables/pooled/item*.safetensors")
    segment = newest_file(lineage, "segments/*/*/rank-*.safetensors")
    program = newest_file(lineage, "snapshot/*/program.pt2")
    for path in (table, segment, program):
        flip(path)
    faults = inspect(str(lineage)).faults
    assert len(faults) == 3
    for path in (table, segment, program):
        assert any(str(path.relative_to(lineage)) in fault for fault in faults)
    assert "14 | 3 |" in text(inspect(str(lineage)))
    assert "torn" in text(inspect(str(lineage)))


def test_a_missing_or_shorter_file_is_found(lineage: Path) -> None:
    newest_file(lineage, "model.ckpt-4/*/*/dense.safetensors").unlink()
    state = newest_file(lineage, "model.ckpt-4/*/*/dataloader_state.json")
    state.write_bytes(state.read_bytes()[:-5])
    faults = inspect(str(lineage / "model.ckpt-4")).faults
    assert any("dense.safetensors: listed, but isn't there" in fault for fault in faults)
    assert any("dataloader_state.json" in fault and "bytes, where its manifest says" in fault for fault in faults)


def test_a_checkpoint_without_a_manifest_was_never_committed(lineage: Path) -> None:
    newest_file(lineage, "model.ckpt-4/manifest-*.json").unlink()
    (fault,) = inspect(str(lineage / "model.ckpt-4")).faults
    assert "never committed" in fault


def test_a_gap_or_a_foreign_release_is_found(lineage: Path) -> None:
    (lineage / layout.release(2)).unlink()
    release = lineage / layout.release(3)
    body = json.loads(release.read_text())
    release.write_text(json.dumps({**body, "snapshot_digest": "f" * 64, "term": 0}))
    faults = inspect(str(lineage)).faults
    assert "releases: 2 is missing" in faults
    assert any("builds on snapshot ffffffffffff" in fault for fault in faults)
    assert any("term 0 is lower" in fault for fault in faults)


def test_a_root_shows_deployments_and_takes_on_the_faults_inside(root: Path) -> None:
    snapshot = root / "lineages/20240102/snapshot.json"
    deploy(LocalStorage(root), "lineages/20240102", hashlib.sha256(snapshot.read_bytes()).hexdigest(), "test")
    found = inspect(str(root))
    assert found.faults == []
    assert "1 | lineages/20240102 |" in text(found)
    snapshot.write_bytes(snapshot.read_bytes().replace(b'"multi_tower"', b'"other"'))
    flip(newest_file(root, "daily/*/model.ckpt-*/*/*/dense.safetensors"))
    faults = inspect(str(root)).faults
    assert any("deploys snapshot" in fault for fault in faults)
    assert any(fault.startswith("daily/20240102: ") for fault in faults)


def test_an_output_must_hold_what_it_lists_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / layout.SUCCESS).write_bytes(OutputManifest(rows=0, files=[]).to_bytes())
    assert inspect(str(tmp_path)).faults == []
    (tmp_path / "part-00000.parquet").write_bytes(b"")
    assert inspect(str(tmp_path)).faults == ["part-00000.parquet: isn't listed in _SUCCESS"]


def test_a_path_may_be_relative_or_a_url(life, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = inspect(str(life.lineage / "model.ckpt-14"))
    monkeypatch.chdir(life.lineage)
    for path in ("model.ckpt-14", "./model.ckpt-14/", f"{life.lineage.as_uri()}/model.ckpt-14"):
        found = inspect(path)
        assert (found.kind, found.faults, found.files_checked) == ("checkpoint", [], expected.files_checked)
    assert inspect(".").kind == "lineage"
    assert inspect("snapshot.json").faults == []


def test_what_is_nothing_of_ours_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        inspect(str(tmp_path / "nowhere"))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("")
    with pytest.raises(NotFoundError, match="isn't a root"):
        inspect(str(tmp_path / "x"))


def test_it_needs_no_torch() -> None:
    code = "import sys, tidemill.jobs.inspect; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], start_new_session=True, timeout=60, check=False).returncode == 0
