"""The supervisor when things go wrong: serving goes back and forward, others take over, tables are late, steps die half way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lineage.test_by_hand import write_release
from tests.lineage.test_local import DAY1, DAY2, PLAYER, REPOSITORY, STREAM1, STREAM2, cycle_config, eventually, root_of
from tidemill import logs
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunRecord, TermRecord
from tidemill.errors import DeadlineError, FencedError, LineageError
from tidemill.lineage.by_hand import promote, roll_back
from tidemill.lineage.completeness import table_lacks
from tidemill.lineage.cycle import CompleteConfig, CycleConfig, FallBackConfig, ScheduleConfig
from tidemill.lineage.deployments import deployments
from tidemill.lineage.on_record import read_records
from tidemill.lineage.orchestrators.local import LocalCycle
from tidemill.lineage.records import RunRecorder, RunStart, record_key, run_records
from tidemill.lineage.terms import newest_term
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def quick(tmp_path: Path, *, max_restarts: float = 0, **fall_back: float) -> CycleConfig:
    config = cycle_config(tmp_path, max_restarts=max_restarts)
    bounds = FallBackConfig(**{"dead_s": 600.0, "bad_s": 600.0, "well_s": 600.0, **fall_back})
    return config.model_copy(update={"handover": config.handover.model_copy(update={"fall_back": bounds})})


@contextmanager
def switched(config: CycleConfig, root: LocalStorage) -> Iterator[LocalCycle]:
    """A supervisor that has just switched from the first day, which has retired at its release 2, to the second."""
    with LocalCycle(config, poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        for sequence in (1, 2):
            write_release(root, DAY1, sequence)
        result = cycle.run_date(DAY2)
        assert result is not None
        assert result.retired
        yield cycle


def tell(root: LocalStorage, date: str, word: str) -> None:
    (root.root / f"tell-{date}").write_text(word)


def served(root: LocalStorage) -> list[tuple[str, int | None]]:
    return [(deployment.lineage.rpartition("/")[2], deployment.pin_sequence) for deployment in deployments(root)]


def watch_until(cycle: LocalCycle, condition: Callable[[], bool]) -> None:
    def look() -> bool:
        cycle.guard.look()
        return condition()

    eventually(look)


SWITCHED = [(DAY1, None), (DAY2, None)]


def test_a_successor_that_died_for_good_is_left_and_one_that_came_back_is_returned_to_once(
    tmp_path: Path, root: LocalStorage
) -> None:
    """Issue 5: the deployer points back to the predecessor's last release, without flapping."""
    with switched(quick(tmp_path, well_s=0.5), root) as cycle:
        for turn in range(2):
            tell(root, DAY2, "die")
            watch_until(cycle, lambda n=turn: served(root)[2 + 2 * n :] == [(DAY1, 2)])
            assert deployments(root)[-1].reason.startswith("lineages/20240102 has ended, and isn't started again: back")
            tell(root, DAY2, "")
            cycle.start_stream(DAY2)
            if turn == 0:
                watch_until(cycle, lambda: served(root)[3:] == [(DAY2, None)])
        eventually(lambda: cycle.children.pid(STREAM2) is not None)
        until = time.monotonic() + 2.0
        watch_until(cycle, lambda: time.monotonic() > until)
        assert served(root) == [*SWITCHED, (DAY1, 2), (DAY2, None), (DAY1, 2)], "no second return"


def test_a_successor_whose_quality_gate_pauses_it_is_left(tmp_path: Path, root: LocalStorage) -> None:
    """Through the supervisor's own loop: nobody calls anything."""
    with switched(quick(tmp_path, bad_s=0.5), root) as cycle:
        tell(root, DAY2, "pause")
        thread = threading.Thread(target=cycle.wait, daemon=True)
        thread.start()
        try:
            eventually(lambda: served(root) == [*SWITCHED, (DAY1, 2)])
            assert "paused by its quality gate" in deployments(root)[-1].reason
            assert cycle.children.pid(STREAM2) is not None, "it trains on"
        finally:
            cycle.request_stop()
            thread.join(30.0)
        assert not thread.is_alive()


def test_the_last_word_before_the_supervisor_ends_is_a_look_at_serving(
    tmp_path: Path, root: LocalStorage, capture_events: Callable[[], list[dict[str, object]]]
) -> None:
    with switched(quick(tmp_path), root) as cycle:
        tell(root, DAY2, "die")
        with pytest.raises(LineageError, match="train_stream-20240102 ended with 1"):
            cycle.wait()
    assert served(root) == [*SWITCHED, (DAY1, 2)]
    (turned,) = [line for line in capture_events() if line["event"] == "cycle.turned"]
    assert (turned["way"], turned["number"], turned["lineage"]) == ("back", 3, layout.lineage(DAY1))


