"""Whole runs over tables: killed, resumed on other numbers of ranks, continued on the next day's partitions."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.data.maxcompute.conftest import MakeSource, numbers
from tests.data.maxcompute.line import BATCH, Line
from tidemill.data.sources.maxcompute.source import MaxComputeSource
from tidemill.errors import SourceChangedError
from tidemill.testing.maxcompute import MaxComputeEmulator

BASE = "odps://prj/tables/clicks"


def sessions(line: Line) -> dict[str, str]:
    return {state.split.rpartition("/")[2]: state.fingerprint["session"] for state in line.state.splits}


def requests_about(emulator: MaxComputeEmulator, session: str) -> int:
    return sum(session in f"{request.path} {request.query}" for request in emulator.requests())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_founding_story(emulator: MaxComputeEmulator, make: MakeSource, ranks: int):
    """DCL 9.13. B2, B3, B8: an empty partition in the middle, interrupted in the third; the restored order is [s0, fresh1, s2]."""
    path = f"{BASE}/ds=20240319&ds=20240318&ds=20240320"
    parts = {"ds=20240319": numbers(0, 10_000), "ds=20240318": numbers(0, 0), "ds=20240320": numbers(10_000, 10_000)}
    emulator.add_table("prj", "clicks", parts)
    source = partial(make, path, columns=["id"], is_orderby_partition=True)
    line = Line()
    consumed = line.run(source, batches=200, lost=3)
    before = sessions(line)
    assert len(consumed) == 200 * BATCH
    assert max(consumed) > 10_000
    keys = json.loads(line.document or b"")["positions"]
    assert {key.rpartition(":")[0] for key in keys} == {
        f"{path}#0#{before['ds=20240319']}",
        f"{path}#2#{before['ds=20240320']}",
    }
    resumed = source()
    restored = [split.fingerprint["session"] for split in resumed.resume(line.state.splits)]
    assert (restored[0], restored[2]) == (before["ds=20240319"], before["ds=20240320"])
    assert restored[1] not in before.values()
    remaining = line.run(source, ranks=ranks)
    assert sorted(consumed + remaining) == list(range(20_000))
    assert set(sessions(line).values()) & set(before.values()) == {before["ds=20240319"], before["ds=20240320"]}


def test_ranks_read_ordered_partitions_together(emulator: MaxComputeEmulator, make: MakeSource):
    """All ranks take the same number of steps, and are in the same partition."""
    emulator.add_table("prj", "clicks", {"ds=2": numbers(0, 640), "ds=1": numbers(1000, 320)})
    source = partial(make, f"{BASE}/ds=2&ds=1", columns=["id"], is_orderby_partition=True)
    line = Line()
    ids = line.run(source, ranks=2, batches=5)
    assert sorted(ids) == list(range(640))


def test_a_daily_job_continues_in_its_own_folder(emulator: MaxComputeEmulator, make: MakeSource):
    """B6: day by day on a sliding list; what was read isn't read again, even when it's named after two days."""
    emulator.add_table("prj", "clicks", {f"ds={day}": numbers(day * 1000, 200) for day in range(1, 6)})
    line = Line()
    for newest in range(2, 6):
        path = f"{BASE}/" + "&".join(f"ds={day}" for day in range(newest, max(0, newest - 4), -1))
        line.run(partial(make, path, columns=["id"], is_orderby_partition=True), ranks=2, batches=1)
        line.run(partial(make, path, columns=["id"], is_orderby_partition=True))
    assert sorted(line.trained) == [day * 1000 + row for day in range(1, 6) for row in range(200)]


def test_a_daily_job_continues_from_its_parents_folder(emulator: MaxComputeEmulator, make: MakeSource):
    """B6: --fine_tune_checkpoint of yesterday's folder with --continue_train, on a list that overlaps."""
    emulator.add_table("prj", "clicks", {f"ds={day}": numbers(day * 1000, 200) for day in (1, 2, 3)})
    first = Line()
    first.run(partial(make, f"{BASE}/ds=1&ds=2", columns=["id"], is_orderby_partition=True), ranks=2)
    second = first.child()
    assert sorted(second.run(partial(make, f"{BASE}/ds=2&ds=3", columns=["id"], is_orderby_partition=True))) == list(
        range(3000, 3200)
    )
    third = second.child()
    assert third.run(partial(make, f"{BASE}/ds=1&ds=2&ds=3", columns=["id"], is_orderby_partition=True)) == []


def test_what_was_read_before_this_days_passes_is_in_none_of_them(emulator: MaxComputeEmulator, make: MakeSource):
    """B6: two passes a day, the second day's first pass interrupted."""
    emulator.add_table("prj", "clicks", {f"ds={day}": numbers(day * 1000, 200) for day in (1, 2)})
    line = Line()
    line.run(partial(make, f"{BASE}/ds=1", columns=["id"], is_orderby_partition=True), num_passes=2)
    both = partial(make, f"{BASE}/ds=1&ds=2", columns=["id"], is_orderby_partition=True)
    line.run(both, batches=1, num_passes=2)
    line.run(both, batches=3, num_passes=2, ranks=2)
    line.run(both, num_passes=2, ranks=3)
    assert sorted(line.trained) == sorted(2 * [day * 1000 + row for day in (1, 2) for row in range(200)])


