from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from tidemill.demo.live import View, cbreak, live_view
from tidemill.demo.state import DemoState, LineageState, ReleaseState
from tidemill.logs import log

_NOW = 1_796_058_000.0

# A play of nothing, on a terminal of its own: `k` is answered, `q` ends it.
_PLAY = """
import fcntl, sys, termios, threading
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from tidemill.demo.live import live_view
from tidemill.demo.state import DemoState
state, over = DemoState(60.0), threading.Event()
state.phase = "the play"
with live_view(state, {"k": lambda: "killed it", "q": lambda: over.set() or "bye"}):
    sys.exit(0 if over.wait(30) else 1)
"""


def _state() -> DemoState:
    state = DemoState(speed=1728.0, phase="day T: the stream learns", event_time=1_772_536_000.0, boundary=1_772_582_400.0)
    for date in ("20260302", "20260303"):
        lineage = LineageState(f"lineages/{date}", "running", 1200, 1_772_535_000.0, None, 1728.0, 33, metrics={"auc": 0.7312})
        lineage.releases.extend(ReleaseState(n, 30 * n, 5300 + n, _NOW - 40 + n) for n in range(30, 34))
        state.lineages[lineage.name] = lineage
    state.lineages["lineages/20260302"].status = "down"
    state.lineages["lineages/20260302"].restarts = 2
    state.server.ready, state.server.lineage, state.server.sequence, state.server.behind_s = True, "lineages/20260302", 31, 1.25
    state.latency_p50_s, state.latency_p99_s = 0.034, 0.29
    state.auc_served, state.auc_frozen = 0.7339, 0.6689
    state.notes.extend(f"note {n}" for n in range(40))
    return state


def _drawn(view: View, height: int, width: int = 80, now: float = _NOW) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(view.render(height, now))
    return capture.get().splitlines()


def test_the_screen_shows_lineages_releases_server_and_both_aucs() -> None:
    state = _state()
    view = View(state)
    state.requests = 100
    _drawn(view, 40, now=_NOW - 2)
    state.requests, state.failed = 180, 1
    lines = _drawn(view, 40)
    text = "\n".join(lines)
    for shown in (
        "day T: the stream learns",
        "Tue 03 Mar 11:06 event time   1 s plays 29 min",
        "midnight in 27 s",
        "40.0 requests/s   180 in all   1 failed   p50 34 ms  p99 290 ms",
        "serves 20260302, release 31   event to served about 1.2 s",
        "online, as served    0.7339",
        "frozen daily model   0.6689",
        "note 39",
    ):
        assert shown in text, shown
    down = next(line for line in lines if "down" in line)
    assert down.split()[1:] == ["20260302", "down", "03", "Mar", "10:50", "1.0", "s", "1200", "33", "2", "0.7312", "│"]
    releases = [line.split()[1:] for line in lines if "s ago" in line and "5,3" in line]
    assert [cells[:4] for cells in releases] == [
        ["20260303", "33", "990", "5,333"],
        ["20260302", "33", "990", "5,333"],
        ["20260303", "32", "960", "5,332"],
    ]
    assert releases[0][4:7] == ["7.0", "s", "ago"]


@pytest.mark.parametrize("height", [30, 40, 60])
def test_the_screen_fits_the_terminal(height: int) -> None:
    lines = _drawn(View(_state()), height)
    assert len(lines) <= height
    assert {len(line) for line in lines} == {80}


def test_a_small_terminal_keeps_what_matters_at_the_top() -> None:
    text = "\n".join(_drawn(View(_state()), 24)[:24])
    assert "q stop" in text
    assert "frozen daily model" in text


def test_nothing_known_yet_is_drawn_as_such() -> None:
    text = "\n".join(_drawn(View(DemoState(60.0)), 40))
    assert "the day hasn't begun" in text
    assert "serves nothing yet" in text
    assert "None" not in text


def test_keys_that_cannot_be_read_are_not_offered() -> None:
    assert not any("kill the stream trainer" in line for line in _drawn(View(_state(), takes_keys=False), 40))


def test_a_frame_costs_little() -> None:
    state = _state()
    view = View(state)
    _drawn(view, 40)
    began = time.process_time()
    for n in range(20):
        state.requests += 10
        _drawn(view, 40, now=_NOW + n)
    # Four frames a second should take under 3 % of a core; the limit leaves room for a slow machine.
    assert (time.process_time() - began) / 20 < 0.03


def test_log_lines_become_notes_and_handlers_come_back() -> None:
    state, before = DemoState(60.0), log.handlers[:]
    with live_view(state, {}, stdin=io.StringIO(), console=Console(file=io.StringIO(), force_terminal=True)):
        log.warning("the trainer %s", "is late")
    assert log.handlers == before
    assert any("the trainer is late" in note for note in state.notes)


def test_without_a_terminal_no_keys_are_read() -> None:
    with cbreak(io.StringIO()) as fd:
        assert fd is None
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w"), cbreak(stdin) as fd:
        assert fd is None


class _Terminal:
    """A play on a pseudo terminal, seen from its other side."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "90", "LINES": "40"}
        argv = [sys.executable, "-c", _PLAY]
        self.process = subprocess.Popen(
            argv, stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True, env=environment
        )
        self.seen = b""

    def wait_for(self, text: bytes) -> None:
        until = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < until, self.seen[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ended_with(self) -> int:
        until = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < until
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)
        return self.process.returncode


@contextmanager
def _play() -> Iterator[_Terminal]:
    terminal = _Terminal()
    try:
        terminal.wait_for(b"the play")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
        os.close(terminal.slave)


def test_keys_act_at_once_without_echo_and_the_terminal_is_restored() -> None:
    with _play() as terminal:
        local = termios.tcgetattr(terminal.slave)[3]
        assert not local & (termios.ICANON | termios.ECHO)
        assert local & termios.ISIG
        terminal.press(b"xk")
        terminal.wait_for(b"killed it")
        terminal.press(b"q")
        assert terminal.ended_with() == 0
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.wait_for(b"\x1b[?1049l")


def test_the_terminal_is_restored_after_ctrl_c() -> None:
    with _play() as terminal:
        terminal.press(b"\x03")
        assert terminal.ended_with() in (1, 130, -signal.SIGINT)
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.wait_for(b"\x1b[?1049l")
