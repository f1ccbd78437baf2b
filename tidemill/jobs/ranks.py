"""Work that ranks do side by side and that may take longer than a collective may: an error on one of them ends it on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from tidemill import errors
from tidemill.errors import PeerLostError, TidemillError

_TICK_S = 0.5
"""How often ranks tell each other that they are still at work; far below the time that a collective may take."""


class Agreement(Protocol):
    """What ranks need in order to talk: `distributed.agreement.Agreement`."""

    def collect(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]: ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among its peers."""

    rank: int
    world_size: int
    agreement: Agreement


def exchange(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order. Collective."""
    mine = {"json": np.frombuffer(orjson.dumps(value), dtype=np.uint8)}
    return [orjson.loads(arrays["json"].tobytes()) for arrays in ranks.agreement.collect(mine)]


def together(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """What `work` gives (JSON) on every rank, in rank order. Collective; ranks that are done wait for the others, however long.

    The work runs on a thread of its own and must end by itself. An error of one rank is raised on every rank, once its own work
    has ended; so is PeerLostError.
    """
    job = _Job(work)
    while True:
        job.wait(_TICK_S)
        try:
            answers = exchange(ranks, job.answer())
        except PeerLostError:
            job.wait(threading.TIMEOUT_MAX)
            raise
        if any("error" in answer for answer in answers):
            job.wait(threading.TIMEOUT_MAX)
            raise_failure(answers, ranks.rank, job.error)
        if all("value" in answer for answer in answers):
            return [answer["value"] for answer in answers]


def lead(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """What `work` gives on rank 0 (JSON), on every rank; the others wait for it as `together` does. Collective."""
    return together(ranks, work if ranks.rank == 0 else _nothing)[0]


def failure(error: TidemillError | None) -> dict[str, Any]:
    """What other ranks are told of an error; nothing if there is none."""
    return {} if error is None else {"error": type(error).__name__, "message": str(error)}


def raise_failure(answers: Sequence[dict[str, Any]], rank: int, own: BaseException | None) -> None:
    """Raise this rank's own error, else the first that another one told of, if there is any."""
    if own is not None:
        raise own
    for other, answer in enumerate(answers):
        if "error" in answer:
            where = "" if other == rank else f"rank {other}: "
            raise getattr(errors, answer["error"], TidemillError)(f"{where}{answer['message']}")


class _Job:
    """A piece of work on its own thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self.error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="rank-work", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        self._done.wait(timeout_s)

    def answer(self) -> dict[str, Any]:
        """What the others are told: nothing yet, the value, or the error. Raises a defect: this rank's end tells the others."""
        if not self._done.is_set():
            return {}
        if isinstance(self.error, TidemillError):
            return failure(self.error)
        if self.error is not None:
            raise self.error
        return {"value": self._value}

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to the caller
            self.error = error
        self._done.set()


def _nothing() -> None:
    return
