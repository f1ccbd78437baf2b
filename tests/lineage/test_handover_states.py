"""Every state that a successor can be in, by name, from its file to the verdict; and stores that hang, and files that flicker."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tidemill.clock import ManualClock
from tidemill.contracts.progress import ProgressReport
from tidemill.errors import ConfigError
from tidemill.lineage.handover import Confirmation, OwnProgress, Policy, Verdict, decide, validate_handover
from tidemill.lineage.health import NOT_COMPARED, Health, HealthState
from tidemill.lineage.progress import ProgressReader
from tidemill.lineage.reporter import HandoverSettings, HandoverThread, Point, Successor
from tidemill.storage.backends.local import LocalStorage

OWN = OwnProgress(data_ts=1000.0, run_id="old")
NONE, MARK, HAND_OVER = Verdict.NONE, Verdict.MARK, Verdict.HAND_OVER
SERVED = Confirmation(True, "all live servers serve it")
NOT_SERVED = Confirmation(False, "a live server serves the predecessor")
HEALTHY, WORSE = Health(HealthState.HEALTHY, "not worse", 10_000), Health(HealthState.WORSE, "its auc is lower", 10_000)
LIVENESS_S = 30.0


def beat(data_ts: float, number: int, run_id: str = "new") -> bytes:
    return ProgressReport(data_ts=data_ts, run_id=run_id, term=1, heartbeat=number, released_watermark=data_ts).to_bytes()


def alive(data_ts: float, run_id: str = "new") -> list[bytes]:
    return [beat(data_ts, 1, run_id), beat(data_ts, 2, run_id)]


def plain(text: str) -> list[bytes]:
    return [text.encode()] * 2


@dataclass(frozen=True)
class State:
    """What the file holds at each look, one a second; `idle_s` passes after them, then it is looked at once more, unchanged."""

    files: list[bytes | None]
    caught_up: Verdict
    served: Verdict
    healthy: Verdict
    says: str
    idle_s: float = 0.0
    health: Health = HEALTHY
    serving: Confirmation = NOT_SERVED


def unusable(files: list[bytes | None], says: str = "progress.json") -> State:
    return State(files, NONE, NONE, NONE, says)


STATES: dict[str, State] = {
    "absent": unusable([None, None], "no progress.json yet"),
    "without heartbeat": State(plain('{"data_ts": 1000.0}'), HAND_OVER, NONE, NONE, "no heartbeat"),
    "dead": State(alive(1000.0), NONE, NONE, NONE, "dead", idle_s=LIVENESS_S + 1.0),
    "stale file of an earlier run": State([beat(1000.0, 7)] * 3, NONE, NONE, NONE, "isn't known to be alive"),
    "corrupt": unusable(plain("{data_ts: 1000")),
    "truncated": unusable([beat(1000.0, 1), beat(1000.0, 2)[:-9]]),
    "not an object": unusable(plain("[1000.0]")),
    "huge integer": unusable(plain('{"data_ts": ' + "9" * 400 + "}")),
    "bool": unusable(plain('{"data_ts": true}')),
    "NaN": unusable(plain('{"data_ts": NaN}')),
    "infinity": unusable(plain('{"data_ts": Infinity}')),
    "negative": unusable(plain('{"data_ts": -1.0}')),
    "behind": State(alive(939.999), NONE, NONE, NONE, "trails by 60.0 s"),
    "at the tolerance exactly": State(alive(940.0), HAND_OVER, MARK, MARK, "caught up"),
    "ahead": State(alive(9000.0), HAND_OVER, MARK, MARK, "caught up"),
    "same folder as own": State(alive(1000.0, "old"), NONE, NONE, NONE, "this run's own"),
    "worse metrics": State(alive(1000.0), HAND_OVER, MARK, NONE, "auc", health=WORSE),
    "metrics not compared": State(alive(1000.0), HAND_OVER, MARK, NONE, "not compared", health=NOT_COMPARED),
    "not yet served": State(alive(1000.0), HAND_OVER, MARK, MARK, "waiting to be served"),
    "served": State(alive(1000.0), HAND_OVER, HAND_OVER, HAND_OVER, "serve it", serving=SERVED),
    "served, but worse metrics": State(alive(1000.0), HAND_OVER, HAND_OVER, NONE, "auc", health=WORSE, serving=SERVED),
}


def put(storage: LocalStorage, data: bytes | None) -> None:
    storage.delete("progress.json") if data is None else storage.write("progress.json", data)


@pytest.mark.parametrize("policy", ["caught_up", "served", "healthy"])
@pytest.mark.parametrize("name", STATES)
def test_the_verdict_of_each_state(tmp_path: Path, name: str, policy: Policy) -> None:
    """A3, A4, A9, A12; issue 5's list. An older date is refused at start-up: see below."""
    state, clock, storage = STATES[name], ManualClock(), LocalStorage(tmp_path)
    reader = ProgressReader(storage, LIVENESS_S, clock=clock)
    for data in state.files:
        put(storage, data)
        view = reader.look()
        clock.advance(1.0)
    if state.idle_s:
        clock.advance(state.idle_s)
        view = reader.look()
    decision = decide(OWN, view, policy, 60.0, state.serving, state.health)
    assert decision.verdict is getattr(state, policy)
    if policy == "healthy" or state.caught_up is state.served is NONE:
        assert state.says in decision.reason


