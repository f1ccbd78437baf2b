"""The local supervisor over real child processes that leave the records of real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tidemill
from tidemill import logs
from tidemill.contracts import layout
from tidemill.errors import DeadlineError, LineageError
from tidemill.lineage.cycle import CycleConfig, ScheduleConfig, StepName
from tidemill.lineage.deployments import deploy, deployments, newest_deployment
from tidemill.lineage.eas import EasConfig
from tidemill.lineage.orchestrators.local import SERVER, LocalCycle, child_name
from tidemill.lineage.records import open_lineage, read_lineage, run_records
from tidemill.storage.backends.local import LocalStorage

REPOSITORY = Path(tidemill.__file__).parent.parent
PLAYER = ("env", f"PYTHONPATH={REPOSITORY}", sys.executable, str(Path(__file__).with_name("player.py")))
DAY1, DAY2, DAY3 = "20240101", "20240102", "20240103"
STREAM1, STREAM2 = child_name(StepName.TRAIN_STREAM, DAY1), child_name(StepName.TRAIN_STREAM, DAY2)


def cycle_config(tmp_path: Path, *, policy: str = "served", server: bool = True, **limits: float) -> CycleConfig:
    now = time.time()
    for date in (DAY1, DAY2, DAY3):
        (tmp_path / f"{date}.csv").write_text("user,click\n1,0\n")
    return CycleConfig.model_validate(
        {
            "root": str(tmp_path / "root"),
            "pipeline_config": "pipeline.yaml",
            "launcher": PLAYER,
            "daily": {"input_path": f"{tmp_path}/${{bizdate}}.csv"},
            "stream": {"input_path": "topic"},
            "boundary": {"times": {DAY1: now - 60.0, DAY2: now - 45.0}},
            "handover": {"policy": policy, "tolerance_s": 2.0, "report_interval_s": 0.1, "liveness_s": 5.0},
            "serving": {"port": 0} if server else {},
            "limits": {"catch_up_s": 40.0, "retire_s": 30.0, "stop_s": 10.0, "backoff_s": 0.05, **limits},
        }
    )


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "events.jsonl"
    sink = logs.EventLog(path)
    logs.send_events_to(sink)
    yield path
    logs.send_events_to(None)
    sink.close()


def eventually(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


@pytest.mark.parametrize("policy", ["served", "caught_up"])
def test_two_days_the_second_takes_over_and_the_first_retires(tmp_path: Path, root: LocalStorage, policy: str) -> None:
    with LocalCycle(cycle_config(tmp_path, policy=policy), poll_s=0.05) as cycle:
        first = cycle.run_date(DAY1)
        assert first is not None
        assert (first.deployment.lineage, first.predecessor) == ("lineages/20240101", None)
        second = cycle.run_date(DAY2)
        assert second is not None
        assert (second.deployment.number, second.deployment.lineage) == (2, "lineages/20240102")
        assert (second.predecessor, second.retired) == ("lineages/20240101", True)
        assert second.lag_s is not None
        assert cycle.children.wait(STREAM1, deadline_s=10.0).exit_code == 0
        assert cycle.children.pid(STREAM2) is not None
        again = cycle.run_date(DAY2)
        assert again is not None
        assert again.deployment == second.deployment, "a date that is done is a no-op"
    record = read_lineage(root, prefix=layout.lineage(DAY1))
    assert record is not None
    assert (record.status, record.successor) == ("retired", "lineages/20240102")
    assert record.retired_at is not None
    assert record.handover_lag_s is not None
    if policy == "caught_up":
        assert record.handover_lag_s <= 2.0
        assert record.retired_at <= second.deployment.created_at, "deploy follows the record"
    else:
        assert record.retired_at >= second.deployment.created_at, "the predecessor goes on until the switch is confirmed"
    (run,) = run_records(root, prefix=layout.lineage(DAY2))
    assert run.status == "interrupted", "leaving the supervisor ends the stream in good order"


@pytest.mark.parametrize("restarted", [False, True])
def test_after_a_skipped_day_the_stream_hands_over_to_the_one_after(tmp_path: Path, root: LocalStorage, restarted: bool) -> None:
    """The stream of day 1 was started to watch day 2; the cycle goes on with day 3, with the same supervisor or a new one."""
    config = cycle_config(tmp_path, policy="caught_up", server=False)
    times = {DAY1: config.boundary.times[DAY1], DAY3: config.boundary.times[DAY2]}
    config = config.model_copy(update={"boundary": config.boundary.model_copy(update={"times": times})})
    cycle = LocalCycle(config, poll_s=0.05)
    try:
        cycle.start()
        cycle.run_date(DAY1)
        if restarted:
            cycle.close()
            cycle = LocalCycle(config, poll_s=0.05)
            cycle.start()
        result = cycle.run_date(DAY3)
    finally:
        cycle.close()
    assert result is not None
    assert (result.deployment.lineage, result.predecessor, result.retired) == (f"lineages/{DAY3}", f"lineages/{DAY1}", True)
    record = read_lineage(root, prefix=layout.lineage(DAY1))
    assert record is not None
    assert record.successor == f"lineages/{DAY3}"


def test_an_eas_service_is_modified_before_the_deployment_is_on_record(
    tmp_path: Path, root: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between makes the date's next run modify it again, which does no harm."""
    client = tmp_path / "bin" / "eascmd"
    client.parent.mkdir()
    client.write_text(f"#!/bin/sh\necho $1 $2 $(ls {tmp_path}/root/deployments 2>/dev/null | wc -l) >> {tmp_path}/calls\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "service.json").write_text('{"metadata": {"name": "clicks"}}')
    config = cycle_config(tmp_path, policy="caught_up", server=False)
    eas = EasConfig(template=str(tmp_path / "service.json"), feature_view_name="v")
    config = config.model_copy(update={"serving": config.serving.model_copy(update={"eas": eas})})
    with LocalCycle(config, poll_s=0.05) as cycle:
        assert cycle.run_date(DAY1) is not None
        assert cycle.run_date(DAY1) is not None, "a date that is done modifies nothing"
    assert (tmp_path / "calls").read_text() == "modify clicks 0\n"
    assert newest_deployment(root) is not None
    assert f"lineages/{DAY1}/" in (tmp_path / "root" / "logs" / f"eas-{DAY1}.json").read_text()


def test_a_killed_stream_comes_back_and_a_retired_one_does_not(tmp_path: Path, root: LocalStorage) -> None:
    with LocalCycle(cycle_config(tmp_path, policy="caught_up", server=False), poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        eventually(lambda: bool(run_records(root, prefix=layout.lineage(DAY1))))
        before = cycle.children.pid(STREAM1)
        assert cycle.children.kill(STREAM1)
        eventually(lambda: cycle.children.pid(STREAM1) not in (None, before))
        cycle.run_date(DAY2)
        state = cycle.children.wait(STREAM1, deadline_s=10.0)
        assert (state.status, state.restarts) == ("exited", 1)
        cycle.start_stream(DAY1)
        assert cycle.children.pid(STREAM1) is None
    assert [run.status for run in run_records(root, prefix=layout.lineage(DAY1))] == ["running", "retired"]


def test_a_predecessor_that_is_dead_does_not_block(tmp_path: Path, root: LocalStorage) -> None:
    open_lineage(root_of(root, DAY1), DAY1, 0.0)
    deploy(root, layout.lineage(DAY1), "d1", "its stream has long gone")
    config = cycle_config(tmp_path, server=False, max_restarts=1)
    with LocalCycle(config, poll_s=0.05) as cycle:
        # The old stream can't be started again: its boundary differs from the one in its record.
        result = cycle.run_date(DAY2)
    assert result is not None
    assert (result.deployment.lineage, result.predecessor, result.retired) == ("lineages/20240102", "lineages/20240101", False)


def root_of(root: LocalStorage, date: str) -> LocalStorage:
    return LocalStorage(root.root / layout.lineage(date))


def test_a_supervisor_that_died_after_the_switch_sees_the_predecessor_retire(tmp_path: Path, root: LocalStorage) -> None:
    config = cycle_config(tmp_path)
    with LocalCycle(config, poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
    root.write(f"{layout.lineage(DAY2)}/snapshot.json", b"snapshot")
    deploy(root, layout.lineage(DAY2), "d2", "as the supervisor had decided")
    with LocalCycle(config, poll_s=0.05) as cycle:
        result = cycle.run_date(DAY2)
    assert result is not None
    assert result.retired


def test_a_daily_job_that_fails_stops_the_date_and_names_its_log(tmp_path: Path, root: LocalStorage) -> None:
    config = cycle_config(tmp_path, server=False)
    failing = config.model_copy(update={"daily": config.daily.model_copy(update={"edits": {"fail": True}})})
    with LocalCycle(failing, poll_s=0.05) as cycle, pytest.raises(LineageError, match=r"train_daily-20240101.log"):
        cycle.run_date(DAY1)
    assert newest_deployment(root) is None
    with LocalCycle(config, poll_s=0.05) as cycle:
        assert cycle.plan(DAY1)[0].state == "failed"
        assert cycle.run_date(DAY1) is not None, "the date can be run again"


def test_a_stream_that_dies_for_good_ends_the_wait_with_an_error(tmp_path: Path, root: LocalStorage) -> None:
    open_lineage(root_of(root, DAY1), DAY1, 0.0)
    with LocalCycle(cycle_config(tmp_path, server=False, max_restarts=1), poll_s=0.05) as cycle:
        # It can't be started: its boundary differs from the one in its record.
        cycle.start_stream(DAY1)
        with pytest.raises(LineageError, match=r"train_stream-20240101 ended with 1 .*train_stream-20240101\.log"):
            cycle.wait()


def test_a_stream_that_was_stopped_on_request_ends_the_wait(tmp_path: Path) -> None:
    with LocalCycle(cycle_config(tmp_path, server=False), poll_s=0.05) as cycle:
        cycle.start_stream(DAY1)
        cycle.children.stop(STREAM1, deadline_s=10.0)
        cycle.wait()


def test_an_older_date_is_refused(tmp_path: Path, root: LocalStorage) -> None:
    deploy(root, layout.lineage(DAY2), "d2", "newer")
    with LocalCycle(cycle_config(tmp_path, server=False)) as cycle:
        with pytest.raises(LineageError, match="refused"):
            cycle.run_date(DAY1)
        assert not cycle.children.states()


def test_a_limit_that_is_passed_names_what_was_waited_for(tmp_path: Path) -> None:
    config = cycle_config(tmp_path, server=False, train_daily_s=0.0)
    with LocalCycle(config, poll_s=0.05) as cycle:
        with pytest.raises(DeadlineError, match="train_daily of 20240101"):
            cycle.run_date(DAY1)
        state = cycle.children.state(child_name(StepName.TRAIN_DAILY, DAY1))
        assert state is not None
        assert state.status == "stopped"


def test_without_confirmation_the_predecessor_trains_on(tmp_path: Path, root: LocalStorage, events: Path) -> None:
    """No server is there that could confirm: serving is switched, and the predecessor stays."""
    with LocalCycle(cycle_config(tmp_path, server=False, retire_s=1.0), poll_s=0.05) as cycle:
        cycle.run_date(DAY1)
        result = cycle.run_date(DAY2)
        assert result is not None
        assert not result.retired
        assert cycle.children.pid(STREAM1) is not None
    assert [deployment.lineage for deployment in deployments(root)] == ["lineages/20240101", "lineages/20240102"]
    names = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert "cycle.not_retired" in names


def test_a_stop_request_ends_the_wait_and_leaves_the_rest_for_the_next_run(tmp_path: Path, root: LocalStorage) -> None:
    config = cycle_config(tmp_path, server=False)
    with LocalCycle(config, poll_s=0.05) as cycle:
        threading.Timer(0.2, cycle.request_stop).start()
        assert cycle.run_date(DAY1) is None
    with LocalCycle(config, poll_s=0.05) as cycle:
        assert cycle.run_date(DAY1) is not None
    assert len(run_records(root, prefix=layout.daily(DAY1))) <= 2


def test_one_supervisor_a_root(tmp_path: Path) -> None:
    config = cycle_config(tmp_path, server=False)
    with LocalCycle(config), pytest.raises(LineageError, match="supervises this root already"):
        LocalCycle(config).start()
    with LocalCycle(config):
        pass


def test_a_killed_server_comes_back(tmp_path: Path) -> None:
    with LocalCycle(cycle_config(tmp_path), poll_s=0.05) as cycle:
        before = cycle.children.pid(SERVER)
        assert cycle.children.kill(SERVER)
        eventually(lambda: cycle.children.pid(SERVER) not in (None, before))


def test_the_command_runs_a_date_and_sigterm_ends_it_in_good_order(tmp_path: Path, root: LocalStorage) -> None:
    """`tidemill cycle run`, as a process of its own."""
    config = cycle_config(tmp_path, server=False)
    path = tmp_path / "cycle.yaml"
    path.write_text(config.model_dump_json(exclude_none=True))
    code = "import sys; from tidemill.cli.cycle import app; app(sys.argv[1:], standalone_mode=True)"
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "run", str(path), "--date", DAY1],
            stdout=file,
            stderr=file,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    try:
        eventually(lambda: "deployment 1 serves lineages/20240101" in output.read_text(), 60.0)
        eventually(lambda: bool(run_records(root, prefix=layout.lineage(DAY1))))
        process.terminate()
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()
    (run,) = run_records(root, prefix=layout.lineage(DAY1))
    assert run.status == "interrupted"


def test_a_schedule_catches_up_and_keeps_one_stream(tmp_path: Path, root: LocalStorage) -> None:
    """Two days are due at the start: the first joins the daily line only; the second is streamed and deployed. Again: no change."""
    config = cycle_config(tmp_path, server=False)
    schedule = ScheduleConfig(cron="* * * * *", first_date=DAY1, retry_s=0.1)
    times = {DAY1: time.time() - 600.0, DAY2: time.time() - 500.0, DAY3: time.time() + 9e6}
    boundary = config.boundary.model_copy(update={"times": times})
    config = config.model_copy(update={"schedule": schedule, "boundary": boundary})
    failing = config.model_copy(update={"daily": config.daily.model_copy(update={"edits": {"fail": True}})})

    def run(config: CycleConfig, until: Callable[[LocalCycle], bool]) -> None:
        with LocalCycle(config, poll_s=0.05) as cycle:
            thread = threading.Thread(target=cycle.run_schedule, daemon=True)
            thread.start()
            try:
                eventually(lambda: until(cycle))
            finally:
                cycle.request_stop()
                thread.join(30.0)
            assert not thread.is_alive()

    run(failing, lambda cycle: len(run_records(root, prefix=layout.daily(DAY1))) >= 2)
    assert not run_records(root, prefix=layout.daily(DAY2)), "a later day waits for one whose table is late"
    run(config, lambda cycle: newest_deployment(root) is not None)
    assert [deployment.lineage for deployment in deployments(root)] == [layout.lineage(DAY2)]
    assert not run_records(root, prefix=layout.lineage(DAY1))
    before = len(run_records(root, prefix=layout.lineage(DAY2)))
    run(config, lambda cycle: len(run_records(root, prefix=layout.lineage(DAY2))) > before)
    assert [deployment.number for deployment in deployments(root)] == [1], "its stream goes on, nothing else is done"


def test_a_scheduled_stream_that_died_for_good_is_started_again_after_a_pause(tmp_path: Path, root: LocalStorage) -> None:
    config = cycle_config(tmp_path, server=False, max_restarts=0)
    times = {DAY1: time.time() - 600.0, DAY2: time.time() + 9e6}
    config = config.model_copy(
        update={
            "schedule": ScheduleConfig(cron="* * * * *", first_date=DAY1, retry_s=0.1),
            "boundary": config.boundary.model_copy(update={"times": times}),
        }
    )
    with LocalCycle(config, poll_s=0.05) as cycle:
        thread = threading.Thread(target=cycle.run_schedule, daemon=True)
        thread.start()
        try:
            eventually(lambda: newest_deployment(root) is not None)
            eventually(lambda: cycle.children.pid(STREAM1) is not None)
            before = cycle.children.pid(STREAM1)
            assert cycle.children.kill(STREAM1)
            eventually(lambda: cycle.children.pid(STREAM1) not in (None, before))
        finally:
            cycle.request_stop()
            thread.join(30.0)
        assert not thread.is_alive()
