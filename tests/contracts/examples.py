"""One instance of every document, with all that it may hold."""

from __future__ import annotations

from tidemill.contracts.base import Document
from tidemill.contracts.checkpoint import CheckpointManifest, CheckpointPart, FoldPart, ParentCheckpoint, RankState
from tidemill.contracts.files import FileEntry, TableFile, TableSpec
from tidemill.contracts.lineage import Deployment, LineageRecord, RunRecord, TermRecord
from tidemill.contracts.output import OutputManifest
from tidemill.contracts.progress import DataloaderState, ProgressReport, SplitState, WindowFigures
from tidemill.contracts.release import CurrentHint, CutPart, ReleaseManifest, SegmentEntry, Stages
from tidemill.contracts.serving import ServingStatus
from tidemill.contracts.snapshot import PooledLookup, ProbeRows, ProgramInputs, SequenceInput, SnapshotManifest, StepLookup

RUN = "20240102T030405678-9f1c2a"
NONCE = "5d41402abc4b2a76b9719d911017c592"
AT = 1704164645.25
WATERMARK = 1704164640.0
BOUNDARY = 1704153600.0
TABLE = TableSpec(name="pooled/user_id", num_embeddings=1000, embedding_dim=16)


def entry(key: str) -> FileEntry:
    return FileEntry(key=key, size=4096, sha256="ab" * 32)


WEIGHTS = TableFile(table=TABLE.name, file=entry("model.ckpt-200/00000002/weights.safetensors"), row_start=0, row_stop=1000)
OPTIMIZER = TableFile(table=TABLE.name, file=entry("model.ckpt-200/00000002/optimizer.safetensors"), row_start=0, row_stop=1000)
SPLIT = SplitState(
    kind="kafka",
    split="clicks:0",
    intervals=[(0, 2097152), (3145728, 4194304)],
    fingerprint={"cluster": "c", "earliest": 0, "topic_id": None},
    max_event_time=WATERMARK,
)
FILE_SPLIT = SplitState(kind="parquet", split="day/a.parquet", intervals=[], num_rows=100, fingerprint={"size": 12345})
RANK_STATE = RankState(rank=0, arrays=entry("model.ckpt-200/00000002/state.safetensors"), values={"cursor": {"sequence": 7}})
SEGMENT = SegmentEntry(table=TABLE.name, file="segments/00000002/00000005/rows-00000.safetensors", upserts=12, deletes=1)
STAGES = Stages(newest_event_at=AT - 1, cut_at=AT, written_at=AT + 0.25, gated_at=AT + 0.5, committed_at=AT + 0.75)

