"""Who may change an output's folder: of two jobs that commit, the one with the newest claim."""

from __future__ import annotations

import uuid

from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import TermRecord
from tidemill.errors import FencedError, NotFoundError
from tidemill.logs import log
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.numbered import newest_number, numbers

GRACE_S = 30.0
"""How long a job that takes a folder over waits before it changes anything: longer than one operation of the store takes, so that
a holder that still lives has done what it was at and sees at its next look that it isn't the holder any more."""


class Claim:
    """One run's right to change a folder, from `take` to `release`.

    Claims are numbered from 1 and created exclusively; the highest is the holder's. Whoever holds one looks before each change
    whether it still does. A claim that a killed run has left is taken over by the next number.
    """

    def __init__(self, storage: Storage, run_id: str, clock: Clock | None = None) -> None:
        self._storage = storage
        self._run_id = run_id
        self._clock = clock or SystemClock()
        self._record: TermRecord | None = None

    def newest(self) -> int:
        """The number of the newest claim of any run; 0 if there is none."""
        return newest_number(self._storage, "terms", layout.term_number, base=layout.UNFINISHED_OUTPUT)

    def take(self, seen: int) -> None:
        """Take the folder over from the holder of claim `seen`. Raises FencedError if another run was faster."""
        record = TermRecord(term=seen + 1, run_id=self._run_id, nonce=uuid.uuid4().hex, created_at=self._clock.time())
        if not create_once(self._storage, _key(record.term), record.to_bytes(), clock=self._clock):
            raise self._lost()
        self._record = record
        if seen:
            log.warning(
                "%s: another job was committing here, or was killed while it did; taking over in %g s", self._storage.url, GRACE_S
            )
            self._clock.sleep(GRACE_S)
        self.require()

    def require(self) -> None:
        """Raise FencedError unless this run's claim is the newest. Before each change."""
        if self._record is None or self.newest() != self._record.term:
            raise self._lost()
        try:
            # Numbers are given anew once all claims have been released.
            mine = self._storage.read(_key(self._record.term)) == self._record.to_bytes()
        except NotFoundError:
            mine = False
        if not mine:
            raise self._lost()

    def release(self) -> None:
        """Give the folder back. Idempotent."""
        if self._record is None:
            return
        # The oldest first: while one is left, so is this run's, and no older one is ever the newest.
        for number in numbers(self._storage, "terms", layout.term_number, base=layout.UNFINISHED_OUTPUT):
            if number <= self._record.term:
                self._storage.delete(_key(number))
        self._record = None

    def _lost(self) -> FencedError:
        return FencedError(
            f"{self._storage.url}: another job is committing its output here, so this one has stopped and its rows aren't there: "
            "give each job a folder of its own, or run this one again with --overwrite once the other has ended"
        )


def _key(number: int) -> str:
    return f"{layout.UNFINISHED_OUTPUT}/{layout.term(number)}"
