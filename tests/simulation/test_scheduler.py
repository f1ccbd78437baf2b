"""Scheduled threads: one at a time, in the seed's order, on a clock of their own; the dead don't come back, the frozen do."""

from __future__ import annotations

import threading
import time

import pytest

from tidemill.clock import SystemClock
from tidemill.testing.simulation.scheduler import Process, Scheduler, StuckError
from tidemill.testing.simulation.threads import VirtualThreading, simulated
from tidemill.workers import BackgroundWorker


def order_of(seed):
    scheduler, told = Scheduler(seed, switch=0.5), []

    def story():
        virtual = VirtualThreading(scheduler)

        def say(name):
            for number in range(5):
                scheduler.pause()
                told.append((name, number))

        threads = [virtual.Thread(target=say, args=(name,), name=name) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    scheduler.run(story)
    return told, scheduler.trace


def test_order_is_the_seeds():
    assert order_of(3) == order_of(3)
    assert len({tuple(order_of(seed)[0]) for seed in range(5)}) > 1


def test_time_passes_only_when_all_wait():
    scheduler = Scheduler(0, turn_s=0.0)
    began = time.monotonic()

    def story():
        scheduler.sleep(3600.0)
        assert scheduler.now == 3600.0

    scheduler.run(story)
    assert time.monotonic() - began < 60


def test_nobody_can_go_on():
    scheduler = Scheduler(0)

    def story():
        VirtualThreading(scheduler).Condition().wait()

    with pytest.raises(StuckError, match="nobody can go on: story/main"):
        scheduler.run(story)


def test_an_error_ends_the_story_with_all_its_threads():
    scheduler = Scheduler(0)
    before = threading.active_count()

    def fails():
        raise KeyError("wrong")

    def story():
        scheduler.spawn(Process("one"), "main", lambda: scheduler.sleep(1e9))
        scheduler.spawn(Process("two"), "main", fails)
        scheduler.sleep(1.0)
        raise AssertionError("the story goes on")

    with pytest.raises(KeyError, match="wrong"):
        scheduler.run(story)
    while threading.active_count() > before:
        time.sleep(0.01)


def test_the_dead_stay_where_they_are_and_the_frozen_wake():
    scheduler, told = Scheduler(0, turn_s=0.0), []

    def ticks(name):
        def tick():
            try:
                while True:
                    scheduler.sleep(1.0)
                    told.append((name, scheduler.now))
            finally:
                scheduler.pause()
                told.append((name, "never"))

        return tick

    def story():
        killed, frozen = Process("killed"), Process("frozen")
        scheduler.spawn(killed, "main", ticks("killed"))
        scheduler.spawn(frozen, "main", ticks("frozen"))
        scheduler.sleep(1.5)
        scheduler.kill(killed)
        scheduler.freeze(frozen, 10.0)
        scheduler.sleep(10.5)

    scheduler.run(story)
    assert sorted(told) == [("frozen", 1.0), ("frozen", 11.5), ("killed", 1.0)]


def test_the_products_own_threads_are_scheduled():
    scheduler, done = Scheduler(0), []

    def story():
        worker = BackgroundWorker("slow", lambda item: (SystemClock().sleep(500.0), done.append(item)), capacity=2)
        worker.submit(1)
        worker.submit(2)
        worker.close(deadline_s=2000.0)
        assert done == [1, 2]
        assert scheduler.now >= 1000.0

    with simulated(scheduler):
        scheduler.run(story)
    assert isinstance(threading.Condition(), threading.Condition)
    assert BackgroundWorker("real", done.append).ready


def test_threads_of_others_keep_real_time_and_locks():
    scheduler, seen = Scheduler(0), []

    def other():
        clock = SystemClock()
        clock.sleep(0.001)
        worker = BackgroundWorker("other", seen.append)
        worker.submit(clock.time())
        worker.close(deadline_s=20.0)

    def story():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with simulated(scheduler):
        scheduler.run(story)
    assert seen == [pytest.approx(time.time(), abs=60)]
