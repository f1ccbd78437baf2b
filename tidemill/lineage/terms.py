"""Terms: the fencing numbers of the runs that write one folder (D6).

Before a run reads any checkpoint of a folder, its rank 0 creates the next `terms/<n>.json` exclusively. Whoever finds a higher
term than its own has been replaced, and stops writing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import TermRecord
from tidemill.errors import FencedError, StorageError
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.numbered import newest_number

_MAX_RACES = 64


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes a folder: one rank of one run, under one term."""

    term: int
    run_id: str
    rank: int
    world_size: int


def open_term(storage: Storage, *, run_id: str, nonce: str, clock: Clock | None = None) -> int:
    """Take the next term of the folder; higher than any other, also among racing runs. Rank 0 only."""
    created_at = (clock or SystemClock()).time()
    number = newest_term(storage)
    for _ in range(_MAX_RACES):
        number += 1
        record = TermRecord(term=number, run_id=run_id, nonce=nonce, created_at=created_at)
        if create_once(storage, layout.term(number), record.to_bytes()):
            return number
    raise StorageError(f"{storage.url}: lost the race for a term {_MAX_RACES} times; are many runs being started on this folder?")


def newest_term(storage: Storage) -> int:
    """The highest term of the folder; 0 if no run has opened one."""
    return newest_number(storage, "terms", layout.term_number)


def require_unfenced(storage: Storage, term: int) -> None:
    """Raise FencedError if a newer run has taken over the folder. Called before each commit."""
    newest = newest_term(storage)
    if newest > term:
        raise FencedError(f"{storage.url}: term {newest} has taken over from term {term}; this run stops writing")
