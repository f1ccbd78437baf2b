"""A source's splits as rank 0 finds them, so that all ranks divide the same ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from tidemill.contracts.progress import SplitState
from tidemill.data.source import Source
from tidemill.data.split import Split, SplitId
from tidemill.errors import DeadlineError
from tidemill.jobs.start import Sharing, from_rank_zero

T = TypeVar("T")

_POLL_S = 1.0
# A session of a large table may take a quarter of an hour; sources have deadlines of their own, so this is for one that hangs.
_DEADLINE_S = 3600.0


def discover(source: Source, agreement: Sharing, rank: int, *, saved: Sequence[SplitState] = ()) -> list[Split]:
    """A source's splits as rank 0 finds them, so that all ranks divide the same ones. Collective.

    `saved`: what an earlier run says of them. Raises SourceChangedError, on every rank, if they aren't what they were then.
    """

    return share_splits(agreement, rank, lambda: source.resume(saved) if saved else source.discover())


def share_splits(
    agreement: Sharing, rank: int, find: Callable[[], Sequence[Split]], *, deadline_s: float = _DEADLINE_S
) -> list[Split]:
    """The splits that `find` gives on rank 0, or its error, on every rank; DeadlineError if it gives none in time. Collective."""
    values = _patiently(agreement, rank, lambda: [_to_json(split) for split in find()], deadline_s)
    return [_from_json(value) for value in values]


def _patiently(agreement: Sharing, rank: int, compute: Callable[[], T], deadline_s: float) -> T:
    """What `compute` gives on rank 0, or its error, on every rank, however long it takes up to the deadline: sessions of a table
    may take minutes, and the other ranks' collectives would time out."""
    finished = threading.Event()
    working = _start(compute, finished) if rank == 0 else None
    until = time.monotonic() + deadline_s

    def look() -> dict[str, Any]:
        assert working is not None
        done = finished.wait(min(_POLL_S, deadline_s))
        if not done and time.monotonic() > until:
            raise DeadlineError(f"what there is to read wasn't found within {deadline_s:g} s: the source doesn't answer")
        return {"found": working.result()} if done else {}

    while True:
        answer = from_rank_zero(agreement, rank, look)
        if answer:
            return answer["found"]


def _start(compute: Callable[[], T], finished: threading.Event) -> Future[T]:
    """Run on a thread that nobody has to wait for, also at the end of the process; `finished` is set when there is a result."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(compute())
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever asks for the result
            result.set_exception(error)
        finished.set()

    threading.Thread(target=run, name="discover", daemon=True).start()
    return result


def _to_json(split: Split) -> dict[str, Any]:
    return {**asdict(split), "id": [split.id.kind, split.id.name]}


def _from_json(value: dict[str, Any]) -> Split:
    return Split(**{**value, "id": SplitId(*value["id"])})
