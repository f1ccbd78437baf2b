"""What the deployer sees of lineages: how long a stream has been dead, bad or well; whether a predecessor's end means anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunRecord, RunStatus
from tidemill.contracts.progress import ProgressReport
from tidemill.lineage.fallback import Condition
from tidemill.lineage.handover import switch_due
from tidemill.lineage.liveness import Liveness
from tidemill.lineage.records import Retirement, record_key, retire
from tidemill.lineage.watches import PAUSED, ConditionWatch, SwitchWatch
from tidemill.storage.backends.local import LocalStorage

DAY1, DAY2, DAY3 = (layout.lineage(f"2024010{day}") for day in (1, 2, 3))
LIVENESS_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def write_run(
    root: LocalStorage, lineage: str, heartbeat: int, *, run_id: str = "r1", status: RunStatus = "running", paused: bool = False
) -> None:
    record = RunRecord(
        run_id=run_id,
        kind="train_stream",
        status=status,
        started_at=0.0,
        ended_at=None if status == "running" else 1.0,
        heartbeat=heartbeat,
        details={PAUSED: paused},
    )
    root.write(f"{lineage}/{record_key(run_id)}", record.to_bytes())


def test_a_condition_lasts_from_when_it_was_first_seen(root: LocalStorage) -> None:
    clock = ManualClock()
    watch = ConditionWatch(root, DAY2, LIVENESS_S, clock=clock)
    assert watch.look() == Condition(), "there is no run yet"
    write_run(root, DAY2, 1)
    assert watch.look() == Condition(), "a heartbeat that was seen once may be a leftover"
    seen: list[Condition] = []
    for heartbeat, paused, status in [(2, False, "running"), (3, True, "running"), (4, True, "running"), (5, False, "failed")]:
        clock.advance(10.0)
        write_run(root, DAY2, heartbeat, paused=paused, status=status)  # type: ignore[arg-type]
        seen.append(watch.look())
    assert seen == [Condition(well_s=0.0), Condition(bad_s=0.0), Condition(bad_s=10.0), Condition(dead_s=0.0)]
    clock.advance(7.0)
    assert watch.look(ended=True) == Condition(dead_s=7.0, gone=True)
    write_run(root, DAY2, 1, run_id="r2")
    assert watch.look() == Condition(well_s=0.0), "another run begins anew"
    clock.advance(LIVENESS_S + 1.0)
    assert watch.look() == Condition(dead_s=0.0), "its heartbeat stands still"


@pytest.mark.parametrize("status", ["completed", "retired"])
def test_a_stream_that_is_over_is_not_gone(root: LocalStorage, status: RunStatus) -> None:
    write_run(root, DAY2, 1, status=status)
    assert ConditionWatch(root, DAY2, LIVENESS_S, clock=ManualClock()).look(ended=True) == Condition()


@pytest.mark.parametrize(("successor", "counts"), [(DAY2, True), (f"/root/{DAY2}/", True), (DAY3, False), (None, False)])
def test_only_a_retirement_in_favour_of_this_successor_counts(root: LocalStorage, successor: str | None, counts: bool) -> None:
    """A predecessor that retired for another lineage, or by hand, says nothing of this one; it doesn't block either."""
    clock = ManualClock()
    write_run(root, DAY1, 5, status="retired")
    root.write(f"{DAY1}/progress.json", ProgressReport(data_ts=1000.0, heartbeat=9, run_id="r1", term=1).to_bytes())
    retire(LocalStorage(root.root / DAY1), 1, Retirement(successor, 1.0, 7), clock=clock)
    watch = SwitchWatch(root, DAY2, DAY1, LIVENESS_S, clock=clock)
    assert watch.is_retired()
    view = watch.predecessor()
    assert (view.retired, view.liveness) == (counts, Liveness.DEAD)
    assert switch_due(view, watch.successor(), "served", 10.0).due is counts
    for heartbeat in (1, 2):
        report = ProgressReport(data_ts=995.0, released_watermark=995.0, heartbeat=heartbeat, run_id="r2", term=1)
        root.write(f"{DAY2}/progress.json", report.to_bytes())
        successor_view = watch.successor()
    assert switch_due(watch.predecessor(), successor_view, "served", 10.0).due
