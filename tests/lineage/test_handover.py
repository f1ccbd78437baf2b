"""The hand-over decision as a table, start-up validation, and when serving may switch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.clock import ManualClock
from tidemill.contracts.progress import ProgressReport
from tidemill.errors import ConfigError
from tidemill.lineage.handover import (
    NOT_CONFIRMED,
    POLICIES,
    Confirmation,
    OwnProgress,
    Policy,
    PredecessorView,
    SuccessorView,
    Verdict,
    decide,
    switch_due,
    validate_handover,
)
from tidemill.lineage.liveness import Liveness
from tidemill.lineage.progress import ProgressReader
from tidemill.storage.backends.local import LocalStorage

OWN = OwnProgress(data_ts=1000.0, run_id="old")
CONFIRMED = Confirmation(True, "all 1 live servers serve lineages/20240102")


def successor(
    data_ts: float, *, heartbeat: int | None = 7, liveness: Liveness = Liveness.ALIVE, run_id: str = "new"
) -> SuccessorView:
    return SuccessorView(ProgressReport(data_ts=data_ts, run_id=run_id, term=1, heartbeat=heartbeat), liveness, "")


@pytest.mark.parametrize(
    ("view", "caught_up", "served"),
    [
        pytest.param(SuccessorView(None), Verdict.NONE, Verdict.NONE, id="absent"),
        pytest.param(successor(1000.0, heartbeat=None), Verdict.HAND_OVER, Verdict.NONE, id="no heartbeat"),
        pytest.param(successor(1000.0, liveness=Liveness.DEAD), Verdict.NONE, Verdict.NONE, id="dead"),
        pytest.param(successor(1000.0, liveness=Liveness.UNKNOWN), Verdict.NONE, Verdict.NONE, id="seen once"),
        pytest.param(successor(939.9), Verdict.NONE, Verdict.NONE, id="behind"),
        pytest.param(successor(940.0), Verdict.HAND_OVER, Verdict.MARK, id="exactly at tolerance"),
        pytest.param(successor(950.0), Verdict.HAND_OVER, Verdict.MARK, id="within tolerance"),
        pytest.param(successor(1000.0), Verdict.HAND_OVER, Verdict.MARK, id="equal"),
        pytest.param(successor(9000.0), Verdict.HAND_OVER, Verdict.MARK, id="ahead"),
        pytest.param(successor(1000.0, run_id="old"), Verdict.NONE, Verdict.NONE, id="own file through another path"),
    ],
)
def test_decision_table(view: SuccessorView, caught_up: Verdict, served: Verdict) -> None:
    """A3, A4, A12; DCL 9.19. Not yet served: policy `served` marks, and goes on."""
    assert decide(OWN, view, "caught_up", 60.0).verdict is caught_up
    assert decide(OWN, view, "served", 60.0, NOT_CONFIRMED).verdict is served


@pytest.mark.parametrize("policy", ["caught_up", "served"])
def test_without_own_event_time_there_is_no_hand_over(policy: str) -> None:
    decision = decide(OwnProgress(data_ts=None), successor(1000.0), policy, 60.0, CONFIRMED)  # type: ignore[arg-type]
    assert decision.verdict is Verdict.NONE
    assert "no event time" in decision.reason


def test_the_lag_is_told_also_when_nothing_follows_from_it() -> None:
    assert decide(OWN, successor(500.0), "caught_up", 60.0).lag_s == 500.0
    assert decide(OWN, successor(1010.0), "caught_up", 60.0).lag_s == -10.0


def test_served_waits_after_the_mark_until_serving_is_confirmed() -> None:
    marked = OwnProgress(data_ts=1100.0, run_id="old", handover_mark=1000.0)
    assert decide(marked, successor(1100.0), "served", 60.0).verdict is Verdict.NONE
    assert decide(marked, successor(1100.0), "served", 60.0, CONFIRMED).verdict is Verdict.HAND_OVER


def test_served_restarted_after_the_confirmation_retires_at_once() -> None:
    assert decide(OWN, SuccessorView(None), "served", 60.0, CONFIRMED).verdict is Verdict.HAND_OVER


def test_caught_up_ignores_what_is_served() -> None:
    assert decide(OWN, SuccessorView(None), "caught_up", 60.0, CONFIRMED).verdict is Verdict.NONE


@given(own=st.floats(0, 1e6), other=st.floats(0, 1e6), tolerance=st.floats(0, 1e6), more=st.floats(0, 1e6))
def test_a_successor_that_is_further_or_a_wider_tolerance_never_undoes_a_hand_over(
    own: float, other: float, tolerance: float, more: float
) -> None:
    if decide(OwnProgress(own), successor(other), "caught_up", tolerance).verdict is Verdict.HAND_OVER:
        assert decide(OwnProgress(own), successor(other + more), "caught_up", tolerance).verdict is Verdict.HAND_OVER
        assert decide(OwnProgress(own), successor(other), "caught_up", tolerance + more).verdict is Verdict.HAND_OVER


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"{data_ts: 1000", id="corrupt"),
        pytest.param(b'{"data_ts": 1000.0', id="truncated"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe{}", id="not UTF-8"),
        pytest.param(b"[" * 100_000, id="nested too deep"),
        pytest.param(b"[1000.0]", id="not an object"),
        pytest.param(b"1000.0", id="a number"),
        pytest.param(b"{}", id="no data_ts"),
        pytest.param(b'{"data_ts": null}', id="null"),
        pytest.param(b'{"data_ts": "1000"}', id="text"),
        pytest.param(b'{"data_ts": ' + b"9" * 400 + b"}", id="400-digit integer"),
        pytest.param(b'{"data_ts": true}', id="bool"),
        pytest.param(b'{"data_ts": NaN}', id="NaN"),
        pytest.param(b'{"data_ts": Infinity}', id="infinity"),
        pytest.param(b'{"data_ts": 1e999}', id="overflows to infinity"),
        pytest.param(b'{"data_ts": -1}', id="minus one"),
        pytest.param(b'{"data_ts": -0.5}', id="negative"),
        pytest.param(b'{"schema": "tidemill.progress/1", "data_ts": 1000.0, "heartbeat": true}', id="heartbeat is a bool"),
        pytest.param(b'{"schema": "tidemill.progress/1", "data_ts": 1.0, "heartbeat": ' + b"9" * 400 + b"}", id="huge heartbeat"),
        pytest.param(b'{"schema": "tidemill.progress/1", "data_ts": 1000.0, "metrics": {"auc": NaN}}', id="a metric is NaN"),
        pytest.param(b'{"schema": "tidemill.progress/1", "data_ts": 1000.0, "metrics": [0.7]}', id="metrics are a list"),
        pytest.param(b'{"schema": "tidemill.progress/1", "data_ts": 1000.0, "run_id": 5}', id="run_id is a number"),
        pytest.param(b'{"schema": "tidemill.progress/99", "data_ts": 1000.0}', id="of a newer version"),
        pytest.param(b'{"schema": "tidemill.run/1", "data_ts": 1000.0}', id="another document"),
    ],
)
def test_an_unusable_file_means_no_hand_over_and_says_why(tmp_path: Path, data: bytes) -> None:
    """A9; DCL 9.19."""
    storage = LocalStorage(tmp_path)
    storage.write("progress.json", data)
    view = ProgressReader(storage, 30.0).look()
    decision = decide(OwnProgress(0.0), view, "caught_up", 1e9)
    assert decision.verdict is Verdict.NONE
    assert "progress.json" in decision.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stale_file_of_an_earlier_run_never_leads_to_a_hand_over(tmp_path: Path, policy: Policy) -> None:
    """A3: a heartbeat that is present must be alive; what it promises (ahead, released) counts for nothing."""
    clock, storage = ManualClock(), LocalStorage(tmp_path)
    stale = ProgressReport(data_ts=9000.0, run_id="earlier", term=1, heartbeat=41, released_watermark=9000.0)
    storage.write("progress.json", stale.to_bytes())
    reader = ProgressReader(storage, 30.0, clock=clock)
    for _ in range(20):
        assert decide(OWN, reader.look(), policy, 60.0).verdict is Verdict.NONE
        clock.advance(7.0)


def test_a_plain_file_with_data_ts_alone_is_a_valid_successor(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("progress.json", b'{"data_ts": 950}')
    assert decide(OWN, ProgressReader(storage, 30.0).look(), "caught_up", 60.0).verdict is Verdict.HAND_OVER


class TestProgressReader:
    def write(self, storage: LocalStorage, *, heartbeat: int, term: int = 1, run_id: str = "new") -> None:
        storage.write("progress.json", ProgressReport(data_ts=1000.0, run_id=run_id, term=term, heartbeat=heartbeat).to_bytes())

    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path)

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def reader(self, storage: LocalStorage, clock: ManualClock) -> ProgressReader:
        return ProgressReader(storage, 30.0, clock=clock)

    def test_a_stale_file_of_an_earlier_run_never_comes_alive(
        self, storage: LocalStorage, clock: ManualClock, reader: ProgressReader
    ) -> None:
        self.write(storage, heartbeat=41)
        states = []
        for _ in range(5):
            states.append(reader.look().liveness)
            clock.advance(10.0)
        assert states == [Liveness.UNKNOWN] * 4 + [Liveness.DEAD]

    def test_alive_while_the_heartbeat_moves_dead_when_it_stops(
        self, storage: LocalStorage, clock: ManualClock, reader: ProgressReader
    ) -> None:
        for heartbeat in (1, 2):
            self.write(storage, heartbeat=heartbeat)
            state = reader.look().liveness
        assert state is Liveness.ALIVE
        clock.advance(30.0)
        assert reader.look().liveness is Liveness.ALIVE
        clock.advance(0.1)
        assert reader.look().liveness is Liveness.DEAD

    def test_a_jump_of_the_wall_clock_changes_nothing(
        self, storage: LocalStorage, clock: ManualClock, reader: ProgressReader
    ) -> None:
        for heartbeat in (1, 2):
            self.write(storage, heartbeat=heartbeat)
            reader.look()
        clock.set_time(0.0)
        assert reader.look().liveness is Liveness.ALIVE

    def test_a_lower_term_is_a_leftover(self, storage: LocalStorage, reader: ProgressReader) -> None:
        self.write(storage, heartbeat=1, term=2)
        reader.look()
        self.write(storage, heartbeat=900, term=1, run_id="older")
        view = reader.look()
        assert view.progress is None
        assert "term 1" in view.problem

    def test_a_counter_that_goes_back_is_a_stale_read_and_no_sign_of_life(
        self, storage: LocalStorage, clock: ManualClock, reader: ProgressReader
    ) -> None:
        for heartbeat in (5, 4, 5, 4):
            self.write(storage, heartbeat=heartbeat)
            assert reader.look().liveness is Liveness.UNKNOWN

    def test_a_file_that_vanishes_and_comes_back_does_no_harm(
        self, storage: LocalStorage, clock: ManualClock, reader: ProgressReader
    ) -> None:
        assert reader.look().progress is None
        self.write(storage, heartbeat=1)
        reader.look()
        storage.delete("progress.json")
        assert decide(OWN, reader.look(), "caught_up", 60.0).verdict is Verdict.NONE
        self.write(storage, heartbeat=2)
        assert decide(OWN, reader.look(), "caught_up", 60.0).verdict is Verdict.HAND_OVER


class TestValidation:
    def test_a_good_value_is_a_number(self, tmp_path: Path) -> None:
        assert validate_handover(str(tmp_path / "next"), str(tmp_path / "own"), "0") == 0.0
        assert validate_handover("", str(tmp_path), 300) == 300.0

    @pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../own"])
    def test_the_own_folder_is_refused_however_it_is_spelled(self, tmp_path: Path, spelling: str) -> None:
        """DCL 9.19."""
        own = tmp_path / "own"
        own.mkdir()
        with pytest.raises(ConfigError, match="ONLINE_LEARNING_SUCCESSOR_DIR"):
            validate_handover(spelling.format(own), str(own), 300)

    def test_a_link_to_the_own_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "own")
        with pytest.raises(ConfigError, match="ONLINE_LEARNING_SUCCESSOR_DIR"):
            validate_handover(str(tmp_path / "link"), str(tmp_path / "own"), 300)

    def test_an_older_lineage_of_the_same_root_is_refused(self, tmp_path: Path) -> None:
        """A1: the successor is built on a later day."""
        own = f"{tmp_path}/lineages/20240102"
        with pytest.raises(ConfigError, match=r"ONLINE_LEARNING_SUCCESSOR_DIR.*20240101/ is of an earlier date"):
            validate_handover(f"{tmp_path}/lineages/20240101/", own, 300)
        validate_handover(f"{tmp_path}/lineages/20240103", own, 300)
        validate_handover(f"{tmp_path}/elsewhere/lineages/20240101", own, 300)
        validate_handover(f"{tmp_path}/20240101", own, 300)

    @pytest.mark.parametrize("value", [-1, "-0.1", "nan", float("nan"), "inf", float("inf"), "five", "", None, True, 10**400])
    def test_a_bad_tolerance_names_the_variable(self, value: object) -> None:
        """A7."""
        with pytest.raises(ConfigError, match="ONLINE_LEARNING_HANDOVER_TOLERANCE_SECS"):
            validate_handover("", "own", value)


def predecessor(
    *,
    retired: bool = False,
    liveness: Liveness = Liveness.ALIVE,
    data_ts: float = 1000.0,
    mark: float | None = None,
    released: float | None = None,
) -> PredecessorView:
    return PredecessorView(retired, liveness, ProgressReport(data_ts=data_ts, handover_mark=mark, released_watermark=released))


def released(watermark: float | None, *, liveness: Liveness = Liveness.ALIVE) -> SuccessorView:
    return SuccessorView(ProgressReport(data_ts=1000.0, heartbeat=2, released_watermark=watermark), liveness, "")


@pytest.mark.parametrize(
    ("old", "new", "caught_up", "served"),
    [
        pytest.param(None, SuccessorView(None), True, True, id="nothing is served yet"),
        pytest.param(predecessor(retired=True), released(None), True, True, id="retired"),
        pytest.param(predecessor(), released(2000.0), False, False, id="no mark yet"),
        pytest.param(predecessor(mark=990.0), released(None), False, False, id="nothing released"),
        pytest.param(predecessor(mark=990.0), released(989.9), False, False, id="released too little"),
        pytest.param(predecessor(mark=990.0), released(990.0), False, True, id="released up to the mark"),
        pytest.param(predecessor(mark=990.0), released(990.0, liveness=Liveness.DEAD), False, False, id="successor died"),
        pytest.param(predecessor(liveness=Liveness.UNKNOWN, mark=1.0), released(990.0), False, False, id="predecessor unknown"),
        pytest.param(predecessor(liveness=Liveness.DEAD), released(None), True, True, id="predecessor dead"),
        pytest.param(predecessor(liveness=Liveness.DEAD, data_ts=1060.1), released(1.0), False, False, id="dead, still behind it"),
        pytest.param(predecessor(liveness=Liveness.DEAD), released(1.0, liveness=Liveness.DEAD), False, False, id="both dead"),
        pytest.param(
            predecessor(liveness=Liveness.DEAD, released=999.0), released(930.0), True, False, id="dead, had released more"
        ),
        pytest.param(predecessor(liveness=Liveness.DEAD, released=999.0), released(939.0), True, True, id="dead, about as fresh"),
        pytest.param(PredecessorView(False, Liveness.DEAD, None), released(1.0), True, True, id="it never reported"),
    ],
)
def test_when_serving_may_switch(old: PredecessorView | None, new: SuccessorView, caught_up: bool, served: bool) -> None:
    assert switch_due(old, new, "caught_up", 60.0).due is caught_up
    assert switch_due(old, new, "served", 60.0).due is served
