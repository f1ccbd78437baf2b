"""Requests to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from tidemill.jobs.signals import StopSignals


@pytest.fixture
def stop():
    signals = StopSignals()
    with signals.installed():
        yield signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_is_passed_on_also_if_it_came_first(stop, number):
    asked = []
    os.kill(os.getpid(), number)
    stop.attach(lambda: asked.append("late"))
    os.kill(os.getpid(), number)
    assert asked == ["late", "late"]


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals().installed():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_may_interrupt_the_handler_of_another_at_any_line():
    stop, asked, interrupted = StopSignals(), [], []
    stop.attach(lambda: asked.append("asked"))

    def interrupt(frame, event, argument):
        # As the interpreter does it: between two lines, on the same thread. A trace function isn't traced itself.
        if event == "line":
            interrupted.append(frame.f_lineno)
            stop._ask(signal.SIGINT, None)
        return interrupt

    def ask():
        sys.settrace(interrupt)
        stop._ask(signal.SIGTERM, None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert interrupted
    assert len(asked) == len(interrupted) + 1
