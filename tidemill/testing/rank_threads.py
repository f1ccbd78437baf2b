"""Ranks as threads of one process, with an agreement in memory: for tests of what ranks decide, without torch.distributed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import orjson

from tidemill.cadence import RankReport
from tidemill.errors import PeerLostError

T = TypeVar("T")

TIMEOUT_S = 20.0
"""How long a rank waits for the others, in real seconds: a test that runs into it is out of step."""


class ThreadGroup:
    """What the ranks of one run share. The n-th value of a channel on one rank belongs to the n-th on every other rank."""

    def __init__(self, world_size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._values: dict[str, list[list[Any]]] = defaultdict(lambda: [[] for _ in range(world_size)])
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def give(self, channel: str, rank: int, value: Any) -> int:
        """Add this rank's next value to a channel, without waiting; returns its index."""
        with self._changed:
            mine = self._values[channel][rank]
            mine.append(value)
            self._changed.notify_all()
            return len(mine) - 1

    def collect(self, channel: str, index: int) -> list[Any]:
        """All ranks' values of an index, in rank order. Raises PeerLostError if one is gone, or doesn't come in time."""
        with self._changed:
            values = self._values[channel]
            self._changed.wait_for(lambda: self._gone or all(len(mine) > index for mine in values), self._timeout_s)
            late = [rank for rank, mine in enumerate(values) if len(mine) <= index]
            if late:
                raise PeerLostError(f"{channel} {index}: nothing from ranks {late} (gone: {sorted(self._gone)})")
            return [mine[index] for mine in values]

    def gather(self, channel: str, rank: int, value: Any) -> list[Any]:
        """`give` and `collect`: what a collective does."""
        return self.collect(channel, self.give(channel, rank, value))

    def leave(self, rank: int) -> None:
        """The rank has ended: whoever waits for it waits no longer."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class ThreadPending:
    """A gather in flight (`training.loop.Pending`)."""

    def __init__(self, group: ThreadGroup, index: int) -> None:
        self._group = group
        self._index = index

    def wait(self) -> list[RankReport]:
        return [RankReport.from_array(array) for array in self._group.collect("reports", self._index)]


class ThreadAgreement:
    """One rank's agreement (`training.loop.Agreement`, `jobs.ranks.Agreement`); reports travel as arrays, as between processes."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def issue(self, report: RankReport) -> ThreadPending:
        array: np.ndarray = report.to_array()
        return ThreadPending(self._group, self._group.give("reports", self._rank, array))

    def collect(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Every rank's named arrays, in rank order."""
        return self._group.gather("arrays", self._rank, {name: array.copy() for name, array in arrays.items()})

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; what the others pass is ignored. Collective."""
        return orjson.loads(self._group.gather("shared", self._rank, orjson.dumps(value))[0])


class Result(Generic[T]):
    """How a rank ended: `value`, or `error`."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None


def run_threads(world_size: int, function: Callable[[ThreadGroup, int], T]) -> list[Result[T]]:
    """`function(group, rank)` on every rank at once; how each ended, in rank order."""
    group = ThreadGroup(world_size)
    results: list[Result[T]] = [Result() for _ in range(world_size)]

    def run(rank: int) -> None:
        try:
            results[rank].value = function(group, rank)
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to the caller
            results[rank].error = error
        finally:
            group.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
