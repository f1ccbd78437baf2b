"""A source's splits as rank 0 finds them, so that all ranks divide the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, TypeVar

from tidemill.contracts.progress import SplitState
from tidemill.data.source import Source
from tidemill.data.split import Split, SplitId
from tidemill.jobs.start import Sharing, from_rank_zero

T = TypeVar("T")

_POLL_S = 1.0


def discover(source: Source, agreement: Sharing, rank: int, *, saved: Sequence[SplitState] = ()) -> list[Split]:
    """A source's splits as rank 0 finds them, so that all ranks divide the same ones. Collective.

    `saved`: what an earlier run says of them. Raises SourceChangedError, on every rank, if they aren't what they were then.
    """

    return share_splits(agreement, rank, lambda: source.resume(saved) if saved else source.discover())


def share_splits(agreement: Sharing, rank: int, find: Callable[[], Sequence[Split]]) -> list[Split]:
    """The splits that `find` gives on rank 0, or its error, on every rank. Collective."""
    return [_from_json(value) for value in _patiently(agreement, rank, lambda: [_to_json(split) for split in find()])]


def _patiently(agreement: Sharing, rank: int, compute: Callable[[], T]) -> T:
    """What `compute` gives on rank 0, or its error, on every rank, however long it takes: sessions of a table may take minutes,
    and the other ranks' collectives would time out."""
    with ThreadPoolExecutor(1, "discover") as pool:
        working = pool.submit(compute) if rank == 0 else None

        def look() -> dict[str, Any]:
            assert working is not None
            done, _ = wait([working], timeout=_POLL_S)
            return {"found": working.result()} if done else {}

        while True:
            answer = from_rank_zero(agreement, rank, look)
            if answer:
                return answer["found"]


def _to_json(split: Split) -> dict[str, Any]:
    return {**asdict(split), "id": [split.id.kind, split.id.name]}


def _from_json(value: dict[str, Any]) -> Split:
    return Split(**{**value, "id": SplitId(*value["id"])})
