"""The progress line of a training run on a terminal."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass

from rich.console import Console

from tidemill import logs
from tidemill.data.split import Delivery, Provenance
from tidemill.jobs import display
from tidemill.jobs.display import ProgressLine, RowCount


@dataclass
class Step:
    loss_sum: float


@dataclass
class Payload:
    num_rows: int


def test_the_line_counts_rows_and_the_log_prints_above_it():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    before = logs.log.handlers[:]
    logs.log.handlers[:] = [logging.NullHandler()]
    try:
        line = ProgressLine(Step(50.0), 300, console)
        line.trained(6, Delivery(Provenance((), 100), Payload(100)), {})
        logs.log.warning("something %s", "[odd]")
        line._progress.refresh()
        line.close()
        assert isinstance(logs.log.handlers[0], logging.NullHandler)
    finally:
        logs.log.handlers[:] = before
    shown = screen.getvalue()
    assert "step 7, loss 0.5000" in shown
    assert "100/300" in shown
    assert "something [odd]\n" in shown


def test_rows_are_counted_in_a_line_on_a_terminal():
    screen = io.StringIO()
    handlers = logs.log.handlers[:]
    with RowCount("scored", 300, Console(file=screen, force_terminal=True, width=100, color_system=None)) as count:
        count.update(120)
        count._progress.refresh()
    assert "120/300" in screen.getvalue()
    assert logs.log.handlers == handlers


def test_rows_are_counted_in_the_log_elsewhere_and_by_rank_0_alone(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="tidemill")
    with RowCount("scored", 300, Console(file=io.StringIO())) as count:
        count.update(100)
        assert not caplog.messages
        monkeypatch.setattr(display, "_EVERY_S", 0.0)
        count.update(120)
    with RowCount("scored", 300, None) as silent:
        silent.update(150)
    [message] = caplog.messages
    assert message.startswith("scored 120 of 300 rows")
