"""A source's splits as rank 0 finds them, so that all ranks divide the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.contracts.progress import SplitState
from tidemill.data.progress import verify_splits
from tidemill.data.source import Source
from tidemill.data.split import Split, SplitId
from tidemill.jobs.start import from_rank_zero

if TYPE_CHECKING:
    from tidemill.distributed.agreement import Agreement


def discover(source: Source, agreement: Agreement, rank: int, *, saved: Sequence[SplitState] = ()) -> list[Split]:
    """A source's splits as rank 0 finds them, so that all ranks divide the same ones. Collective.

    `saved`: what an earlier run says of them. Raises SourceChangedError, on every rank, if they aren't what they were then.
    """

    def look() -> list[dict[str, Any]]:
        splits = source.discover()
        if saved:
            splits = verify_splits(source, splits, saved)
        return [{"kind": s.id.kind, "name": s.id.name, "num_rows": s.num_rows, "fingerprint": s.fingerprint} for s in splits]

    found = from_rank_zero(agreement, rank, look)
    return [Split(SplitId(s["kind"], s["name"]), s["num_rows"], s["fingerprint"]) for s in found]
