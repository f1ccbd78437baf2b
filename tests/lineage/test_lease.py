"""One supervisor a root: on one machine, on two, after a crash, after a stall."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tidemill
from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunRecord, TermRecord
from tidemill.errors import FencedError, LineageError
from tidemill.lineage import lease as leases
from tidemill.lineage.lease import SupervisorLease
from tidemill.lineage.records import record_key, run_records
from tidemill.lineage.terms import newest_term
from tidemill.storage.backends.local import LocalStorage

REPOSITORY = Path(tidemill.__file__).parent.parent
LIVENESS_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def folder(root: LocalStorage) -> LocalStorage:
    return LocalStorage(root.root / layout.SUPERVISOR)


def leave_holder(root: LocalStorage, *, pid: int, machine: str, term: int = 1) -> None:
    """A supervisor that has ended without a word."""
    record = RunRecord(
        run_id=f"old{term}",
        kind="cycle",
        status="running",
        pid=pid,
        started_at=0.0,
        heartbeat=7,
        details={"machine": machine, "host": "other"},
    )
    folder(root).write(record_key(record.run_id), record.to_bytes())
    taken = TermRecord(term=term, run_id=record.run_id, nonce="n", created_at=0.0)
    folder(root).create(layout.term(term), taken.to_bytes())


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_a_second_supervisor_is_refused_and_told_by_whom(root: LocalStorage) -> None:
    first = SupervisorLease(root, LIVENESS_S)
    try:
        with pytest.raises(LineageError, match=rf"process {os.getpid()} on .* supervises this root already"):
            SupervisorLease(root, LIVENESS_S)
        first.require()
    finally:
        first.release()
    second = SupervisorLease(root, LIVENESS_S)
    second.release()
    assert second.term == first.term + 1
    assert {run.kind for run in run_records(folder(root))} == {"cycle"}


def test_a_holder_whose_process_is_gone_from_this_machine_is_replaced_at_once(root: LocalStorage) -> None:
    leave_holder(root, pid=dead_pid(), machine=leases._machine())
    clock = ManualClock()
    lease = SupervisorLease(root, LIVENESS_S, clock=clock)
    lease.release()
    assert (lease.term, clock.monotonic()) == (2, ManualClock().monotonic()), "without a wait"


def test_a_holder_on_another_machine_is_watched_before_it_is_replaced(root: LocalStorage) -> None:
    """Its process can't be looked at from here: the heartbeat alone tells."""
    leave_holder(root, pid=dead_pid(), machine="another boot pid:[1]")
    clock = ManualClock()
    start = clock.monotonic()
    lease = SupervisorLease(root, LIVENESS_S, clock=clock)
    lease.release()
    assert clock.monotonic() - start > LIVENESS_S


def test_a_supervisor_that_was_replaced_while_it_was_stalled_finds_itself_fenced(root: LocalStorage) -> None:
    stalled = SupervisorLease(root, LIVENESS_S)
    taken = TermRecord(term=2, run_id="on another machine", nonce="n", created_at=0.0)
    folder(root).create(layout.term(2), taken.to_bytes())
    with pytest.raises(FencedError, match="another supervisor \\(term 2\\)"):
        stalled.require()
    stalled.release()


def test_of_many_that_start_at_once_one_gets_the_root(root: LocalStorage) -> None:
    def take(number: int) -> SupervisorLease | None:
        try:
            return SupervisorLease(root, LIVENESS_S)
        except LineageError:
            return None

    with ThreadPoolExecutor(8) as pool:
        held = [lease for lease in pool.map(take, range(8)) if lease is not None]
    try:
        assert len(held) == 1
        held[0].require()
    finally:
        for lease in held:
            lease.release()


def test_what_earlier_supervisors_left_is_swept(root: LocalStorage) -> None:
    for term in range(1, 31):
        leave_holder(root, pid=dead_pid() if term == 30 else 1, machine=leases._machine(), term=term)
    lease = SupervisorLease(root, LIVENESS_S)
    try:
        assert newest_term(folder(root)) == lease.term == 31
        assert len(folder(root).list("terms/")) == 1
        assert len(run_records(folder(root))) == 20
        lease.require()
    finally:
        lease.release()


def test_a_killed_supervisor_is_followed_by_the_next_one_without_a_wait(root: LocalStorage) -> None:
    code = (
        "import sys, time\n"
        "from tidemill.lineage.lease import SupervisorLease\n"
        "from tidemill.storage.backends.local import LocalStorage\n"
        f"lease = SupervisorLease(LocalStorage({str(root.root)!r}), 600.0); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LineageError, match=rf"process {holder.pid} on"):
            SupervisorLease(root, 600.0)
        holder.kill()
        holder.wait()
        lease = SupervisorLease(root, 600.0)
        lease.release()
    finally:
        holder.kill()
        holder.communicate()
