"""The demo on a terminal: one screen that is drawn anew four times a second, and two keys."""

from __future__ import annotations

import logging
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from tidemill.demo.state import DemoState, LineageState
from tidemill.logs import log

_REFRESH_S = 0.25
_RATE_S = 5.0
_AUC_S = 2.0
_MIN_NOTES = 3
_ANSWER_S = 6.0
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_RANGE = (0.5, 0.8)
_STATUS_STYLES = {"running": "green", "down": "bold red", "retired": "dim", "ended": "dim"}

# Name and width of each column; negative: to the right.
_LINEAGE_COLUMNS = (
    ("lineage", 10),
    ("state", 9),
    ("watermark", -13),
    ("behind", -9),
    ("step", -7),
    ("release", -9),
    ("restarts", -10),
    ("AUC", -8),
)
_RELEASE_COLUMNS = (("lineage", 11), ("release", -8), ("step", -9), ("changed rows", -16), ("committed", -14))

Keys = Mapping[str, Callable[[], str]]
"""By key: what it does, and returns for people to read."""


def is_terminal() -> bool:
    """Whether stdout is a terminal that can do more than print lines."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


@contextmanager
def live_view(state: DemoState, keys: Keys, stdin: TextIO | None = None, console: Console | None = None) -> Iterator[None]:
    """Draw `state` until the end of the context, and call what a pressed key stands for, on a thread of its own.

    Log lines become notes meanwhile. The terminal is as it was afterwards, however the context ends.
    """
    console = console or Console()
    stopping = threading.Event()
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _log_as_notes(state), cbreak(stdin or sys.stdin) as fd, live:
        view = View(state, takes_keys=fd is not None)
        thread = threading.Thread(target=_run, args=(view, live, keys, fd, stopping), name="live", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


def _run(view: View, live: Live, keys: Keys, fd: int | None, stopping: threading.Event) -> None:
    due = time.monotonic()
    while not stopping.is_set():
        try:
            for key in _pressed(fd, max(0.0, due - time.monotonic()), stopping):
                if key in keys:
                    view.show_answer(keys[key]())
            if time.monotonic() >= due:
                due = time.monotonic() + _REFRESH_S
                live.update(view.render(live.console.height), refresh=True)
        except Exception as error:  # noqa: BLE001 - the worker loop: a view that can't be drawn must not stop the play
            log.warning("the live view: %r", error)
            due = time.monotonic() + _REFRESH_S
            stopping.wait(_REFRESH_S)


def _pressed(fd: int | None, timeout_s: float, stopping: threading.Event) -> str:
    """The keys that are pressed within a time; returns with the first ones."""
    if fd is None:
        stopping.wait(timeout_s)
        return ""
    if not select.select([fd], [], [], timeout_s)[0]:
        return ""
    keys = os.read(fd, 64).decode(errors="replace")
    if not keys:
        # The terminal is gone: it would be ready for ever.
        stopping.wait(timeout_s)
    return keys


@contextmanager
def cbreak(stdin: TextIO) -> Iterator[int | None]:
    """Let single keys be read, without echo, from a terminal in whose foreground this process is; restored at the end. Its file
    descriptor, or None if stdin is no such terminal."""
    fd = _foreground_terminal(stdin)
    if fd is None:
        yield None
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _foreground_terminal(stdin: TextIO) -> int | None:
    try:
        fd = stdin.fileno()
        # A process in the background would be stopped for touching its terminal.
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError):
        return None


class _NoteHandler(logging.Handler):
    def __init__(self, state: DemoState) -> None:
        super().__init__()
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        self._state.notes.append(f"{self._state.elapsed_s:6.1f} s  {record.getMessage()}")


@contextmanager
def _log_as_notes(state: DemoState) -> Iterator[None]:
    before = log.handlers[:]
    log.handlers[:] = [_NoteHandler(state)]
    try:
        yield
    finally:
        log.handlers[:] = before


class View:
    """Turns a DemoState into what a terminal shows. `render` belongs to one thread."""

    def __init__(self, state: DemoState, *, takes_keys: bool = True) -> None:
        self._state = state
        self._takes_keys = takes_keys
        self._requests: deque[tuple[float, int]] = deque(maxlen=round(_RATE_S / _REFRESH_S) + 1)
        self._aucs: deque[tuple[float, float]] = deque(maxlen=30)
        self._auc_at = 0.0
        self._answer = ""
        self._answer_until = 0.0

    def show_answer(self, text: str) -> None:
        """Show for a while what a key did."""
        self._answer, self._answer_until = text, time.monotonic() + _ANSWER_S

    def render(self, height: int, now: float | None = None) -> RenderableType:
        """The screen, at most `height` lines. `now`: Unix seconds."""
        now = time.time() if now is None else now
        self._remember(now)
        lineages = list(self._state.lineages.values())
        upper = [self._head(), self._lineages(lineages), self._releases(lineages, now), self._server(), self._quality()]
        # Panels have two lines of border; the head, the server and the AUCs have two lines each, the tables a line of names.
        used = 3 * 4 + (len(lineages) + 3) + (len(self._newest(lineages)) + 3)
        notes = list(self._state.notes)[-max(_MIN_NOTES, height - used - 2) :]
        return Group(*upper, _panel(Text("\n".join(notes), no_wrap=True, overflow="ellipsis"), "what happened"))

    def _remember(self, now: float) -> None:
        state = self._state
        self._requests.append((now, state.requests))
        if state.auc_served is not None and state.auc_frozen is not None and now - self._auc_at >= _AUC_S:
            self._auc_at = now
            self._aucs.append((state.auc_served, state.auc_frozen))

    def _head(self) -> RenderableType:
        state = self._state
        clock = "the day hasn't begun" if state.event_time is None else f"{_utc(state.event_time):%a %d %b %H:%M} event time"
        parts = [clock, f"1 s plays {state.speed / 60:.0f} min", f"{state.elapsed_s:.0f} s"]
        if state.event_time is not None and state.boundary is not None:
            left = (state.boundary - state.event_time) / state.speed
            parts.append(f"midnight in {left:.0f} s" if left > 0 else f"midnight {-left:.0f} s ago")
        panel = _panel(Group(_line(state.phase, "bold"), _line("   ".join(parts))), "tidemill demo", "cyan")
        if self._takes_keys:
            answer = f"   [yellow]{self._answer}[/]" if time.monotonic() < self._answer_until else ""
            panel.subtitle = f"[bold]k[/] kill the stream trainer   [bold]q[/] stop{answer}"
            panel.subtitle_align = "left"
        return panel

    def _lineages(self, lineages: list[LineageState]) -> RenderableType:
        rows = [
            (
                _name(lineage.name),
                lineage.status,
                "-" if lineage.watermark is None else f"{_utc(lineage.watermark):%d %b %H:%M}",
                "-" if lineage.lag_s is None else f"{lineage.lag_s / self._state.speed:.1f} s",
                _text(lineage.step),
                _text(lineage.sequence),
                str(lineage.restarts),
                _text(_auc(lineage.metrics)),
            )
            for lineage in lineages
        ]
        styles = [_STATUS_STYLES.get(lineage.status, "yellow") for lineage in lineages]
        return _panel(_table(_LINEAGE_COLUMNS, rows, styles), "lineages")

    def _newest(self, lineages: list[LineageState]) -> list[tuple[float, str, str, str, str]]:
        found = [
            (release.committed_at, _name(lineage.name), str(release.sequence), str(release.step), f"{release.rows:,}")
            for lineage in lineages
            for release in list(lineage.releases)
        ]
        return sorted(found, reverse=True)[:3]

    def _releases(self, lineages: list[LineageState], now: float) -> RenderableType:
        rows = [(*cells, f"{max(0.0, now - committed_at):.1f} s ago") for committed_at, *cells in self._newest(lineages)]
        return _panel(_table(_RELEASE_COLUMNS, rows, [""] * len(rows)), "newest releases")

    def _server(self) -> RenderableType:
        state, server = self._state, self._state.server
        generation = "nothing yet" if server.lineage is None else f"{_name(server.lineage)}, release {server.sequence or 0}"
        failed = Text(f"{state.failed} failed", "bold red" if state.failed else "green")
        latency = f"p50 {_ms(state.latency_p50_s)}  p99 {_ms(state.latency_p99_s)}"
        first = Text.assemble(f"{self._rate():5.1f} requests/s   {state.requests:,} in all   ", failed, f"   {latency}")
        behind = "-" if server.behind_s is None else f"{server.behind_s:.1f} s"
        second = Text.assemble("serves ", (generation, "bold"), f"   event to served about {behind}")
        # Before there is anything to serve, the server says only that.
        if state.last_error or (server.error and server.lineage is not None):
            second.append(f"   {state.last_error or server.error}", "red")
        return _panel(Group(_cropped(first), _cropped(second)), "server", "green" if server.ready else "yellow")

    def _quality(self) -> RenderableType:
        served, frozen = (list(column) for column in zip(*self._aucs, strict=True)) if self._aucs else ([], [])
        lines = [
            _auc_line("online, as served", self._state.auc_served, served, "green"),
            _auc_line("frozen daily model", self._state.auc_frozen, frozen, "yellow"),
        ]
        return _panel(Group(*lines), "AUC on the newest random rows")

    def _rate(self) -> float:
        (first_at, first), (last_at, last) = self._requests[0], self._requests[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0


def _panel(content: RenderableType, title: str, style: str = "bright_black") -> Panel:
    return Panel(content, title=f"[bold]{title}[/]", title_align="left", border_style=style, padding=(0, 1), box=box.ROUNDED)


def _table(columns: Sequence[tuple[str, int]], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> Text:
    """Plain text in columns: rich's own tables take several times as long to draw, and this is drawn all the time."""

    def line(cells: Sequence[str]) -> str:
        return "".join(
            f"{cell:<{width}}" if width > 0 else f"{cell:>{-width}}" for cell, (_, width) in zip(cells, columns, strict=True)
        )

    text = Text(line([name for name, _ in columns]), "bright_black", no_wrap=True, overflow="ellipsis")
    for row, style in zip(rows, styles, strict=True):
        text.append("\n" + line(row), style or "default")
    return text


def _line(text: str, style: str = "") -> Text:
    return _cropped(Text(text, style))


def _cropped(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _auc_line(name: str, value: float | None, history: list[float], style: str) -> Text:
    low, high = _SPARK_RANGE
    steps = [int((min(max(v, low), high) - low) / (high - low) * (len(_SPARKS) - 1)) for v in history]
    return _line(f"{name:20}{'-' if value is None else f'{value:.4f}':>7}  {''.join(_SPARKS[step] for step in steps)}", style)


def _auc(metrics: Mapping[str, float]) -> str | None:
    values = [value for name, value in metrics.items() if name.startswith("auc")]
    return f"{values[0]:.4f}" if values else None


def _name(lineage: str) -> str:
    return lineage.rpartition("/")[2]


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
