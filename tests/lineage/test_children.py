"""Real child processes: started, killed, restarted, stopped, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tidemill
from tidemill.errors import DeadlineError, LineageError
from tidemill.lineage.orchestrators.children import Children, ChildSpec, RestartPolicy

REPOSITORY = Path(tidemill.__file__).parent.parent
SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
QUICK = RestartPolicy(max_restarts=2, window_s=60.0, backoff_s=0.01, max_backoff_s=0.02)


def exits(code: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"raise SystemExit({code})"]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    made = Children(tmp_path / "logs")
    yield made
    made.close(deadline_s=10.0)


def eventually(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_runs_in_its_own_session_and_its_output_is_kept(children: Children) -> None:
    pid = children.start(ChildSpec("a", SLEEP))
    assert children.pid("a") == pid
    assert os.getsid(pid) == pid
    eventually(lambda: "up" in children.log_path("a").read_text())


def test_an_exit_is_final_without_a_restart_policy(children: Children) -> None:
    children.start(ChildSpec("a", exits(3)))
    state = children.wait("a", deadline_s=20.0)
    assert (state.status, state.exit_code, state.restarts) == ("exited", 3, 0)
    children.start(ChildSpec("a", exits(0)))
    assert children.wait("a", deadline_s=20.0).exit_code == 0


def test_a_killed_child_is_restarted_and_gets_another_pid(children: Children) -> None:
    first = children.start(ChildSpec("a", SLEEP, QUICK))
    assert children.kill("a")
    eventually(lambda: children.pid("a") not in (None, first))
    state = children.state("a")
    assert state is not None
    assert (state.status, state.restarts, state.exit_code) == ("running", 1, -signal.SIGKILL)


def test_a_child_that_dies_too_often_is_given_up(children: Children) -> None:
    children.start(ChildSpec("a", exits(1), QUICK))
    state = children.wait("a", deadline_s=20.0)
    assert (state.status, state.restarts) == ("given_up", 2)
    assert not children.kill("a")


def test_a_child_whose_work_is_done_is_not_restarted(children: Children) -> None:
    codes: list[int] = []

    def is_over(code: int) -> bool:
        codes.append(code)
        return len(codes) == 2

    children.start(ChildSpec("a", exits(75), QUICK, is_over))
    state = children.wait("a", deadline_s=20.0)
    assert (state.status, state.restarts, codes) == ("exited", 1, [75, 75])


def test_not_knowing_whether_its_work_is_done_means_a_restart(children: Children) -> None:
    def is_over(code: int) -> bool:
        raise OSError("the store is away")

    children.start(ChildSpec("a", exits(0), QUICK, is_over))
    assert children.wait("a", deadline_s=20.0).status == "given_up"


def test_a_stopped_child_gets_sigterm_and_is_not_restarted(children: Children) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); time.sleep(600)"
    children.start(ChildSpec("a", [sys.executable, "-S", "-c", code], QUICK))
    eventually(lambda: "up" in children.log_path("a").read_text())
    state = children.stop("a", deadline_s=20.0)
    assert state is not None
    assert (state.status, state.exit_code, state.restarts) == ("stopped", 75, 0)
    assert children.stop("a") == state


def test_a_child_that_ignores_sigterm_is_killed_with_all_it_started(children: Children) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    children.start(ChildSpec("a", [sys.executable, "-S", "-c", code]))
    eventually(lambda: children.log_path("a").read_text().endswith("\n"))
    grandchild = int(children.log_path("a").read_text())
    state = children.stop("a", deadline_s=0.1)
    assert state is not None
    assert state.exit_code == -signal.SIGKILL
    eventually(lambda: not is_alive(grandchild))


def test_a_stop_during_the_pause_before_a_restart_ends_it(children: Children) -> None:
    children.start(ChildSpec("a", exits(1), RestartPolicy(backoff_s=600.0, max_backoff_s=600.0)))
    eventually(lambda: (state := children.state("a")) is not None and state.status == "waiting")
    state = children.stop("a", deadline_s=20.0)
    assert state is not None
    assert state.status == "stopped"


def test_names_are_taken_while_a_child_runs(children: Children) -> None:
    children.start(ChildSpec("a", SLEEP))
    with pytest.raises(LineageError, match="'a'"):
        children.start(ChildSpec("a", SLEEP))
    with pytest.raises(DeadlineError):
        children.wait("a", deadline_s=0.01)


def test_a_command_that_does_not_exist_says_so_in_the_log(children: Children) -> None:
    children.start(ChildSpec("a", ["/no/such/command"]))
    assert children.wait("a", deadline_s=20.0).exit_code == 127
    assert "/no/such/command" in children.log_path("a").read_text()


def test_close_stops_everything(tmp_path: Path) -> None:
    children = Children(tmp_path)
    pids = [children.start(ChildSpec(name, SLEEP, QUICK)) for name in ("a", "b")]
    children.close(deadline_s=20.0)
    assert not any(is_alive(pid) for pid in pids)
    assert {state.status for state in children.states().values()} == {"stopped"}
    with pytest.raises(LineageError, match="closing"):
        children.start(ChildSpec("c", SLEEP))


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tidemill.lineage.orchestrators.children import Children, ChildSpec\n"
        f"c = Children(Path({str(tmp_path)!r})); print(c.start(ChildSpec('a', {SLEEP!r})), flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True
    )
    try:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        eventually(lambda: (tmp_path / "a.log").read_text() == "up\n")
        assert is_alive(child)
    finally:
        supervisor.kill()
        supervisor.communicate()
    eventually(lambda: not is_alive(child))
