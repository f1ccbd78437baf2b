"""One gather a round carries every rank's report (D1). All on the side group, all from the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import safetensors.numpy
import torch
import torch.distributed as dist

from tidemill.cadence import RankReport
from tidemill.distributed.runtime import Runtime, translate_peer_errors


class Pending:
    """A gather in flight."""

    def __init__(self, work: dist.Work, gathered: list[torch.Tensor], waited_for: str) -> None:
        self._work = work
        self._gathered = gathered
        self._waited_for = waited_for

    def wait(self) -> list[RankReport]:
        """All ranks' reports, in rank order. Raises PeerLostError after the runtime's timeout."""
        with translate_peer_errors(self._waited_for):
            self._work.wait()
        return [RankReport.from_array(array.numpy()) for array in self._gathered]


class Agreement:
    """Exchanges small things between ranks. Every method is collective: all ranks must call, in the same order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rounds = 0

    def issue(self, report: RankReport) -> Pending:
        """Start the gather of a round's reports, and return at once. All ranks' reports hold the same number of weights."""
        mine = torch.from_numpy(report.to_array())
        gathered = [torch.empty_like(mine) for _ in range(self._runtime.world_size)]
        waited_for = self._waiting(f"the reports of round {self._rounds}")
        self._rounds += 1
        with translate_peer_errors(waited_for):
            work = dist.all_gather(gathered, mine, group=self._runtime.side, async_op=True)
        assert work is not None
        return Pending(work, gathered, waited_for)

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; what the others pass is ignored."""
        mine = orjson.dumps(value) if self._runtime.rank == 0 else b""
        return orjson.loads(self._gather_bytes(mine, "what rank 0 shares")[0])

    def collect(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Every rank's named arrays, in rank order; shapes may differ between ranks."""
        mine = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        return [safetensors.numpy.load(data) for data in self._gather_bytes(mine, "the arrays of all ranks")]

    def _gather_bytes(self, mine: bytes, what: str) -> list[bytes]:
        world_size, side = self._runtime.world_size, self._runtime.side
        with translate_peer_errors(self._waiting(what)):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=side)
            longest = max(1, *(int(size) for size in sizes))
            # gloo gathers equal sizes only.
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else 0
            gathered = [torch.empty_like(padded) for _ in range(world_size)]
            dist.all_gather(gathered, padded, group=side)
        return [data.numpy()[: int(size)].tobytes() for data, size in zip(gathered, sizes, strict=True)]

    def _waiting(self, what: str) -> str:
        return f"{what} (rank {self._runtime.rank} of {self._runtime.world_size}, {self._runtime.timeout_s:g} s)"
