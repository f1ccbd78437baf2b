"""The hand-over thread: what it writes, when it decides, and that nothing the store does reaches the training thread."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill import logs
from tidemill.clock import ManualClock
from tidemill.config.train import HandoverConfig
from tidemill.contracts.progress import ProgressReport
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import ConfigError
from tidemill.lineage.reporter import HandoverSettings, HandoverThread, Point, Successor, handover_settings
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Chunk
from tidemill.testing.faulty_storage import FaultyStorage

NEXT = "lineages/20240102"


class World:
    """A root with an old and a new lineage, whose files the test writes by hand."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.root = LocalStorage(path)
        self.own = LocalStorage(path / "lineages/20240101")
        self.next = LocalStorage(path / NEXT)
        self._beats = 0

    def thread(self, policy: str, *, run_id: str = "old", term: int = 1, tolerance_s: float = 60.0) -> HandoverThread:
        settings = HandoverSettings(policy, tolerance_s=tolerance_s, confirm_timeout_s=100.0)  # type: ignore[arg-type]
        return HandoverThread(self.own, run_id, term, settings, Successor(self.next, self.root, NEXT), self.clock)

    def successor_reports(self, data_ts: float) -> None:
        self._beats += 1
        report = ProgressReport(data_ts=data_ts, run_id="new", term=1, heartbeat=self._beats)
        self.next.write("progress.json", report.to_bytes())

    def server_reports(self, lineage: str, *, server: str = "a", ready: bool = True) -> None:
        self._beats += 1
        status = ServingStatus(
            server=server,
            url="http://127.0.0.1:1",
            heartbeat=self._beats,
            ready=ready,
            deployment=1,
            lineage=lineage,
            snapshot_digest="d",
            term=1,
            sequence=1,
            step=1,
            watermark=1.0,
            swapped_at=None,
            updated_at=0.0,
        )
        self.root.write(f"serving/{server}.json", status.to_bytes())

    def progress(self) -> dict[str, object]:
        return json.loads(self.own.read("progress.json"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "events.jsonl"
    sink = logs.EventLog(path)
    logs.send_events_to(sink)
    yield path
    logs.send_events_to(None)
    sink.close()


def named(path: Path, name: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == name]


def test_progress_json_is_one_object_with_data_ts_and_no_temporary_file_is_left(world: World) -> None:
    thread = HandoverThread(world.own, "old", 3, HandoverSettings(), clock=world.clock)
    thread.report(Point(1000.0, step=7, released_watermark=990.0, metrics={"auc": 0.7}))
    thread.check()
    progress = world.progress()
    assert progress["data_ts"] == 1000.0
    assert (progress["run_id"], progress["term"], progress["step"]) == ("old", 3, 7)
    assert (progress["released_watermark"], progress["metrics"]) == (990.0, {"auc": 0.7})
    assert [path.name for path in world.own.root.iterdir()] == ["progress.json"]


def test_the_heartbeat_moves_on_with_every_write_also_when_idle(world: World) -> None:
    thread = HandoverThread(world.own, "old", 1, HandoverSettings(), clock=world.clock)
    thread.report(Point(1000.0))
    beats = []
    for _ in range(3):
        thread.check()
        beats.append(world.progress()["heartbeat"])
    assert beats == [1, 2, 3]


def test_without_event_time_nothing_is_written_and_one_warning_is_given(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.successor_reports(1000.0)
    thread = world.thread("caught_up")
    thread.report(Point(None, step=5))
    with caplog.at_level(logging.WARNING, "tidemill"):
        for _ in range(3):
            world.successor_reports(1000.0)
            thread.check()
    assert not world.own.list()
    assert not thread.verdict
    assert len([record for record in caplog.records if "no event time" in record.getMessage()]) == 1


def test_caught_up_hands_over_once_the_living_successor_is_within_tolerance(world: World) -> None:
    thread = world.thread("caught_up")
    thread.report(Point(1000.0))
    thread.check()
    assert not thread.verdict
    for data_ts in (900.0, 939.0):
        world.successor_reports(data_ts)
        thread.check()
        assert not thread.verdict
    world.successor_reports(940.0)
    thread.check()
    assert thread.verdict
    assert thread.decision.lag_s == 60.0


def test_the_verdict_stays_and_progress_goes_on_after_it(world: World) -> None:
    thread = world.thread("caught_up")
    thread.report(Point(1000.0))
    for _ in range(2):
        world.successor_reports(1000.0)
        thread.check()
    world.next.delete("progress.json")
    thread.report(Point(5000.0))
    thread.check()
    assert thread.verdict
    assert thread.decision.lag_s == 0.0
    assert world.progress()["data_ts"] == 5000.0


def test_the_lag_is_logged_at_each_check(world: World, events: Path) -> None:
    thread = world.thread("caught_up")
    thread.report(Point(1000.0))
    for data_ts in (100.0, 200.0):
        world.successor_reports(data_ts)
        thread.check()
    assert [line["lag_s"] for line in named(events, "handover.checked")] == [900.0, 800.0]


def test_served_marks_then_trains_on_until_all_live_servers_serve_the_successor(world: World) -> None:
    thread = world.thread("served")
    thread.report(Point(1000.0))

    def check(*lineages: str) -> bool:
        world.successor_reports(1000.0)
        for number, lineage in enumerate(lineages):
            world.server_reports(lineage, server=f"server-{number}")
        thread.check()
        return thread.verdict

    assert not check("lineages/20240101", "lineages/20240101")
    assert not check("lineages/20240101", "lineages/20240101")
    assert world.progress()["handover_mark"] == 1000.0
    thread.report(Point(1100.0))
    assert not check(NEXT, "lineages/20240101")
    assert world.progress()["handover_mark"] == 1000.0, "the mark stays as it was fixed"
    assert check(NEXT, "lineages/20240103"), "a later lineage counts too"


def test_served_is_not_confirmed_without_a_live_server(world: World) -> None:
    thread = world.thread("served")
    thread.report(Point(1000.0))
    world.server_reports(NEXT)
    for _ in range(6):
        world.successor_reports(1000.0)
        thread.check()
        world.clock.advance(10.0)
    assert not thread.verdict
    assert "no live server" in thread.decision.reason


def test_a_dead_server_does_not_hold_up_the_hand_over(world: World) -> None:
    thread = world.thread("served")
    thread.report(Point(1000.0))
    world.server_reports("lineages/20240101", server="dead")
    for _ in range(6):
        world.successor_reports(1000.0)
        world.server_reports(NEXT, server="alive")
        thread.check()
        world.clock.advance(10.0)
    assert thread.verdict


def test_an_unconfirmed_switch_raises_one_alarm_and_training_goes_on(world: World, events: Path) -> None:
    thread = world.thread("served")
    thread.report(Point(1000.0))
    for _ in range(30):
        world.successor_reports(1000.0)
        world.server_reports("lineages/20240101")
        thread.check()
        world.clock.advance(10.0)
    assert not thread.verdict
    assert len(named(events, "handover.marked")) == 1
    (alarm,) = named(events, "handover.alarm")
    assert alarm["waited_s"] == pytest.approx(110.0)


def test_restarted_after_the_confirmation_it_retires_at_once_and_keeps_its_mark(world: World) -> None:
    first = world.thread("served")
    first.report(Point(1000.0))
    for _ in range(2):
        world.successor_reports(1000.0)
        first.check()
    assert world.progress()["handover_mark"] == 1000.0
    second = world.thread("served", run_id="old again", term=2)
    second.report(Point(950.0))
    world.server_reports(NEXT)
    second.check()
    assert world.progress()["handover_mark"] == 1000.0
    world.server_reports(NEXT)
    second.check()
    assert second.verdict


def test_a_failing_store_is_complained_about_and_tried_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyStorage(world.own)
    thread = HandoverThread(faulty, "old", 1, HandoverSettings(), clock=world.clock)
    thread.report(Point(1000.0))
    # Each check first looks for a mark of an earlier run; the first two fail there.
    faulty.fail_at(1, 2)
    with caplog.at_level(logging.WARNING, "tidemill"):
        thread.check()
        thread.check()
        assert not world.own.list()
        thread.check()
    assert world.progress()["data_ts"] == 1000.0
    assert len([record for record in caplog.records if "can't be written" in record.getMessage()]) == 2


def test_servers_that_cannot_be_read_mean_no_confirmation(world: World) -> None:
    root = FaultyStorage(world.root)
    settings = HandoverSettings("served")
    thread = HandoverThread(world.own, "old", 1, settings, Successor(world.next, root, NEXT), world.clock)
    thread.report(Point(1000.0))
    root.fail_at(1)
    world.successor_reports(1000.0)
    thread.check()
    assert not thread.verdict


class HangingStorage(LocalStorage):
    """A store whose writes hang until they are let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.let_go = threading.Event(), threading.Event()

    def write(self, key: str, *chunks: Chunk) -> None:
        self.reached.set()
        assert self.let_go.wait(30.0)
        super().write(key, *chunks)


def test_a_hanging_store_never_reaches_the_training_thread(tmp_path: Path) -> None:
    storage = HangingStorage(tmp_path / "own")
    thread = HandoverThread(storage, "old", 1, HandoverSettings(report_interval_s=0.01))
    thread.report(Point(1.0))
    thread.start()
    try:
        assert storage.reached.wait(10.0)
        for step in range(1000):
            thread.report(Point(float(step), step=step))
            assert not thread.verdict
        thread.stop(deadline_s=0.0)
    finally:
        storage.let_go.set()
    thread.stop()
    assert json.loads(storage.read("progress.json"))["data_ts"] == 1.0


def test_the_running_thread_hands_over(world: World) -> None:
    world.next.write("progress.json", b'{"data_ts": 1000.0}')
    seen = threading.Event()

    class Watched(LocalStorage):
        def write(self, key: str, *chunks: Chunk) -> None:
            super().write(key, *chunks)
            if thread.verdict:
                seen.set()

    settings = HandoverSettings("caught_up", report_interval_s=0.01)
    thread = HandoverThread(Watched(world.own.root), "old", 1, settings, Successor(world.next))
    thread.report(Point(1000.0))
    thread.start()
    try:
        assert seen.wait(10.0)
    finally:
        thread.stop()


def test_served_needs_a_root_whose_servers_can_confirm(world: World) -> None:
    with pytest.raises(ConfigError, match="served"):
        HandoverThread(world.own, "old", 1, HandoverSettings("served"), Successor(world.next))


def test_without_a_report_interval_each_report_is_a_check(world: World) -> None:
    settings = handover_settings(HandoverConfig(policy="caught_up", tolerance_s=60.0))
    assert settings.on_report
    written = threading.Event()

    class Watched(LocalStorage):
        def write(self, key: str, *chunks: Chunk) -> None:
            super().write(key, *chunks)
            written.set()

    thread = HandoverThread(Watched(world.own.root), "old", 1, replace(settings, report_interval_s=600.0))
    thread.start()
    try:
        for step in (1, 2):
            written.clear()
            thread.report(Point(1000.0, step=step))
            assert written.wait(10.0)
            assert world.progress()["step"] == step
    finally:
        thread.stop()


def test_the_settings_of_a_config() -> None:
    settings = handover_settings(HandoverConfig(report_interval_s=20.0, confirm_timeout_s=7.0))
    assert (settings.policy, settings.report_interval_s, settings.confirm_timeout_s) == ("served", 20.0, 7.0)
    assert (settings.on_report, settings.liveness_s) == (False, 120.0)


def test_a_run_that_ends_tells_its_last_figures_although_it_reported_moments_ago(world: World) -> None:
    thread = HandoverThread(world.own, "old", 1, HandoverSettings("caught_up", report_interval_s=60.0))
    thread.start()
    thread.report(Point(100.0, 10))
    thread.finish(Point(200.0, 20))
    progress = json.loads(world.own.read("progress.json"))
    assert (progress["data_ts"], progress["step"]) == (200.0, 20)
