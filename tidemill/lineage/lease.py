"""One supervisor a root, on whichever machine: a lease of terms and heartbeats in the root itself (D2, D6)."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from tidemill.cadence import StopReason
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunRecord, TermRecord
from tidemill.errors import FencedError, LineageError, NotFoundError
from tidemill.lineage.liveness import Liveness, LivenessTracker
from tidemill.lineage.records import RunRecorder, RunStart, new_run_id, record_key, run_records
from tidemill.lineage.terms import newest_term
from tidemill.logs import log
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.numbered import numbers
from tidemill.storage.open import open_storage

_POLL_S = 0.25
_RUNS_KEPT = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class SupervisorLease:
    """Held by the supervisor of a root from construction to `release`.

    Whoever opened the newest term of ROOT/supervisor holds it, as long as the heartbeat of its run's record moves. The constructor
    takes it over at once from a holder that has ended, or whose process is gone from this very machine; else it watches for
    `liveness_s`, and raises LineageError that names the holder if that is alive. A holder that was stalled for longer finds itself
    fenced: `require`. Threading: any thread may call `require`.
    """

    def __init__(self, root: Storage, liveness_s: float, *, clock: Clock | None = None) -> None:
        self._root_url = root.url
        self._folder = open_storage(f"{root.url.rstrip('/')}/{layout.SUPERVISOR}")
        self._clock = clock or SystemClock()
        seen = self._wait_until_free(LivenessTracker(liveness_s, self._clock))
        self.run_id = new_run_id(self._clock)
        details = {"host": socket.gethostname(), "machine": _machine()}
        # Before the term: whoever finds the term finds a heartbeat to judge it by.
        self._recorder = RunRecorder(
            self._folder, RunStart(self.run_id, "cycle", term=seen + 1, details=details), clock=self._clock
        )
        self.term = seen + 1
        try:
            self._take()
        except BaseException as error:
            self._recorder.finish(StopReason.FAILED, error=error)
            raise
        self._sweep()

    def _take(self) -> None:
        """The very next term, so that of two that saw the same holder gone one alone gets it."""
        record = TermRecord(term=self.term, run_id=self.run_id, nonce=uuid.uuid4().hex, created_at=self._clock.time())
        if not create_once(self._folder, layout.term(self.term), record.to_bytes(), clock=self._clock):
            raise LineageError(f"{self._root_url}: another supervisor took this root at the same moment")
        self.require()

    def _sweep(self) -> None:
        """Delete what earlier supervisors left, but for the newest runs' records."""
        runs = run_records(self._folder)
        old = [layout.term(term) for term in numbers(self._folder, "terms", layout.term_number) if term < self.term]
        for key in [*old, *(record_key(run.run_id) for run in runs[:-_RUNS_KEPT])]:
            self._folder.delete(key)

    def require(self) -> None:
        """Raise FencedError if another supervisor has taken the root over. Before whatever only one may do."""
        newest = newest_term(self._folder)
        if newest > self.term:
            raise FencedError(f"{self._root_url}: another supervisor (term {newest}) has taken over from this one, which ends")

    def release(self) -> None:
        """Give the root back. Once."""
        self._recorder.finish(StopReason.PREEMPTED)

    def _wait_until_free(self, tracker: LivenessTracker) -> int:
        """The newest term, once its holder is gone."""
        told = False
        while True:
            term = newest_term(self._folder)
            holder = self._holder(term) if term else None
            if holder is None or holder.ended_at is not None or _is_gone_from_here(holder):
                return term
            state = tracker.observe(self._root_url, holder.heartbeat, writer=holder.run_id)
            if state is Liveness.DEAD:
                return term
            who = f"process {holder.pid} on {holder.details.get('host', 'an unknown machine')}"
            if state is Liveness.ALIVE:
                raise LineageError(f"{self._root_url}: {who} supervises this root already; stop it first")
            if not told:
                log.info("%s may still supervise this root: watching its heartbeat for up to %g s", who, tracker.liveness_s)
                told = True
            self._clock.sleep(_POLL_S)

    def _holder(self, term: int) -> RunRecord | None:
        key = layout.term(term)
        run_id = TermRecord.parse(self._folder.read(key), where=f"{self._folder.url}/{key}").run_id
        try:
            return RunRecord.parse(self._folder.read(record_key(run_id)), where=f"{self._folder.url}/{record_key(run_id)}")
        except NotFoundError:
            return None


def _machine() -> str:
    """Names the machine and the processes' number space: the same text means that a process number means the same here.

    Empty where that can't be told.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {os.readlink(_PID_NAMESPACE)}"
    except OSError:
        return ""


def _is_gone_from_here(holder: RunRecord) -> bool:
    """Whether the holder ran on this machine, and its process is no more. False if that can't be told."""
    machine = _machine()
    if not machine or holder.details.get("machine") != machine or holder.pid is None:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(holder.pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
