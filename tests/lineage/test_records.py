"""Records of runs and lineages: their life, under a store that fails, and the lineage that never starts again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidemill.cadence import StopReason
from tidemill.clock import ManualClock
from tidemill.contracts.lineage import RunRecord
from tidemill.errors import DataError, FencedError, LineageError, RetiredError, StorageError
from tidemill.lineage.records import (
    Retirement,
    RunRecorder,
    RunStart,
    new_run_id,
    open_lineage,
    read_lineage,
    record_key,
    require_open,
    retire,
    run_records,
)
from tidemill.lineage.terms import open_term
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Chunk
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash

Recorders = Callable[..., RunRecorder]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "lineages" / "20240102")


@pytest.fixture
def recorder(storage: LocalStorage) -> Iterator[Recorders]:
    """Makes recorders whose heartbeat doesn't come by itself, and ends their threads."""
    made: list[RunRecorder] = []

    def make(
        run_id: str = "r1",
        heartbeat_s: float = 1000.0,
        on: FaultyStorage | LocalStorage | None = None,
        term: int | None = 3,
    ) -> RunRecorder:
        start = RunStart(run_id, "train_stream", date="20240102", term=term, boundary=86400.0)
        made.append(RunRecorder(on or storage, start, heartbeat_s=heartbeat_s, clock=ManualClock()))
        return made[-1]

    yield make
    for one in made:
        one._stopping.set()


def read(storage: LocalStorage, run_id: str = "r1") -> RunRecord:
    return RunRecord.parse(storage.read(record_key(run_id)), where=run_id)


def test_run_ids_sort_by_start_and_differ() -> None:
    clock = ManualClock()
    ids = []
    for _ in range(5):
        ids.append(new_run_id(clock))
        clock.advance(0.25)
    assert ids == sorted(ids)
    assert len({new_run_id(clock) for _ in range(20)}) == 20


def test_a_run_is_on_record_from_its_start(storage: LocalStorage, recorder: Recorders) -> None:
    recorder()
    record = read(storage)
    assert (record.status, record.kind, record.date, record.term, record.boundary) == (
        "running",
        "train_stream",
        "20240102",
        3,
        86400.0,
    )
    assert record.ended_at is None


def test_a_run_that_cannot_be_recorded_does_not_start(storage: LocalStorage, recorder: Recorders) -> None:
    faulty = FaultyStorage(storage)
    faulty.fail_at(1)
    with pytest.raises(StorageError):
        recorder(on=faulty)


@pytest.mark.parametrize(
    ("reason", "error", "status", "exit_code"),
    [
        (StopReason.EXHAUSTED, None, "completed", 0),
        (StopReason.STEP_LIMIT, None, "completed", 0),
        (StopReason.HANDED_OVER, None, "retired", 0),
        (StopReason.PREEMPTED, None, "interrupted", 75),
        (StopReason.FAILED, DataError("row 7"), "failed", 65),
        (StopReason.FAILED, ZeroDivisionError("x"), "failed", 1),
    ],
)
def test_each_ending_has_its_row(
    storage: LocalStorage, recorder: Recorders, reason: StopReason, error: Exception | None, status: str, exit_code: int
) -> None:
    run = recorder()
    run.update(step=10, examples=100, watermark=5.0, details={"rows_per_s": 3.0})
    run.update(sequence=4, details={"late_rows": 2})
    run.finish(reason, error=error, successor="lineages/20240103" if reason is StopReason.HANDED_OVER else None)
    record = read(storage)
    assert (record.status, record.reason, record.exit_code) == (status, reason.name.lower(), exit_code)
    assert (record.step, record.examples, record.watermark, record.sequence) == (10, 100, 5.0, 4)
    assert record.details == {"rows_per_s": 3.0, "late_rows": 2}
    assert record.ended_at is not None
    assert (record.error is None) == (error is None)
    assert (record.successor is not None) == (status == "retired")


def test_the_heartbeat_moves_on_by_itself_and_carries_updates(storage: LocalStorage, recorder: Recorders) -> None:
    run = recorder(heartbeat_s=0.01)
    run.update(step=5)
    waited = threading.Event()
    for _ in range(1000):
        record = read(storage)
        if record.heartbeat >= 3 and record.step == 5:
            break
        waited.wait(0.01)
    assert (record.heartbeat >= 3, record.step) == (True, 5)


def test_the_final_record_is_tried_again(storage: LocalStorage, recorder: Recorders) -> None:
    faulty = FaultyStorage(storage)
    run = recorder(on=faulty)
    faulty.fail_at(2, 3)
    run.finish(StopReason.EXHAUSTED)
    assert read(storage).status == "completed"


