"""Child processes that are watched, restarted, and never outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tidemill.errors import DeadlineError, LineageError
from tidemill.lineage.orchestrators import launch
from tidemill.logs import event, log

Status = Literal["starting", "running", "ending", "waiting", "exited", "stopped", "given_up"]
"""ending: its process has ended, what follows is being decided. waiting: to be restarted after a pause. exited: ended for good by
itself. given_up: died too often."""

_POLL_S = 0.05
_START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How a child that died is restarted: after `backoff_s`, doubled for each restart within `window_s` up to `max_backoff_s`,
    at most `max_restarts` times within the window."""

    max_restarts: int = 10
    window_s: float = 600.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0


def ended_well(exit_code: int) -> bool:
    """A child is over for good when it exits with 0."""
    return exit_code == 0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A command to run. `restart` None: never again once it ended. `is_over(exit_code)`: whether an ended child has done its
    work, so that it isn't restarted; called on the supervisor's thread."""

    name: str
    argv: Sequence[str]
    restart: RestartPolicy | None = None
    is_over: Callable[[int], bool] = ended_well
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class ChildState:
    """One look at a child. `exit_code`: of its last end, negative for a signal. `restarts`: over its whole life."""

    status: Status
    pid: int | None
    exit_code: int | None
    restarts: int


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    status: Status = "starting"
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    restarts: int = 0
    restarted_at: list[float] = field(default_factory=list)
    start_at: float = 0.0
    stopping: bool = False

    @property
    def ended(self) -> bool:
        return self.status in ("exited", "stopped", "given_up")


class Children:
    """Starts, watches, restarts and ends named child processes.

    Each child is the leader of a session of its own, so that Ctrl-C reaches only this process; its output is appended to
    `<logs>/<name>.log`. When this process ends, however it ends, the kernel kills its children. Any thread may call any method;
    one thread of its own starts all children, since they live no longer than the thread that started them.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, _Child] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="children", daemon=True)
        self._thread.start()

    def log_path(self, name: str) -> Path:
        """Where a child's output goes."""
        return self._logs / f"{name}.log"

    def start(self, spec: ChildSpec) -> int:
        """Start a child and return its pid. Raises LineageError if one of its name is there and hasn't ended."""
        with self._changed:
            known = self._children.get(spec.name)
            if self._closed or (known is not None and not known.ended):
                raise LineageError(f"child {spec.name!r} can't be started: {'closing' if self._closed else 'it is there already'}")
            child = self._children[spec.name] = _Child(spec)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: child.status != "starting", _START_DEADLINE_S):
                raise DeadlineError(f"child {spec.name!r} was not started within {_START_DEADLINE_S:.0f} s")
            if child.process is None:
                raise LineageError(f"child {spec.name!r} can't be started; see {self.log_path(spec.name)}")
            return child.process.pid

    def state(self, name: str) -> ChildState | None:
        """One look; None if no child of this name was ever started."""
        with self._changed:
            child = self._children.get(name)
            if child is None:
                return None
            pid = child.process.pid if child.process is not None and child.status == "running" else None
            return ChildState(child.status, pid, child.exit_code, child.restarts)

    def states(self) -> dict[str, ChildState]:
        """One look at all of them, by name."""
        with self._changed:
            names = list(self._children)
        return {name: state for name in names if (state := self.state(name)) is not None}

    def pid(self, name: str) -> int | None:
        """None while it doesn't run."""
        state = self.state(name)
        return state.pid if state else None

    def kill(self, name: str) -> bool:
        """SIGKILL to the child and its process group, as a crash would end it; its policy restarts it. False: not running."""
        with self._changed:
            child = self._children.get(name)
            return child is not None and child.status == "running" and _signal_group(child, signal.SIGKILL)

    def stop(self, name: str, *, deadline_s: float = STOP_DEADLINE_S) -> ChildState | None:
        """SIGTERM, after the deadline SIGKILL, and no restart. Waits for the end. Idempotent."""
        self._stop([name], deadline_s)
        return self.state(name)

    def wait(self, name: str, *, deadline_s: float) -> ChildState:
        """Wait until a child has ended for good. Raises DeadlineError."""
        with self._changed:
            child = self._children[name]
            if not self._changed.wait_for(lambda: child.ended, deadline_s):
                raise DeadlineError(f"child {name!r} is still {child.status} after {deadline_s:.0f} s")
            return ChildState(child.status, None, child.exit_code, child.restarts)

    def close(self, *, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Stop all children at once and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            names = list(self._children)
        self._stop(names, deadline_s)
        with self._changed:
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _stop(self, names: Sequence[str], deadline_s: float) -> None:
        with self._changed:
            children = [self._children[name] for name in names if name in self._children]
            for child in children:
                child.stopping = True
                if child.status == "running" and child.process is not None:
                    os.kill(child.process.pid, signal.SIGTERM)
            self._changed.notify_all()
            if self._changed.wait_for(lambda: all(child.ended for child in children), deadline_s):
                return
            for child in children:
                if child.status == "running":
                    log.warning("%s did not end within %.0f s of SIGTERM: killed", child.spec.name, deadline_s)
                    _signal_group(child, signal.SIGKILL)
            if not self._changed.wait_for(lambda: all(child.ended for child in children), STOP_DEADLINE_S):
                raise DeadlineError(f"{[child.spec.name for child in children if not child.ended]} survive SIGKILL")

    def _watch(self) -> None:
        """The thread. It must not end before the children have: the kernel would kill them."""
        while True:
            try:
                if self._tick():
                    return
            except Exception:  # noqa: BLE001 - the worker loop: a fault that nobody foresaw must not kill all children
                log.exception("watching the child processes failed, and goes on")
                time.sleep(_POLL_S)

    def _tick(self) -> bool:
        """Start what is due, and notice what has ended. True: closed, and nothing is left to watch."""
        with self._changed:
            for child in list(self._children.values()):
                self._attend(child)
            if self._closed and all(child.ended for child in self._children.values()):
                return True
            ended = [child for child in self._children.values() if child.status == "running" and _reap(child)]
            if not ended:
                self._changed.wait(_POLL_S)
        for child in ended:
            # Outside the lock: `is_over` may read a slow store.
            over = self._is_over(child)
            with self._changed:
                self._conclude(child, over)
                self._changed.notify_all()
        return False

    def _attend(self, child: _Child) -> None:
        if child.status not in ("starting", "waiting"):
            return
        if child.stopping:
            child.status = "stopped"
        elif time.monotonic() >= child.start_at:
            self._spawn(child)
        else:
            return
        self._changed.notify_all()

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        command = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *spec.argv]
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with self.log_path(spec.name).open("ab") as output:
                child.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=spec.cwd, start_new_session=True
                )
        except OSError as error:
            log.error("%s can't be started: %s", spec.name, error)
            child.status = "given_up"
            return
        child.status = "running"
        event("child.started", child=spec.name, pid=child.process.pid, restarts=child.restarts)

    def _is_over(self, child: _Child) -> bool:
        assert child.exit_code is not None
        try:
            return child.spec.is_over(child.exit_code)
        except Exception as error:  # noqa: BLE001 - plug-in call: a store that can't be read doesn't stop the restarts
            log.warning("%s: whether it has done its work can't be told: %s", child.spec.name, error)
            return False

    def _conclude(self, child: _Child, over: bool) -> None:
        spec, now = child.spec, time.monotonic()
        if child.stopping:
            child.status = "stopped"
        elif over or spec.restart is None:
            child.status = "exited"
        else:
            policy = spec.restart
            child.restarted_at = [at for at in child.restarted_at if now - at < policy.window_s]
            if len(child.restarted_at) >= policy.max_restarts:
                child.status = "given_up"
                log.error("%s died %d times within %.0f s: given up", spec.name, policy.max_restarts + 1, policy.window_s)
            else:
                backoff_s = min(policy.backoff_s * 2 ** len(child.restarted_at), policy.max_backoff_s)
                child.restarted_at.append(now)
                child.restarts += 1
                child.status, child.start_at = "waiting", now + backoff_s
                log.warning("%s ended with %s: restarted in %.1f s", spec.name, child.exit_code, backoff_s)
        event("child.ended", child=spec.name, exit_code=child.exit_code, status=child.status)


def _reap(child: _Child) -> bool:
    """Whether the process has ended; if so, end what is left of its process group too. Under the lock, so that nobody signals
    a number that belongs to another process by then."""
    assert child.process is not None
    if os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return False
    # While the leader isn't reaped, its group's number can't be anyone else's.
    _signal_group(child, signal.SIGKILL)
    child.exit_code = child.process.wait()
    child.status = "ending"
    return True


def _signal_group(child: _Child, number: signal.Signals) -> bool:
    assert child.process is not None
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return False
    return True
