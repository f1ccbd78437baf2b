"""One demo from its options to its report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from tidemill import logs
from tidemill.demo import live
from tidemill.demo.director import Director
from tidemill.demo.folder import claim
from tidemill.demo.plan import demo_plan
from tidemill.demo.stage import StopRequestedError
from tidemill.demo.summary import summary
from tidemill.errors import TidemillError

_LINE_S = 10.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line asks for."""

    fast: bool = False
    chaos: bool = False
    seed: int = 1
    folder: Path = Path("demo-run")
    report: Path = Path("demo-report")


def run_demo(settings: DemoSettings, say: Callable[[str], None] = print) -> int:
    """Play, report, and return the exit code: 0 if all is as it must be, 1 if not, 130 if it was stopped.

    Raises ConfigError for a folder that isn't a demo's.
    """
    began = time.time()
    folder = claim(settings.folder)
    plan = demo_plan(fast=settings.fast, chaos=settings.chaos)
    sink = logs.EventLog(folder.logs / "demo-events.jsonl")
    logs.send_events_to(sink)
    on_terminal = live.is_terminal()
    director = Director(plan, settings.seed, folder, _say_nothing if on_terminal else say)
    error: TidemillError | None = None
    try:
        with _stopped_by_signals(director.stop):
            try:
                with _live_view(director) if on_terminal else _status_lines(director, say):
                    director.run()
            except TidemillError as problem:
                error = problem
                say(f"{'stopped' if isinstance(problem, StopRequestedError) else 'error'}: {problem}")
            good = write_report(director, settings.report, began, error, say)
    finally:
        logs.send_events_to(None)
        sink.close()
    if isinstance(error, StopRequestedError):
        return error.exit_code
    return 0 if good else 1


def write_report(director: Director, folder: Path, began: float, error: TidemillError | None, say: Callable[[str], None]) -> bool:
    """Measure, write report.json, series.json, plots and report.html into `folder`, and say the summary.

    Returns whether all is as it must be.
    """
    from tidemill.demo import analysis
    from tidemill.demo.report_html import REPORT, SERIES, render
    from tidemill.demo.series import series

    findings = analysis.analyse(director)
    text = None if error is None else f"{type(error).__name__}: {error}"
    report = analysis.report(director, findings, wall_s=time.time() - began, error=text)
    folder.mkdir(parents=True, exist_ok=True)
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    (folder / REPORT).write_bytes(orjson.dumps(report, option=options))
    (folder / SERIES).write_bytes(orjson.dumps(series(director, findings), option=options))
    page = render(folder)
    say("")
    say(summary(report))
    say(f"{'report':20} {page}")
    return bool(report["ok"])


def _live_view(director: Director) -> AbstractContextManager[None]:
    return live.live_view(director.state, {"k": director.kill_trainer, "q": director.stop})


def _say_nothing(text: str) -> None:
    """What is said stands in the live view's notes."""


@contextmanager
def _status_lines(director: Director, say: Callable[[str], None]) -> Iterator[None]:
    """Say how it stands, every few seconds."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(_LINE_S):
            if director.state.event_time is not None:
                say(f"{director.state.elapsed_s:6.1f} s    {director.state.line()}")

    thread = threading.Thread(target=run, name="lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