@pytest.mark.parametrize("by_hand", ["promote", "rollback"])
def test_what_a_person_deployed_is_left_alone(tmp_path: Path, root: LocalStorage, by_hand: str) -> None:
    with switched(quick(tmp_path, dead_s=0.0, well_s=0.0), root) as cycle:
        if by_hand == "promote":
            roll_back(root, "to be promoted again")
            promote(root, DAY2, "I know better")
            tell(root, DAY2, "die")
            eventually(lambda: cycle.children.pid(STREAM2) is None)
        else:
            roll_back(root, "I know better")
        before = served(root)
        for _ in range(5):
            assert cycle.guard.look() is None
        assert served(root) == before


def test_a_person_who_deploys_while_the_cycle_decides_wins(tmp_path: Path, root: LocalStorage) -> None:
    """The decision was about another deployment: it is dropped, and made anew."""
    with switched(quick(tmp_path), root) as cycle:
        tell(root, DAY2, "die")
        eventually(lambda: cycle.children.pid(STREAM2) is None)
        cycle.guard._before_deploy = lambda _: roll_back(root, "by hand, at this very moment", sequence=1, date=DAY1)
        watch_until(cycle, lambda: len(served(root)) > 2)
        cycle.guard.look()
    assert served(root) == [*SWITCHED, (DAY1, 1)]


def test_a_predecessor_whose_folder_is_gone_is_not_gone_back_to(tmp_path: Path, root: LocalStorage) -> None:
    with switched(quick(tmp_path), root) as cycle:
        root.delete(f"{layout.lineage(DAY1)}/{layout.SNAPSHOT}")
        tell(root, DAY2, "die")
        eventually(lambda: cycle.children.pid(STREAM2) is None)
        for _ in range(3):
            assert cycle.guard.look() is None
    assert served(root) == SWITCHED


def test_a_deployer_that_fails_when_serving_goes_back_ends_nothing(tmp_path: Path, root: LocalStorage) -> None:
    with switched(quick(tmp_path, bad_s=0.2), root) as cycle:
        failures: list[str] = []

        def fail_twice(date: str) -> None:
            if len(failures) < 2:
                failures.append(date)
                raise LineageError("eascmd modify: ended with 3")

        cycle.guard._before_deploy = fail_twice
        tell(root, DAY2, "pause")
        threading.Thread(target=cycle.wait, daemon=True).start()
        eventually(lambda: served(root) == [*SWITCHED, (DAY1, 2)])
        cycle.request_stop()
    assert failures == [DAY1, DAY1]


def test_the_next_date_takes_over_from_a_lineage_that_was_left(tmp_path: Path, root: LocalStorage) -> None:
    """Dates go on in order: what was left is resumed, hands over, and the date after it is served."""
    config = quick(tmp_path, bad_s=0.2)
    day3 = "20240103"
    times = {**config.boundary.times, day3: time.time() - 30.0}
    config = config.model_copy(update={"boundary": config.boundary.model_copy(update={"times": times})})
    with switched(config, root) as cycle:
        tell(root, DAY2, "pause")
        watch_until(cycle, lambda: served(root) == [*SWITCHED, (DAY1, 2)])
        result = cycle.run_date(day3)
        assert result is not None
        assert (result.predecessor, result.retired) == (layout.lineage(DAY2), True)
    assert served(root) == [*SWITCHED, (DAY1, 2), (day3, None)]