def test_older_date_is_refused_before_training_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="earlier date"):
        validate_handover(f"{tmp_path}/lineages/20240101", f"{tmp_path}/lineages/20240102", 60.0)


class SlowStorage(LocalStorage):
    """A remote file system on which one operation hangs until it is let go."""

    def __init__(self, root: Path, hangs: str) -> None:
        super().__init__(root)
        self._hangs = hangs
        self.reached, self.let_go = threading.Event(), threading.Event()

    def write(self, key: str, *chunks: Any) -> None:
        self._wait("write")
        super().write(key, *chunks)

    def read(self, key: str, *span: Any) -> bytes:
        self._wait("read")
        return super().read(key, *span)

    def list(self, *prefix: Any) -> Any:
        self._wait("list")
        return super().list(*prefix)

    def _wait(self, operation: str) -> None:
        if operation == self._hangs:
            self.reached.set()
            assert self.let_go.wait(60.0)


@dataclass
class Place:
    """A predecessor's three stores, one of which hangs."""

    folder: Path
    where: str
    hangs: str
    slow: list[SlowStorage] = field(default_factory=list)

    def store(self, name: str) -> LocalStorage:
        if name != self.where:
            return LocalStorage(self.folder / name)
        self.slow.append(SlowStorage(self.folder / name, self.hangs))
        return self.slow[0]


@pytest.mark.parametrize(("where", "hangs"), [("own", "write"), ("own", "read"), ("next", "read"), ("root", "list")])
def test_no_store_that_hangs_ever_stalls_a_step(tmp_path: Path, where: str, hangs: str) -> None:
    """DCL 9.19: what the training thread calls returns while the file system doesn't, and the verdict comes once it does."""
    place = Place(tmp_path, where, hangs)
    own, successor = place.store("own"), Successor(place.store("next"), place.store("root"), "lineages/20240102")
    policy: Policy = "served" if where == "root" else "caught_up"
    LocalStorage(tmp_path / "next").write("progress.json", b'{"data_ts": 1000.0}')
    thread = HandoverThread(own, "old", 1, HandoverSettings(policy, tolerance_s=60.0, report_interval_s=0.01), successor)
    thread.report(Point(1000.0))
    thread.start()
    (slow,) = place.slow
    try:
        assert slow.reached.wait(30.0)
        for step in range(1000):
            thread.report(Point(1000.0, step=step))
            assert not thread.verdict
        slow.let_go.set()
        if policy == "caught_up":
            assert wait_for(lambda: thread.verdict)
    finally:
        slow.let_go.set()
        thread.stop()


def wait_for(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return True
        pause.wait(0.01)
    return False


@pytest.mark.parametrize("policy", ["caught_up", "served"])
def test_a_file_that_appears_late_flickers_and_vanishes_does_no_harm(tmp_path: Path, policy: Policy) -> None:
    """Never a hand-over to what isn't there now, nor before the successor has caught up; one as soon as it is there and alive."""
    clock, own, other = ManualClock(), LocalStorage(tmp_path / "own"), LocalStorage(tmp_path / "next")
    settings = HandoverSettings(policy, tolerance_s=60.0, liveness_s=LIVENESS_S)
    thread = HandoverThread(own, "old", 1, settings, Successor(other, LocalStorage(tmp_path), "lineages/20240102"), clock)
    thread.report(Point(1000.0))
    behind: list[bytes | None] = [None, None, beat(100.0, 1), None, beat(200.0, 2), beat(200.0, 3)[:20], beat(300.0, 4), None]
    for data in behind:
        put(other, data)
        thread.check()
        clock.advance(5.0)
        assert thread.decision.verdict is NONE
    put(other, beat(1000.0, 5))
    thread.check()
    assert thread.decision.verdict is (HAND_OVER if policy == "caught_up" else MARK)
    put(other, None)
    thread.check()
    assert thread.verdict is (policy == "caught_up"), "a verdict stays; a mark alone ends nothing"
    assert json.loads(own.read("progress.json"))["data_ts"] == 1000.0


def test_an_idle_streams_progress_is_reported_by_the_clock(tmp_path: Path) -> None:
    """Without one more `report` the heartbeat goes on, so that nobody takes an idle stream for a dead one."""
    own = LocalStorage(tmp_path)
    thread = HandoverThread(own, "old", 1, HandoverSettings(report_interval_s=0.01))
    thread.report(Point(1000.0, step=3))
    thread.start()
    try:
        assert wait_for(lambda: (tmp_path / "progress.json").exists() and json.loads(own.read("progress.json"))["heartbeat"] > 5)
        assert json.loads(own.read("progress.json"))["step"] == 3
    finally:
        thread.stop()
