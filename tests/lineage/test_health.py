"""Policy `healthy`: the comparison on the same events, what follows from it, and two lineages that show each other windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.clock import ManualClock
from tidemill.config.train import HandoverConfig
from tidemill.contracts.progress import ProgressReport, WindowFigures
from tidemill.contracts.serving import ServingStatus
from tidemill.lineage.handover import Confirmation, OwnProgress, SuccessorView, Verdict, decide
from tidemill.lineage.health import NOT_COMPARED, Health, HealthBounds, HealthState, compare
from tidemill.lineage.liveness import Liveness
from tidemill.lineage.reporter import HandoverSettings, HandoverThread, Point, Successor, handover_settings
from tidemill.storage.backends.local import LocalStorage

BOUNDS = HealthBounds(min_events=1000, auc=0.01, normalized_entropy=0.02, calibration=0.05)


def window(hour: int, *, rows: int = 1000, auc: float = 0.75, entropy: float = 0.8, calibration: float = 1.0) -> WindowFigures:
    figures = {"auc": auc, "normalized_entropy": entropy, "calibration": calibration}
    return WindowFigures(start=hour * 3600.0, stop=hour * 3600.0 + 3600.0, rows=rows, metrics=figures)


@pytest.mark.parametrize(
    ("successor", "state"),
    [
        pytest.param([window(1)], HealthState.HEALTHY, id="the same"),
        pytest.param([window(1, auc=0.9, entropy=0.5)], HealthState.HEALTHY, id="better"),
        pytest.param([window(1, auc=0.74)], HealthState.HEALTHY, id="AUC exactly at the bound"),
        pytest.param([window(1, auc=0.7399)], HealthState.WORSE, id="AUC worse"),
        pytest.param([window(1, entropy=0.82)], HealthState.HEALTHY, id="normalized entropy exactly at the bound"),
        pytest.param([window(1, entropy=0.8201)], HealthState.WORSE, id="normalized entropy worse"),
        pytest.param([window(1, calibration=1.05)], HealthState.HEALTHY, id="calibration exactly at the bound"),
        pytest.param([window(1, calibration=1.051)], HealthState.WORSE, id="promises too much"),
        pytest.param([window(1, calibration=0.949)], HealthState.WORSE, id="promises too little"),
        pytest.param([], HealthState.UNKNOWN, id="no window"),
        pytest.param([window(2)], HealthState.UNKNOWN, id="another window"),
        pytest.param([window(1, rows=990)], HealthState.UNKNOWN, id="too few events"),
        pytest.param([window(1, rows=2000, auc=0.1)], HealthState.UNKNOWN, id="not the same events"),
        pytest.param([window(1).model_copy(update={"stop": 7300.0})], HealthState.UNKNOWN, id="a window of another length"),
        pytest.param([window(1).model_copy(update={"metrics": {"auc": 0.75}})], HealthState.UNKNOWN, id="not all metrics"),
    ],
)
def test_comparison_table(successor: list[WindowFigures], state: HealthState) -> None:
    """D8."""
    assert compare([window(1)], successor, BOUNDS).state is state


def test_as_many_of_the_newest_windows_count_as_give_the_minimum_of_events() -> None:
    own = [window(hour, rows=400) for hour in range(10)]
    bad_lately = [window(hour, rows=400, auc=0.5 if hour >= 7 else 0.99) for hour in range(10)]
    found = compare(own, bad_lately, BOUNDS)
    assert (found.state, found.num_events) == (HealthState.WORSE, 1200)
    recovered = [window(hour, rows=400, auc=0.99 if hour >= 7 else 0.5) for hour in range(10)]
    assert compare(own, recovered, BOUNDS).state is HealthState.HEALTHY


def test_windows_count_by_their_rows() -> None:
    own = [window(1, rows=990), window(2, rows=10)]
    assert compare(own, [window(1, rows=990), window(2, rows=10, auc=0.2)], BOUNDS).state is HealthState.HEALTHY
    assert compare(own, [window(1, rows=990, auc=0.7), window(2, rows=10)], BOUNDS).state is HealthState.WORSE


def test_the_reason_names_metric_figures_and_number_of_events() -> None:
    reason = compare([window(1)], [window(1, auc=0.6)], BOUNDS).reason
    assert all(part in reason for part in ("auc", "0.6000", "0.7500", "1000 events"))


@given(auc=st.floats(0, 1), entropy=st.floats(0, 3), calibration=st.floats(0, 3), rows=st.integers(1000, 10**9))
def test_a_lineage_is_as_healthy_as_itself(auc: float, entropy: float, calibration: float, rows: int) -> None:
    one = window(1, rows=rows, auc=auc, entropy=entropy, calibration=calibration)
    assert compare([one], [one], HealthBounds(1000, 0.0, 0.0, 0.0)).state is HealthState.HEALTHY


HEALTHY, WORSE = Health(HealthState.HEALTHY, "fine"), Health(HealthState.WORSE, "its auc is worse")
CONFIRMED = Confirmation(True, "all servers serve it")
OPEN = Confirmation(False, "not served yet")
MARKED = OwnProgress(1000.0, "old", handover_mark=990.0)
UNMARKED = OwnProgress(1000.0, "old")


@pytest.mark.parametrize(
    ("own", "lag_s", "serving", "health", "verdict"),
    [
        pytest.param(UNMARKED, 0.0, OPEN, HEALTHY, Verdict.MARK, id="caught up and healthy"),
        pytest.param(UNMARKED, 61.0, OPEN, HEALTHY, Verdict.NONE, id="healthy, but behind"),
        pytest.param(UNMARKED, 0.0, OPEN, WORSE, Verdict.NONE, id="caught up, but worse metrics"),
        pytest.param(UNMARKED, 0.0, OPEN, NOT_COMPARED, Verdict.NONE, id="caught up, too few events"),
        pytest.param(MARKED, 0.0, OPEN, HEALTHY, Verdict.NONE, id="not yet served"),
        pytest.param(MARKED, 0.0, CONFIRMED, HEALTHY, Verdict.HAND_OVER, id="served"),
        pytest.param(MARKED, 0.0, CONFIRMED, WORSE, Verdict.NONE, id="served, but turned out worse"),
        pytest.param(MARKED, 0.0, CONFIRMED, NOT_COMPARED, Verdict.HAND_OVER, id="served, found healthy before"),
    ],
)
def test_decision_table_of_healthy(own: OwnProgress, lag_s: float, serving: Confirmation, health: Health, verdict: Verdict) -> None:
    """D8."""
    progress = ProgressReport(data_ts=1000.0 - lag_s, run_id="new", term=1, heartbeat=5)
    view = SuccessorView(progress, Liveness.ALIVE, "")
    assert decide(own, view, "healthy", 60.0, serving, health).verdict is verdict


def test_healthy_needs_a_heartbeat() -> None:
    plain = SuccessorView(ProgressReport(data_ts=1000.0), problem="")
    assert decide(UNMARKED, plain, "healthy", 60.0, OPEN, HEALTHY).verdict is Verdict.NONE


@pytest.mark.parametrize("policy", ["caught_up", "served"])
def test_other_policies_do_not_look_at_health(policy: str) -> None:
    view = SuccessorView(ProgressReport(data_ts=1000.0, run_id="new", term=1, heartbeat=5), Liveness.ALIVE, "")
    assert decide(UNMARKED, view, policy, 60.0, OPEN, WORSE).verdict is not Verdict.NONE  # type: ignore[arg-type]


class TwoLineages:
    """Yesterday's and today's hand-over threads over one root, checked by turns."""

    def __init__(self, path: Path) -> None:
        self.clock, self.root = ManualClock(), LocalStorage(path)
        old, new = LocalStorage(path / "lineages/20240101"), LocalStorage(path / "lineages/20240102")
        settings = HandoverSettings("healthy", tolerance_s=60.0, confirm_timeout_s=100.0, bounds=BOUNDS)
        self.old_storage = old
        self.old = HandoverThread(old, "old", 1, settings, Successor(new, self.root, "lineages/20240102"), self.clock)
        self.new = HandoverThread(new, "new", 1, settings, clock=self.clock)
        self._beats = 0

    def check(self, old: list[WindowFigures], new: list[WindowFigures], *, served: str = "lineages/20240101") -> None:
        """One interval: both report an event time of 36000 s, their windows, and the server what it serves."""
        self._beats += 1
        status = ServingStatus(
            server="a",
            url="http://127.0.0.1:1",
            heartbeat=self._beats,
            ready=True,
            deployment=1,
            lineage=served,
            snapshot_digest="d",
            term=1,
            sequence=1,
            step=1,
            watermark=1.0,
            swapped_at=None,
            updated_at=0.0,
        )
        self.root.write("serving/a.json", status.to_bytes())
        self.new.report(Point(36000.0, windows=new))
        self.new.check()
        self.old.report(Point(36000.0, windows=old))
        self.old.check()
        self.clock.advance(5.0)

    @property
    def mark(self) -> float | None:
        return json.loads(self.old_storage.read("progress.json")).get("handover_mark")


@pytest.fixture
def lineages(tmp_path: Path) -> TwoLineages:
    return TwoLineages(tmp_path)


def test_two_lineages_hand_over_once_the_new_one_is_healthy_and_served(lineages: TwoLineages) -> None:
    own = [window(hour) for hour in range(9)]
    for new in ([], [window(8, auc=0.5)]):
        for _ in range(3):
            lineages.check(own, new)
        assert lineages.mark is None
    assert "auc" in lineages.old.decision.reason
    lineages.check([*own, window(9)], [window(8, auc=0.5), window(9)])
    assert lineages.mark == 36000.0
    lineages.check([*own, window(9)], [window(9)])
    assert not lineages.old.verdict
    lineages.check([*own, window(9)], [window(9)], served="lineages/20240102")
    assert lineages.old.verdict


def test_a_successor_that_turns_out_worse_after_the_switch_does_not_retire_its_predecessor(lineages: TwoLineages) -> None:
    for _ in range(2):
        lineages.check([window(8)], [window(8)])
    assert lineages.mark is not None
    for _ in range(3):
        lineages.check([window(8), window(9)], [window(8), window(9, entropy=1.5)], served="lineages/20240102")
    assert not lineages.old.verdict
    assert "normalized_entropy" in lineages.old.decision.reason


def test_the_settings_of_a_config() -> None:
    config = HandoverConfig.model_validate({"policy": "healthy", "health": {"min_events": 5, "auc": 0.1}})
    settings = handover_settings(config)
    assert (settings.policy, settings.bounds) == ("healthy", HealthBounds(5, 0.1, 0.01, 0.05))
