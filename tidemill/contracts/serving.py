"""What a server says about itself, for lineages, orchestrators and people."""

from __future__ import annotations

from typing import ClassVar

from tidemill.contracts.base import Document


class ServingStatus(Document):
    """`serving/<server>.json`, rewritten every poll. Liveness is judged by a change of `heartbeat` on the reader's own clock."""

    schema_name: ClassVar[str] = "serving"

    server: str
    url: str
    heartbeat: int
    ready: bool
    deployment: int | None
    """Number of the deployment that is served; None when a snapshot or lineage folder was named directly."""
    lineage: str | None
    snapshot_digest: str | None
    term: int | None
    sequence: int | None
    step: int | None
    watermark: float | None
    """Event time of the generation that scores."""
    swapped_at: float | None
    error: str | None = None
    """Why a newer deployment or release isn't served."""
    updated_at: float
