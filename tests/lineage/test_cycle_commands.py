"""`tidemill cycle plan`, `step`, `render` and `status`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.cycle import app
from tidemill.contracts.lineage import LineageRecord, RunRecord
from tidemill.lineage.deployments import Pin, deploy
from tidemill.storage.backends.local import LocalStorage


@pytest.fixture
def cycle(tmp_path: Path) -> Path:
    path = tmp_path / "cycle.yaml"
    path.write_text(
        "root: root\npipeline_config: p.yaml\ndaily: {input_path: '${bizdate}.csv'}\nstream: {input_path: 'kafka://h:1/t?group.id=g'}\n"
    )
    return path


def test_plan_shows_the_steps_and_the_commands_that_are_left(cycle: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(cycle), "--date", "20240102"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith(" ")] == [
        ["train_daily", "next"],
        ["full_export", "waiting"],
        ["train_stream", "waiting"],
        ["deploy", "waiting"],
    ]
    assert "20240102.csv" in result.output


def test_status_tells_what_is_deployed(cycle: Path) -> None:
    assert "nothing is deployed" in CliRunner().invoke(app, ["status", str(cycle)]).output
    deploy(LocalStorage(cycle.parent / "root"), "lineages/20240102", "d", "by hand", Pin(1, 7))
    output = CliRunner().invoke(app, ["status", str(cycle)]).output
    assert "deployment 1: lineages/20240102, pinned to release 7, deployed because: by hand" in output


@pytest.mark.parametrize("arguments", [["plan", "nowhere.yaml", "--date", "20240102"], ["status", "nowhere.yaml"]])
def test_a_bad_config_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output


def test_a_bad_date_exits_with_2(cycle: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(cycle), "--date", "2024-01-02"])
    assert result.exit_code == 2
    assert "YYYYMMDD" in result.output


def step(cycle: Path, name: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from tidemill.cli.cycle import app; app(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, "step", str(cycle), "--date", "20240102", "--step", name],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )


def test_a_step_becomes_its_job_waits_its_turn_and_is_done_once(cycle: Path) -> None:
    cycle.write_text(cycle.read_text() + "launcher: [echo, job]\n")
    (cycle.parent / "20240102.csv").write_text("user\n1\n")
    started = step(cycle, "train_daily")
    assert started.returncode == 0
    assert started.stdout.splitlines()[1].startswith("job train --pipeline_config_path=")
    early = step(cycle, "train_stream")
    assert (early.returncode, early.stderr) == (73, "20240102: train_stream waits for train_daily: run that first\n")
    LocalStorage(cycle.parent / "root").write("lineages/20240102/snapshot.json", b"snapshot")
    assert step(cycle, "full_export").stdout == "20240102: full_export is done already\n"


def test_a_daily_step_whose_table_is_not_there_says_so_and_can_be_tried_again(cycle: Path) -> None:
    result = step(cycle, "train_daily")
    assert result.returncode == 75
    assert "the daily table of 20240102 isn't complete after 0 s: no file matches" in result.stderr
    assert str(cycle.parent / "20240102.csv") in result.stderr


STATES = [
    pytest.param("train_daily", {"daily/20240102/runs/r/record.json": "train_daily completed"}, "is done already", id="daily"),
    pytest.param("train_daily", {"daily/20240102/runs/r/record.json": "train_daily running"}, "job train", id="daily killed"),
    pytest.param("full_export", {"lineages/20240102/snapshot.json": ""}, "is done already", id="export"),
    pytest.param(
        "full_export",
        {
            "daily/20240102/runs/r/record.json": "train_daily completed",
            "cycle/20240102/runs/r/record.json": "export running",
            "lineages/20240102/snapshot/part": "half",
        },
        "job export",
        id="export killed",
    ),
    pytest.param(
        "train_stream",
        {"lineages/20240102/snapshot.json": "", "lineages/20240102/runs/r/record.json": "train_stream running"},
        "job train",
        id="stream killed",
    ),
    pytest.param(
        "train_stream",
        {"lineages/20240102/snapshot.json": "", "lineages/20240102/lineage.json": "retired"},
        "is done already",
        id="stream retired",
    ),
]


@pytest.mark.parametrize(("name", "files", "outcome"), STATES)
def test_each_step_may_be_run_again(cycle: Path, name: str, files: dict[str, str], outcome: str) -> None:
    """A step that is done does nothing; one that was killed half way is run again, and goes on from what it left."""
    cycle.write_text(cycle.read_text() + "launcher: [echo, job]\n")
    (cycle.parent / "20240102.csv").write_text("user\n1\n")
    root = LocalStorage(cycle.parent / "root")
    for key, text in files.items():
        root.write(key, document(text))
    done = step(cycle, name)
    assert done.returncode == 0, done.stderr
    assert outcome in done.stdout


def document(text: str) -> bytes:
    """What a file holds: a record by "<kind> <status>", a retired lineage's, or just the text."""
    if text == "retired":
        return LineageRecord(date="20240102", status="retired", successor="lineages/20240103").to_bytes()
    kind, _, status = text.partition(" ")
    if not status:
        return text.encode()
    record = RunRecord.model_validate({"run_id": "r", "kind": kind, "status": status, "started_at": 0.0})
    return record.to_bytes()


def test_a_launcher_that_cannot_be_run_is_named(cycle: Path) -> None:
    cycle.write_text(cycle.read_text() + "launcher: [no-such-command]\n")
    (cycle.parent / "20240102.csv").write_text("user\n1\n")
    result = step(cycle, "train_daily")
    assert result.returncode == 2
    assert "launcher: no-such-command can't be run" in result.stderr


def test_render_writes_a_service_or_nodes_and_names_what_is_missing(cycle: Path) -> None:
    output = cycle.parent / "out"
    arguments = ["render", str(cycle), "--output", str(output), "--target"]
    result = CliRunner().invoke(app, [*arguments, "eas"])
    assert result.exit_code == 2
    assert "serving.eas" in result.output
    cycle.write_text(
        cycle.read_text()
        + "handover: {policy: caught_up}\nserving: {eas: {template: s.json, feature_view_name: v}}\n"
        + "dataworks: {cycle_path: /mnt/c.yaml}\n"
    )
    (cycle.parent / "s.json").write_text('{"metadata": {"name": "clicks"}}')
    assert CliRunner().invoke(app, [*arguments, "eas", "--date", "20240102"]).output == f"{output}/service.json\n"
    assert "lineages/20240102/" in (output / "service.json").read_text()
    assert CliRunner().invoke(app, [*arguments, "dataworks"]).exit_code == 0
    names = ["deploy.py", "full_export.sh", "nodes.json", "service.json", "train_daily.sh", "train_stream.sh"]
    assert sorted(path.name for path in output.iterdir()) == names
    assert CliRunner().invoke(app, [*arguments, "eas", "--date", "tomorrow"]).exit_code == 2


def test_plan_without_a_date_tells_what_is_due(cycle: Path) -> None:
    without = CliRunner().invoke(app, ["plan", str(cycle)])
    assert without.exit_code == 2
    assert "schedule: the cycle's config needs this section" in without.output
    cycle.write_text(
        cycle.read_text() + "schedule: {cron: '0 1 * * *', first_date: '20240101'}\nboundary: {times: {'20240103': 9.0e+9}}\n"
    )
    assert CliRunner().invoke(app, ["plan", str(cycle)]).output == "20240101 train_daily\n20240102 run\n"
    deploy(LocalStorage(cycle.parent / "root"), "lineages/20240102", "d", "by hand")
    assert CliRunner().invoke(app, ["plan", str(cycle)]).output == "nothing is due\n"
