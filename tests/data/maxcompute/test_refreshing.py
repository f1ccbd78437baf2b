"""B5: sessions live as long as somebody reads them, and whoever can't keep one alive says so in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

import pyarrow as pa
import pytest

from tests.data.maxcompute.conftest import MakeSource, numbers
from tests.data.maxcompute.line import Line
from tidemill.clock import ManualClock
from tidemill.data.assignment import Assigned
from tidemill.data.intervals import IntervalSet
from tidemill.data.sources.maxcompute.session import Session, TableColumns
from tidemill.data.sources.maxcompute.sessions import SessionKeeper
from tidemill.errors import SourceChangedError
from tidemill.testing.maxcompute import MaxComputeEmulator

HOUR = 3600.0
PATH = "odps://prj/tables/clicks/ds=1&ds=2"


class StubClient:
    """A service of one session: `answer` says how it is, or raises."""

    def __init__(self, answer: Callable[[], Session]) -> None:
        self.answer = answer
        self.refreshes = 0

    def columns(self) -> TableColumns:
        raise NotImplementedError

    def create(self, partitions: Sequence[str], columns: Sequence[str], partition_columns: Sequence[str]) -> Session:
        raise NotImplementedError

    def describe(self, session_id: str, *, refresh: bool) -> Session:
        self.refreshes += refresh
        return self.answer()

    def read(self, session_id: str, start: int, count: int) -> Generator[pa.RecordBatch, None, None]:
        raise NotImplementedError


def keeper(clock: ManualClock) -> SessionKeeper:
    return SessionKeeper(interval_s=600.0, alarm_after_s=HOUR, clock=clock)


@pytest.fixture
def alarms(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("tidemill"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_restored_session_stays_alive_for_two_days(emulator: MaxComputeEmulator, make: MakeSource, clock: ManualClock):
    """The incumbent refreshed only what it had made itself."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 300), "ds=2": numbers(300, 300)})
    build = partial(make, PATH, columns=["id"], is_orderby_partition=True)
    line = Line()
    line.run(build, batches=1)
    source = build()
    splits = source.resume(line.state.splits)
    restored, fresh = (split.fingerprint["session"] for split in splits)
    left = [Assigned(splits[0], IntervalSet.of([(64, 300)])), Assigned(splits[1], IntervalSet.of([(0, 300)]))]
    reader = source.open_all(left)
    with closing(reader):
        assert set(source.refreshed_sessions) == {restored, fresh}
        for _ in range(6):
            before = len(refreshed(emulator))
            clock.advance(8 * HOUR)
            until = time.monotonic() + 20
            while not {restored, fresh} <= set(refreshed(emulator)[before:]):
                assert time.monotonic() < until, "nobody refreshes the sessions"
                time.sleep(0.02)
        assert build().resume(line.state.splits)[0].fingerprint["session"] == restored


def refreshed(emulator: MaxComputeEmulator) -> list[str]:
    """The sessions that were refreshed so far, one entry a call."""
    return [request.path.rpartition("/")[2] for request in emulator.requests("refresh_read_session")]


def test_a_session_that_nobody_opens_ends_after_its_day(emulator: MaxComputeEmulator, make: MakeSource, clock: ManualClock):
    """What the test above would see without a refresh."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 300), "ds=2": numbers(300, 300)})
    line = Line()
    line.run(partial(make, PATH, columns=["id"]), batches=1)
    clock.advance(25 * HOUR)
    with pytest.raises(SourceChangedError, match="can't go on: it is EXPIRED"):
        make(PATH, columns=["id"]).resume(line.state.splits)


def test_refreshing_goes_on_after_faults_of_any_kind(alarms: Callable[[], list[str]]):
    """The incumbent's daemon died of everything but one kind of error."""
    clock = ManualClock()
    client = StubClient(lambda: Session("S", "NORMAL", 10, clock.time() + 24 * HOUR))
    keep = keeper(clock)
    keep.hold("S", "prj.clicks/ds=1", client)
    for error in (ConnectionResetError("gone"), ValueError("not JSON"), KeyError("Code"), RuntimeError("whatever")):
        good = client.answer

        def fail(error: Exception = error) -> Session:
            raise error

        client.answer = fail
        keep.tick()
        tried = client.refreshes
        clock.advance(31)
        keep.tick()
        assert client.refreshes == tried + 1, "a failed refresh is tried again soon"
        client.answer = good
        clock.advance(31)
        keep.tick()
        succeeded = client.refreshes
        clock.advance(599)
        keep.tick()
        assert client.refreshes == succeeded, "a good session is left alone for the interval"
        clock.advance(1)
    assert alarms() == []


def test_the_alarm_comes_hours_before_the_session_ends_and_once_an_hour(alarms: Callable[[], list[str]]):
    clock = ManualClock()

    def fail() -> Session:
        raise ConnectionResetError("gone")

    keep = keeper(clock)
    keep.hold("S", "prj.clicks/ds=1", StubClient(fail))
    for _ in range(119):
        keep.tick()
        clock.advance(30)
    assert alarms() == []
    for _ in range(240):
        keep.tick()
        clock.advance(30)
    assert len(alarms()) == 2
    assert alarms()[0].startswith("prj.clicks/ds=1: read session S couldn't be refreshed for 36")
    assert "ConnectionResetError: gone" in alarms()[0]


@pytest.mark.parametrize("status", ["EXPIRED", "CRITICAL"])
def test_a_call_that_succeeds_on_a_session_that_has_ended_is_an_alarm(status: str, alarms: Callable[[], list[str]]):
    """The status is looked at, not only the call's."""
    clock = ManualClock()
    client = StubClient(lambda: Session("S", status, 10, clock.time()))
    keep = keeper(clock)
    keep.hold("S", "prj.clicks/ds=1", client)
    for _ in range(3):
        keep.tick()
        clock.advance(2 * HOUR)
    assert alarms() == [f"prj.clicks/ds=1: read session S is {status}; unread rows of it are lost"]
    assert client.refreshes == 1


def test_a_refresh_that_prolongs_nothing_is_an_alarm(alarms: Callable[[], list[str]]):
    clock = ManualClock()
    end = clock.time() + 24 * HOUR
    keep = keeper(clock)
    keep.hold("S", "prj.clicks/ds=1", StubClient(lambda: Session("S", "NORMAL", 10, end)))
    for _ in range(7):
        keep.tick()
        clock.advance(600)
    assert alarms() == ["prj.clicks/ds=1: read session S is refreshed and still ends in 82800 s"]


def test_a_closed_keeper_takes_nothing_more():
    keep = keeper(ManualClock())
    keep.start()
    keep.close()
    keep.hold("S", "x", StubClient(lambda: Session("S", "NORMAL", 1, None)))
    assert keep.sessions == []