EXAMPLES: tuple[Document, ...] = (
    CheckpointPart(
        table_files=[WEIGHTS],
        optimizer_files=[OPTIMIZER],
        files={"dense": entry("model.ckpt-200/00000002/dense.safetensors")},
        splits=[SPLIT, FILE_SPLIT],
        state=RANK_STATE,
        damage=None,
    ),
    FoldPart(table_files=[WEIGHTS], optimizer_files=[OPTIMIZER]),
    CheckpointManifest(
        step=200,
        term=2,
        run_id=RUN,
        nonce=NONCE,
        created_at=AT,
        world_size=1,
        examples=123456,
        tables=[TABLE],
        table_files=[WEIGHTS],
        optimizer_files=[OPTIMIZER],
        increments=0,
        files={"dense": entry("model.ckpt-200/00000002/dense.safetensors"), "pipeline": entry("model.ckpt-200/00000002/pipeline")},
        rank_states=[RANK_STATE],
        watermark=WATERMARK,
        parent=ParentCheckpoint(url="file:///root/daily/20240101", step=100, digest="cd" * 32, examples=100000),
        state={"passes_completed": 0, "schedule": {"steps": 200}},
    ),
    DataloaderState(passes_completed=1, splits=[SPLIT, FILE_SPLIT], watermark=WATERMARK),
    ProgressReport(
        data_ts=WATERMARK,
        run_id=RUN,
        term=2,
        heartbeat=17,
        step=200,
        released_watermark=WATERMARK - 5,
        handover_mark=WATERMARK - 60,
        metrics={"auc": 0.75},
        windows=[WindowFigures(start=1704157200.0, stop=1704160800.0, rows=5000, metrics={"auc": 0.75, "calibration": 1.01})],
    ),
    TermRecord(term=2, run_id=RUN, nonce=NONCE, created_at=AT),
    RunRecord(
        run_id=RUN,
        kind="train_stream",
        date="20240102",
        status="retired",
        reason="handed_over",
        exit_code=0,
        pid=4242,
        world_size=2,
        term=2,
        resumed_term=1,
        resumed_step=150,
        started_at=AT - 3600,
        ended_at=AT,
        heartbeat=1800,
        step=200,
        examples=123456,
        watermark=WATERMARK,
        checkpoint="model.ckpt-200/manifest-00000002.json",
        sequence=8,
        boundary=BOUNDARY,
        successor="lineages/20240103",
        details={"rows_dropped": 3},
    ),
    LineageRecord(
        date="20240102",
        status="retired",
        boundary=BOUNDARY,
        successor="lineages/20240103",
        retired_at=AT,
        handover_lag_s=1.5,
        last_sequence=8,
    ),
    Deployment(
        number=3,
        lineage="lineages/20240102",
        snapshot_digest="ef" * 32,
        pin_term=2,
        pin_sequence=8,
        created_at=AT,
        nonce=NONCE,
        reason="rollback",
    ),
    OutputManifest(rows=150, files=[entry("part-00000.parquet"), entry("part-00001.parquet")]),
    CutPart(
        rank=0,
        term=2,
        cut=5,
        step=200,
        segments=[SEGMENT],
        files=[entry(SEGMENT.file)],
        splits=[SPLIT],
        event_time=WATERMARK,
        dense=entry("segments/00000002/00000005/dense.safetensors"),
        probe_scores={"probs": [0.25, 0.5]},
        newest_event_at=AT - 1,
    ),
    ReleaseManifest(
        sequence=8,
        term=2,
        cut=5,
        run_id=RUN,
        nonce=NONCE,
        snapshot_digest="ef" * 32,
        step=200,
        examples=123456,
        watermark=WATERMARK,
        segments=[SEGMENT],
        files=[entry(SEGMENT.file)],
        dense=None,
        splits=[SPLIT],
        stages=STAGES,
    ),
    CurrentHint(
        version="00000008",
        checkpoint_step=200,
        data_timestamp=WATERMARK,
        created_at="2024-01-02T03:04:05Z",
        sequence=8,
        term=2,
    ),
    ServingStatus(
        server="server-1",
        url="http://127.0.0.1:8000",
        heartbeat=99,
        ready=True,
        deployment=3,
        lineage="lineages/20240102",
        snapshot_digest="ef" * 32,
        term=2,
        sequence=8,
        step=200,
        watermark=WATERMARK,
        swapped_at=AT,
        error="Grüße: unreadable",
        updated_at=AT + 1,
    ),
    SnapshotManifest(
        model="multi_tower_din",
        checkpoint_step=100,
        checkpoint_term=1,
        checkpoint_digest="cd" * 32,
        examples=100000,
        created_at=AT,
        watermark=None,
        boundary=BOUNDARY,
        features={"columns": ["user_id"], "hash": "std"},
        inputs=ProgramInputs(
            num_dense=3,
            pooled=[PooledLookup(feature="user_id", table=TABLE.name, pooling="sum")],
            sequences=[
                SequenceInput(
                    group="history",
                    query=[StepLookup(feature="item_id", table="sequence/item_id")],
                    steps=[StepLookup(feature="clicks__item_id", table="sequence/item_id")],
                    max_steps=50,
                )
            ],
        ),
        outputs=["probs"],
        tables=[TABLE],
        table_files=[TableFile(table=TABLE.name, file=entry("snapshot/tables/pooled/user_id-00000.safetensors"))],
        dense=entry("snapshot/dense.safetensors"),
        program=entry("snapshot/program.pt2"),
        pipeline=entry("snapshot/pipeline.config"),
        probes=ProbeRows(rows=entry("snapshot/probes.arrow"), scores={"probs": [0.25, 0.5]}),
    ),
)