def test_a_heartbeat_under_way_cannot_overwrite_the_final_record(tmp_path: Path) -> None:
    class SlowStorage(LocalStorage):
        reached, let_go = threading.Event(), threading.Event()
        writes = 0

        def write(self, key: str, *chunks: Chunk) -> None:
            self.writes += 1
            if self.writes == 2:
                self.reached.set()
                assert self.let_go.wait(30.0)
            super().write(key, *chunks)

    storage = SlowStorage(tmp_path)
    run = RunRecorder(storage, RunStart("r1", "train_stream"), heartbeat_s=0.001)
    assert storage.reached.wait(10.0)
    finishing = threading.Thread(target=run.finish, args=(StopReason.EXHAUSTED,), daemon=True)
    finishing.start()
    storage.let_go.set()
    finishing.join(10.0)
    assert read(storage).status == "completed"


def test_runs_of_a_folder_are_listed_oldest_first_and_torn_records_left_out(
    tmp_path: Path, storage: LocalStorage, recorder: Recorders
) -> None:
    for run_id in ("r2", "r1", "r3"):
        recorder(run_id)
    storage.write("runs/r3/record.json", b'{"schema": ')
    storage.write("runs/r1/deeper/record.json", b"{}")
    assert [record.run_id for record in run_records(storage)] == ["r1", "r2"]
    assert [record.run_id for record in run_records(LocalStorage(tmp_path), prefix="lineages/20240102")] == ["r1", "r2"]


def test_a_run_whose_clock_is_behind_comes_after_the_one_that_it_follows(storage: LocalStorage, recorder: Recorders) -> None:
    """D8: never by comparing the clocks of two machines. The newest run's heartbeat tells whether a lineage is alive."""
    for run_id, term in (("20240102T100000", 1), ("20240102T110000", None), ("20240102T120000", 3), ("20240102T115000", 4)):
        recorder(run_id, term=term)
    recorder("20240102T095000", term=2)
    assert [record.term for record in run_records(storage)] == [1, 2, None, 3, 4]


class TestLineage:
    def test_opening_is_idempotent(self, storage: LocalStorage) -> None:
        assert open_lineage(storage, "20240102", 86400.0) == open_lineage(storage, "20240102", 86400.0)
        assert require_open(storage) is not None

    @pytest.mark.parametrize(("date", "boundary"), [("20240103", 86400.0), ("20240102", 0.0), (None, None)])
    def test_another_date_or_boundary_is_refused(self, storage: LocalStorage, date: str | None, boundary: float | None) -> None:
        open_lineage(storage, "20240102", 86400.0)
        with pytest.raises(LineageError, match="new lineage"):
            open_lineage(storage, date, boundary)

    def test_a_retired_lineage_never_starts_again_and_names_its_successor(self, storage: LocalStorage) -> None:
        open_lineage(storage, "20240102", 86400.0)
        term = open_term(storage, run_id="r1", nonce="n")
        retired = retire(storage, term, Retirement("lineages/20240103", 1.5, 42), clock=ManualClock(5.0))
        assert (retired.status, retired.handover_lag_s, retired.last_sequence, retired.retired_at) == ("retired", 1.5, 42, 5.0)
        for start in (lambda: require_open(storage), lambda: open_lineage(storage, "20240102", 86400.0)):
            with pytest.raises(RetiredError, match="lineages/20240103"):
                start()

    def test_retiring_twice_keeps_the_first(self, storage: LocalStorage) -> None:
        open_lineage(storage, "20240102", 86400.0)
        first = retire(storage, 1, Retirement("lineages/20240103", 1.5, 42))
        assert retire(storage, 1, Retirement("lineages/20240104", 9.0, 1)) == first
        assert read_lineage(storage) == first

    def test_a_run_that_was_replaced_cannot_retire_the_lineage(self, storage: LocalStorage) -> None:
        open_lineage(storage, "20240102", 86400.0)
        old = open_term(storage, run_id="r1", nonce="n1")
        open_term(storage, run_id="r2", nonce="n2")
        with pytest.raises(FencedError):
            retire(storage, old, Retirement(None, None, None))
        assert require_open(storage) is not None

    def test_dying_anywhere_while_retiring_leaves_it_open_or_retired_and_the_next_try_completes(self, tmp_path: Path) -> None:
        for operation in range(1, 20):
            inner = LocalStorage(tmp_path / str(operation))
            open_lineage(inner, "20240102", 86400.0)
            faulty = FaultyStorage(inner)
            faulty.crash_at(operation)
            try:
                retire(faulty, 1, Retirement("lineages/20240103", 1.0, 2))
                survived = True
            except SimulatedCrash:
                survived = False
            left = read_lineage(inner)
            assert left is not None
            assert left.status == ("retired" if survived else "open")
            assert retire(inner, 1, Retirement("lineages/20240103", 1.0, 2)).status == "retired"
            if survived:
                assert operation > 2
                return
        pytest.fail("never survived")
