"""Lineages, terms, runs and deployments: what the daily cycle writes down."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from tidemill.contracts.base import Document

RunKind = Literal["train_daily", "train_stream", "export", "train", "evaluate", "predict", "serve", "deploy", "cycle"]
RunStatus = Literal["running", "completed", "retired", "interrupted", "failed"]


class TermRecord(Document):
    """`terms/<n>.json`, created exclusively by a run before it reads any checkpoint of the folder."""

    schema_name: ClassVar[str] = "term"

    term: int
    run_id: str
    nonce: str
    created_at: float


class RunRecord(Document):
    """`runs/<run>/record.json`: rewritten while the run goes on, final when `ended_at` is set."""

    schema_name: ClassVar[str] = "run"

    run_id: str
    kind: RunKind
    date: str | None = None
    status: RunStatus
    reason: str | None = None
    """Why it ended: exhausted, step_limit, handed_over, preempted, failed."""
    error: str | None = None
    exit_code: int | None = None
    pid: int | None = None
    world_size: int = 1
    term: int | None = None
    resumed_term: int | None = None
    resumed_step: int | None = None
    """The checkpoint of this folder, by term and step, that the run went on from; None: it began here."""
    started_at: float
    ended_at: float | None = None
    heartbeat: int = 0
    step: int | None = None
    examples: int | None = None
    watermark: float | None = None
    checkpoint: str | None = None
    """Key of the newest checkpoint's manifest."""
    sequence: int | None = None
    """Newest committed release."""
    boundary: float | None = None
    successor: str | None = None
    details: dict[str, Any] = Field(default_factory=dict)
    """Figures for people: rows per second, dropped rows, late rows."""


class LineageRecord(Document):
    """`lineage.json`: the state of one lineage. A retired lineage refuses to start."""

    schema_name: ClassVar[str] = "lineage"

    date: str | None = None
    status: Literal["open", "retired"]
    boundary: float | None = None
    successor: str | None = None
    retired_at: float | None = None
    handover_lag_s: float | None = None
    last_sequence: int | None = None


class Deployment(Document):
    """`deployments/<number>.json`, created exclusively; the newest number is what servers should serve.

    `active.json` holds a copy as a hint. A rollback is a new number with a pin.
    """

    schema_name: ClassVar[str] = "deployment"

    number: int
    lineage: str
    """The lineage's folder relative to the root ("lineages/20240102")."""
    snapshot_digest: str
    pin_term: int | None = None
    pin_sequence: int | None = None
    created_at: float
    nonce: str
    reason: str
    run_id: str | None = None
    """The run of the cycle that decided it; None: a person did, and the cycle doesn't undo that."""
