"""The process's place among its peers: rank, device, and the two groups that carry all collectives."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tidemill.config.env import process_place
from tidemill.errors import PeerLostError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands and how it finds its peers; `init_method` as torch.distributed takes it ("env://", "file:///...")."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """One process's part in a run. Collectives are for the training thread only (D1)."""

    rank: int
    world_size: int
    device: torch.device
    main: dist.ProcessGroup
    """forward, backward"""
    side: dist.ProcessGroup
    """agreement, on the CPU"""
    timeout_s: float
    local_world_size: int = 1
    """ranks on this machine"""

    def close(self) -> None:
        """Leave the groups; without a word to peers, so it returns even if they are gone."""
        if dist.is_initialized():
            dist.destroy_process_group()


def start_runtime(timeout_s: float, place: Place | None = None, num_threads: int | None = None) -> Runtime:
    """Join the run that torchrun (or `place`) describes, or be a run of one process, which uses no network.

    `timeout_s` bounds every collective. `num_threads` of torch, by default this process's share of the cores less one for readers.
    Collective: every rank must call. Raises PeerLostError if the others don't come.
    """
    _quieten()
    place = place or _environment_place()
    local_world_size = place.local_world_size if place else 1
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // local_world_size - 1))
    device = _device(place.local_rank if place else 0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with translate_peer_errors(f"all ranks to join within {timeout_s:g} s"):
        if place is None:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(
                backend, init_method=place.init_method, rank=place.rank, world_size=place.world_size, timeout=timeout
            )
        side = dist.new_group(backend="gloo", timeout=timeout)
    main = dist.group.WORLD
    assert main is not None
    return Runtime(dist.get_rank(), dist.get_world_size(), device, main, side, timeout_s, local_world_size)


@contextmanager
def translate_peer_errors(waited_for: str) -> Iterator[None]:
    """Turn what torch raises when a peer is late or gone into PeerLostError that says what was waited for."""
    try:
        yield
    except dist.DistError as error:
        raise PeerLostError(f"waited for {waited_for}: {error}") from error
    except RuntimeError as error:
        # gloo has no type of its own for a lost peer; its messages name its source file.
        if "gloo" not in str(error) and "Timed out" not in str(error):
            raise
        raise PeerLostError(f"waited for {waited_for}: {error}") from error


def _quieten() -> None:
    """Keep what torch and TorchRec say about each other's interfaces off people's terminals; none of it can be acted upon here."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    for module in (r"torchrec\.", r"torch\.distributed\."):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)


def _environment_place() -> Place | None:
    """Where torchrun has put this process; None for a run of one process."""
    found = process_place()
    if found.world_size == 1:
        return None
    return Place(found.rank, found.world_size, found.local_rank, found.local_world_size, "env://")


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
