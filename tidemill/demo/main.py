"""One demo from its options to its report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from tidemill import logs
from tidemill.demo import live
from tidemill.demo.director import Director
from tidemill.demo.folder import DemoFolder, alone_in, claim
from tidemill.demo.plan import demo_plan
from tidemill.demo.stage import Stage, StopRequestedError
from tidemill.demo.summary import summary
from tidemill.errors import ConfigError, TidemillError

if TYPE_CHECKING:
    from tidemill.demo.movielens import Blocks

_LINE_S = 10.0
_FAST_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line asks for."""

    fast: bool = False
    chaos: bool = False
    seed: int = 1
    data: str = ""
    """Empty: the click world. `movielens` or `movielens:FOLDER`: MovieLens-100k."""
    folder: Path = Path("demo-run")
    report: Path = Path("demo-report")


def run_demo(settings: DemoSettings, say: Callable[[str], None] = print) -> int:
    """Play, report, and return the exit code: 0 if all is as it must be, 1 if not, 130 if it was stopped.

    Raises ConfigError for a folder that isn't a demo's or in which another demo plays, and for data that isn't there.
    """
    with alone_in(settings.folder):
        return _run_alone(settings, say)


def _run_alone(settings: DemoSettings, say: Callable[[str], None]) -> int:
    began = time.time()
    recorded = _movielens(settings.data) if settings.data else None
    folder = claim(settings.folder)
    sink = logs.EventLog(folder.logs / "demo-events.jsonl")
    logs.send_events_to(sink)
    on_terminal = live.is_terminal()
    play = _play(settings, recorded, folder, _say_nothing if on_terminal else say)
    error: TidemillError | None = None
    try:
        with _stopped_by_signals(play.stage.stop):
            try:
                with _live_view(play.stage) if on_terminal else _status_lines(play.stage, say):
                    play.run()
            except TidemillError as problem:
                error = problem
                say(f"{'stopped' if isinstance(problem, StopRequestedError) else 'error'}: {problem}")
            good = write_report(play, settings.report, began, error, say)
    finally:
        logs.send_events_to(None)
        sink.close()
    if isinstance(error, StopRequestedError):
        return error.exit_code
    return 0 if good else 1


@dataclass(frozen=True, slots=True)
class Told:
    """What a play leaves for people: report.json, series.json and one screen of text."""

    report: dict[str, Any]
    series: dict[str, Any]
    summary: str


@dataclass(frozen=True, slots=True)
class Play:
    """One play: where it runs, what runs it, and what measures it afterwards, given its begin and the error if one ended it."""

    stage: Stage
    run: Callable[[], object]
    tell: Callable[[float, str | None], Told]


def _movielens(data: str) -> tuple[Path, Blocks]:
    from tidemill.demo import movielens

    name, _, folder = data.partition(":")
    if name != "movielens":
        raise ConfigError(f"--data {data}: unknown; known: movielens, movielens:FOLDER")
    path = movielens.find(Path(folder) if folder else None)
    return path.absolute(), movielens.read(path)


def _play(settings: DemoSettings, recorded: tuple[Path, Blocks] | None, folder: DemoFolder, say: Callable[[str], None]) -> Play:
    if recorded is not None:
        return _recorded_play(settings, recorded, folder, say)
    director = Director(demo_plan(fast=settings.fast, chaos=settings.chaos), settings.seed, folder, say)

    def tell(began: float, error: str | None) -> Told:
        from tidemill.demo import analysis
        from tidemill.demo.series import series

        findings = analysis.analyse(director)
        report = analysis.report(director, findings, wall_s=time.time() - began, error=error)
        return Told(report, series(director, findings), summary(report))

    return Play(director, director.run, tell)


def _recorded_play(settings: DemoSettings, recorded: tuple[Path, Blocks], folder: DemoFolder, say: Callable[[str], None]) -> Play:
    from tidemill.demo.movielens_director import MovieLensDirector, MovieLensPlan

    path, blocks = recorded
    blocks = blocks.first(_FAST_BLOCKS) if settings.fast else blocks
    director = MovieLensDirector(MovieLensPlan(kills=3 * settings.chaos), settings.seed, (path, blocks), folder, say)

    def tell(began: float, error: str | None) -> Told:
        from tidemill.demo import movielens_report

        findings = movielens_report.analyse(director)
        report = movielens_report.report(director, findings, wall_s=time.time() - began, error=error)
        return Told(report, movielens_report.series(director), movielens_report.summary(report))

    return Play(director, director.run, tell)


def write_report(play: Play, folder: Path, began: float, error: TidemillError | None, say: Callable[[str], None]) -> bool:
    """Measure, write report.json, series.json, plots and report.html into `folder`, and say the summary.

    Returns whether all is as it must be.
    """
    from tidemill.demo.report_html import REPORT, SERIES, render

    say(f"{time.time() - began:6.1f} s  counting rows, comparing what is served with what was trained, scoring what was shown")
    told = play.tell(began, None if error is None else f"{type(error).__name__}: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    (folder / REPORT).write_bytes(orjson.dumps(told.report, option=options))
    (folder / SERIES).write_bytes(orjson.dumps(told.series, option=options))
    page = render(folder)
    say("")
    say(told.summary)
    say(f"{'report':20} {page}")
    return bool(told.report["ok"])


def _live_view(stage: Stage) -> AbstractContextManager[None]:
    def kill() -> str:
        return "SIGKILL: its supervisor starts it again" if stage.kill_trainer() else "no stream trainer runs now"

    def stop() -> str:
        stage.stop()
        return "stopping every process in good order"

    return live.live_view(stage.state, {"k": kill, "q": stop})


def _say_nothing(text: str) -> None:
    """What is said stands in the live view's notes."""


@contextmanager
def _status_lines(stage: Stage, say: Callable[[str], None]) -> Iterator[None]:
    """Say how it stands, every few seconds."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(_LINE_S):
            if stage.state.event_time is not None:
                say(f"{stage.state.elapsed_s:6.1f} s    {stage.state.line()}")

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