def test_a_daily_job_without_order_starts_afresh_on_disjoint_partitions(emulator: MaxComputeEmulator, make: MakeSource):
    """B6, without is_orderby_partition."""
    emulator.add_table("prj", "clicks", {f"ds={day}": numbers(day * 1000, 200) for day in (1, 2, 3)})
    line = Line()
    line.run(partial(make, f"{BASE}/ds=1&ds=2", columns=["id"]), ranks=3)
    with pytest.raises(SourceChangedError, match=r"no longer named: ds=1; new: ds=3"):
        line.run(partial(make, f"{BASE}/ds=2&ds=3", columns=["id"]), ranks=2)
    line.run(partial(make, f"{BASE}/ds=3", columns=["id"]))
    assert sorted(line.trained) == [day * 1000 + row for day in (1, 2, 3) for row in range(200)]


def test_a_finished_run_on_the_same_list_reads_nothing(emulator: MaxComputeEmulator, make: MakeSource):
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 200)})
    line = Line()
    source = partial(make, f"{BASE}/ds=1", columns=["id"])
    line.run(source)
    assert line.run(source) == []


def test_a_partition_that_had_no_rows_is_read_when_it_has_some(emulator: MaxComputeEmulator, make: MakeSource):
    """B3: it was never read."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 200), "ds=2": numbers(0, 0)})
    source = partial(make, f"{BASE}/ds=1&ds=2", columns=["id"], is_orderby_partition=True)
    line = Line()
    line.run(source)
    emulator.add_table("prj", "clicks", {"ds=2": numbers(500, 10)})
    assert sorted(line.run(source)) == list(range(500, 510))


def test_a_later_pass_reads_what_an_earlier_run_had_finished(emulator: MaxComputeEmulator, make: MakeSource):
    """Its session was let go: the pass reads it through a new one."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 200), "ds=2": numbers(200, 200)})
    source = partial(make, f"{BASE}/ds=1&ds=2", columns=["id"], is_orderby_partition=True)
    line = Line()
    line.run(source, batches=4, num_passes=2)
    before = sessions(line)
    emulator.end_session(before["ds=1"])
    line.run(source, ranks=2, num_passes=2)
    assert sorted(line.trained) == sorted([*range(400), *range(400)])
    assert sessions(line)["ds=1"] != before["ds=1"]


def test_a_session_that_was_read_to_its_end_is_never_asked_for(emulator: MaxComputeEmulator, make: MakeSource):
    """B4."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 128), "ds=2": numbers(128, 128)})
    source = partial(make, f"{BASE}/ds=1&ds=2", columns=["id"], is_orderby_partition=True)
    line = Line()
    line.run(source, batches=3)
    finished = sessions(line)["ds=1"]
    emulator.end_session(finished)
    asked = requests_about(emulator, finished)
    assert asked
    assert sorted(line.run(source)) == list(range(192, 256))
    assert requests_about(emulator, finished) == asked


@pytest.mark.parametrize("status", ["EXPIRED", "CRITICAL"])
def test_a_session_with_unread_rows_that_has_ended_is_an_error_on_every_rank(
    emulator: MaxComputeEmulator, make: MakeSource, status: str
):
    """DCL 9.13. B4: before anything is trained."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 200)})
    source = partial(make, f"{BASE}/ds=1", columns=["id"])
    line = Line()
    line.run(source, batches=1)
    session = sessions(line)["ds=1"]
    emulator.end_session(session, status)
    before = len(line.trained)
    with pytest.raises(SourceChangedError, match=rf"prj.clicks/ds=1: read session {session} can't go on: it is {status}.*restart"):
        line.run(source, ranks=2)
    assert len(line.trained) == before


def test_foreign_positions_are_tolerated(emulator: MaxComputeEmulator, make: MakeSource, caplog: pytest.LogCaptureFixture):
    """DCL 9.13. B9: fine-tuned from a run over another table."""
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 200)})
    emulator.add_table("prj", "other", {"ds=1": numbers(5000, 200)})
    parent = Line()
    parent.run(partial(make, "odps://prj/tables/other/ds=1", columns=["id"]), batches=2)
    line = parent.child()
    assert sorted(line.run(partial(make, f"{BASE}/ds=1", columns=["id"]))) == list(range(200))


def test_tables_of_one_name_are_kept_apart(emulator: MaxComputeEmulator, make: MakeSource):
    """DCL 9.13. The same name in two projects, and in two schemas of one."""
    emulator.add_table("a", "t", {"ds=1": numbers(0, 100)})
    emulator.add_table("b", "t", {"ds=1": numbers(100, 100)})
    emulator.add_table("a", "t", {"ds=1": numbers(200, 100)}, schema="dw")
    paths = "odps://a/tables/t/ds=1,odps://b/tables/t/ds=1,odps://a/tables/dw.t/ds=1"
    source = partial(make, paths, columns=["id"])
    line = Line()
    line.run(source, batches=3)
    line.run(source, ranks=2)
    assert sorted(line.trained) == list(range(300))


def test_a_source_is_what_the_registry_says():
    from tidemill.registry import resolve

    assert resolve("source", "maxcompute") is MaxComputeSource