def test_a_live_successor_is_promoted_early_if_its_predecessor_crashes_for_good(tmp_path: Path, root: LocalStorage) -> None:
    """Issue 5: before any hand-over mark; the policy would have waited for retirement."""
    config = cycle_config(tmp_path, policy="caught_up", server=False, max_restarts=0)
    far = config.handover.model_copy(update={"tolerance_s": 0.0})
    with LocalCycle(config.model_copy(update={"handover": far}), poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        eventually(lambda: bool(run_records(root, prefix=layout.lineage(DAY1))))
        tell(root, DAY1, "die")
        eventually(lambda: cycle.children.pid(STREAM1) is None)
        result = cycle.run_date(DAY2)
    assert result is not None
    assert (result.deployment.lineage, result.retired) == (layout.lineage(DAY2), False)
    assert "the predecessor is dead" in result.deployment.reason


def test_a_supervisor_that_another_has_replaced_ends_and_so_do_its_children(tmp_path: Path, root: LocalStorage) -> None:
    """On another machine, after this one was stalled for longer than a heartbeat may stand still."""
    schedule = ScheduleConfig(cron="* * * * *", first_date=DAY1)
    config = cycle_config(tmp_path, server=False).model_copy(update={"schedule": schedule})
    with LocalCycle(config, poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        taken = TermRecord(term=cycle.lease.term + 1, run_id="elsewhere", nonce="n", created_at=0.0)
        root.create(f"{layout.SUPERVISOR}/{layout.term(taken.term)}", taken.to_bytes())
        with pytest.raises(FencedError, match="taken over"):
            cycle.wait()
        with pytest.raises(FencedError):
            cycle.run_schedule()
        with pytest.raises(FencedError):
            cycle.run_date(DAY2)
    assert cycle.children.pid(STREAM1) is None
    assert not run_records(root, prefix=layout.daily(DAY2)), "it starts nothing more"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_command(config: CycleConfig, tmp_path: Path) -> subprocess.Popen[bytes]:
    """`tidemill cycle run` of the first day, as a process of its own."""
    path = tmp_path / "cycle.yaml"
    path.write_text(config.model_dump_json(exclude_none=True))
    code = "import sys; from tidemill.cli.cycle import app; app(sys.argv[1:], standalone_mode=True)"
    with (tmp_path / "output").open("wb") as file:
        argv = [sys.executable, "-c", code, "run", str(path), "--date", DAY1]
        return subprocess.Popen(argv, stdout=file, stderr=file, cwd=REPOSITORY, start_new_session=True)


def test_a_frozen_supervisor_is_replaced_and_ends_when_it_wakes(tmp_path: Path, root: LocalStorage) -> None:
    """As with two machines: its process is there, its heartbeat isn't, and its stream trains on until it is fenced."""
    config = cycle_config(tmp_path, server=False)
    supervisor = start_command(config, tmp_path)
    try:
        eventually(lambda: "deployment 1 serves" in (tmp_path / "output").read_text(), 60.0)
        eventually(lambda: bool(run_records(root, prefix=layout.lineage(DAY1))))
        supervisor.send_signal(signal.SIGSTOP)
        with LocalCycle(config, poll_s=0.05) as cycle:
            cycle.run_date(DAY1)
            eventually(lambda: [run.status for run in run_records(root, prefix=layout.lineage(DAY1))] == ["failed", "running"])
            supervisor.send_signal(signal.SIGCONT)
            assert supervisor.wait(60.0) == FencedError.exit_code
            assert "another supervisor (term 2) has taken over" in (tmp_path / "output").read_text()
            cycle.lease.require()
            assert cycle.children.pid(STREAM1) is not None
    finally:
        supervisor.kill()
        supervisor.wait()


def test_a_killed_supervisor_is_resumed_and_an_orphan_of_its_stream_is_fenced(tmp_path: Path, root: LocalStorage) -> None:
    """The stream's launcher, like torchrun, has the trainer as a child of its own, which outlives it. The run that follows takes a
    higher term, so the orphan stops at its next commit: two processes for a moment, one writer at any time."""
    config = cycle_config(tmp_path, server=False)
    launcher = ("sh", "-c", f'{" ".join(PLAYER)} "$@"; exit $?', "sh")
    config = config.model_copy(update={"stream": config.stream.model_copy(update={"launcher": launcher})})
    supervisor = start_command(config, tmp_path)
    orphan: RunRecord | None = None
    try:
        eventually(lambda: "deployment 1 serves" in (tmp_path / "output").read_text(), 60.0)
        eventually(lambda: bool(run_records(root, prefix=layout.lineage(DAY1))))
        (orphan,) = run_records(root, prefix=layout.lineage(DAY1))
        supervisor.kill()
        supervisor.wait()
        assert orphan.pid is not None
        assert is_alive(orphan.pid)
        with LocalCycle(config, poll_s=0.05) as cycle:
            cycle.run_date(DAY1)
            eventually(lambda: len(run_records(root, prefix=layout.lineage(DAY1))) == 2)
            eventually(lambda: not is_alive(orphan.pid))
            first, second = run_records(root, prefix=layout.lineage(DAY1))
            assert (first.status, str(first.error)[:11]) == ("failed", "FencedError")
            assert (second.status, second.term, newest_term(root_of(root, DAY1))) == ("running", 2, 2)
            assert cycle.children.pid(STREAM1) is not None
    finally:
        supervisor.kill()
        supervisor.wait()
        if orphan is not None and orphan.pid is not None and is_alive(orphan.pid):
            os.kill(orphan.pid, signal.SIGKILL)


def ready_to_deploy(root: LocalStorage) -> None:
    """A date whose jobs are done: its stream came to its end."""
    root.write(f"{layout.daily(DAY1)}/{record_key('d1')}", run("d1", "train_daily").to_bytes())
    root.write(f"{layout.lineage(DAY1)}/{layout.SNAPSHOT}", b"snapshot")
    root.write(f"{layout.lineage(DAY1)}/{record_key('s1')}", run("s1", "train_stream").to_bytes())


def run(run_id: str, kind: str) -> RunRecord:
    return RunRecord(run_id=run_id, kind=kind, status="completed", started_at=0.0, ended_at=1.0)  # type: ignore[arg-type]


def test_a_deployment_that_dies_at_any_operation_is_made_once(tmp_path: Path) -> None:
    """Every step can be resumed after SIGKILL at any point of it: the store's operations are the points that count."""
    crashes = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        config = cycle_config(tmp_path, server=False).model_copy(update={"root": str(folder)})
        root = LocalStorage(folder)
        ready_to_deploy(root)
        with LocalCycle(config, poll_s=0.001) as cycle:
            faulty = cycle.root = FaultyStorage(root)
            faulty.crash_at(number)
            try:
                cycle.run_date(DAY1)
                crashed = False
            except SimulatedCrash:
                crashed = True
        crashes += crashed
        with LocalCycle(config, poll_s=0.001) as cycle:
            result = cycle.run_date(DAY1)
        assert result is not None
        assert [deployment.number for deployment in deployments(root)] == [1], number
        assert (result.deployment.number, result.deployment.lineage) == (1, layout.lineage(DAY1))
        if not crashed:
            break
    else:
        raise AssertionError("it never came to an end")
    assert crashes > 10


def test_every_step_of_a_date_has_a_record(tmp_path: Path, root: LocalStorage) -> None:
    with LocalCycle(cycle_config(tmp_path, server=False), poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        eventually(lambda: bool(run_records(root, prefix=layout.lineage(DAY1))))
    records = [
        record
        for folder in (layout.daily(DAY1), layout.lineage(DAY1), layout.cycle(DAY1))
        for record in run_records(root, prefix=folder)
    ]
    assert [(record.kind, record.status) for record in records] == [
        ("train_daily", "completed"),
        ("train_stream", "interrupted"),
        ("export", "completed"),
        ("deploy", "completed"),
    ]
    assert records[-1].details == {"number": 1, "reason": "nothing is served yet"}
    (deployment,) = deployments(root)
    assert deployment.run_id == records[-1].run_id, "by which a deployment of the cycle is told from a person's"


def test_a_deployment_that_could_not_be_made_is_on_record_and_in_the_plan(tmp_path: Path, root: LocalStorage) -> None:
    config = cycle_config(tmp_path, server=False, catch_up_s=0.5)
    with LocalCycle(config, poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        tell(root, DAY2, "")
        never = config.handover.model_copy(update={"tolerance_s": 0.0, "policy": "caught_up"})
        cycle.config = config.model_copy(update={"handover": never})
        cycle.children.stop(STREAM1, deadline_s=10.0)
        recorder = RunRecorder(root_of(root, DAY1), RunStart("99999999T000000000-zz", "train_stream", DAY1, 9), heartbeat_s=0.1)
        try:
            with pytest.raises(DeadlineError, match=r"deploy of 20240102: not done after 0.5 s: "):
                cycle.run_date(DAY2)
        finally:
            recorder._stopping.set()
        (record,) = [record for record in run_records(root, prefix=layout.cycle(DAY2)) if record.kind == "deploy"]
        assert record.status == "failed"
        # Until the new stream has a record of its own, the deployment waits for it.
        eventually(lambda: cycle.plan(DAY2)[-1].state != "waiting")
        deploy_step = cycle.plan(DAY2)[-1]
        assert (deploy_step.state, "deploy of 20240102" in deploy_step.detail) == ("failed", True)


def test_a_backfill_of_a_week_trains_each_day_in_order_and_streams_the_last(
    tmp_path: Path, root: LocalStorage, capture_events: Callable[[], list[dict[str, object]]]
) -> None:
    """One day of it is skipped, and one's table comes late: the days after it wait, and the skipped one holds up nobody."""
    days = [f"2024010{day}" for day in range(1, 8)]
    skipped, late = days[2], days[4]
    config = cycle_config(tmp_path, server=False)
    for date in days:
        (tmp_path / f"{date}.csv").write_text("user,click\n1,0\n")
    (tmp_path / f"{late}.csv").unlink()
    times = {date: time.time() - 600.0 + number for number, date in enumerate(days)} | {"20240108": 9e9}
    schedule = ScheduleConfig(cron="* * * * *", first_date=days[0], skip=(skipped,), retry_s=0.1)
    boundary = config.boundary.model_copy(update={"times": times})
    config = config.model_copy(update={"schedule": schedule, "boundary": boundary})

    def trained() -> list[str]:
        return [date for date in days if run_records(root, prefix=layout.daily(date))]

    with LocalCycle(config, poll_s=0.05) as cycle:
        thread = threading.Thread(target=cycle.run_schedule, daemon=True)
        thread.start()
        try:
            eventually(
                lambda: [line["date"] for line in capture_events() if line.get("state") == "failed"][:2] == [late, late], 60.0
            )
            assert trained() == [days[0], days[1], days[3]], "later days wait for the late one"
            (tmp_path / f"{late}.csv").write_text("user,click\n1,0\n")
            eventually(lambda: bool(deployments(root)) and bool(run_records(root, prefix=layout.lineage(days[-1]))), 60.0)
        finally:
            cycle.request_stop()
            thread.join(30.0)
        assert not thread.is_alive()
        assert trained() == [date for date in days if date != skipped]
        parents = {date: parent_of(cycle, date) for date in trained()}
    assert parents == dict(zip(trained(), [None, *trained()[:-1]], strict=True)), "each continues the one before"
    starts = [run_records(root, prefix=layout.daily(date))[0].started_at for date in trained()]
    assert starts == sorted(starts)
    assert served(root) == [(days[-1], None)]
    assert [date for date in days if run_records(root, prefix=layout.lineage(date))] == days[-1:], "only the newest has a stream"


def parent_of(cycle: LocalCycle, date: str) -> str | None:
    """The date that a date's daily job continues."""
    return read_records(cycle.root, date).parent


def with_marker(config: CycleConfig, tmp_path: Path, wait_s: float) -> CycleConfig:
    complete = CompleteConfig(marker=f"{tmp_path}/${{bizdate}}.done", wait_s=wait_s)
    return config.model_copy(update={"daily": config.daily.model_copy(update={"complete": complete})})


def test_a_table_that_is_not_complete_in_time_ends_the_date_by_name(tmp_path: Path, root: LocalStorage) -> None:
    config = with_marker(cycle_config(tmp_path, server=False), tmp_path, 0.2)
    with LocalCycle(config, poll_s=0.05) as cycle:
        with pytest.raises(
            DeadlineError, match=rf"daily table of 20240101 isn't complete after 0.2 s: no file matches '{tmp_path}"
        ):
            cycle.run_date(DAY1)
        assert not cycle.children.states(), "no job was started"
    assert not run_records(root, prefix=layout.daily(DAY1))


def test_a_late_table_is_waited_for(tmp_path: Path, root: LocalStorage) -> None:
    config = with_marker(cycle_config(tmp_path, server=False), tmp_path, 30.0)
    assert "no file" in table_lacks(config.daily, DAY1)
    with LocalCycle(config, poll_s=0.05) as cycle:
        timer = threading.Timer(0.5, (tmp_path / f"{DAY1}.done").touch)
        timer.start()
        try:
            assert cycle.run_date(DAY1) is not None
        finally:
            timer.join()


def test_a_stop_request_ends_the_wait_for_a_table(tmp_path: Path) -> None:
    config = with_marker(cycle_config(tmp_path, server=False), tmp_path, 600.0)
    with LocalCycle(config, poll_s=0.05) as cycle:
        timer = threading.Timer(0.3, cycle.request_stop)
        timer.start()
        try:
            assert cycle.run_date(DAY1) is None
        finally:
            timer.join()


@pytest.fixture
def capture_events(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, object]]]]:
    path = tmp_path / "events.jsonl"
    sink = logs.EventLog(path)
    logs.send_events_to(sink)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    logs.send_events_to(None)
    sink.close()
