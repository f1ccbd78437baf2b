"""The cycle's config, its plan from records, and its commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tidemill.contracts.lineage import Deployment, LineageRecord, RunRecord, RunStatus
from tidemill.errors import ConfigError, LineageError
from tidemill.lineage.cycle import (
    CycleConfig,
    CycleRecords,
    StepName,
    boundary,
    commands,
    is_date,
    load_cycle,
    must_run,
    next_date,
    plan,
    serve_command,
)

CYCLE = """\
root: data/root
pipeline_config: pipeline.yaml
daily:
  input_path: tables/${bizdate}/*.parquet
stream:
  input_path: kafka://127.0.0.1:9092/clicks?group.id=ol_${bizdate}
  edits: {data_config.batch_size: 64, "data_config.kafka.group_id": "g-${bizdate}"}
handover: {tolerance_s: 60}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cycle.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def config(tmp_path: Path) -> CycleConfig:
    return load_cycle(write(tmp_path, CYCLE))


def test_paths_are_relative_to_the_file(tmp_path: Path, config: CycleConfig) -> None:
    assert config.root == str(tmp_path / "data/root")
    assert config.pipeline_config == str(tmp_path / "pipeline.yaml")
    assert config.daily.input_path == str(tmp_path / "tables/${bizdate}/*.parquet")
    assert config.stream.input_path.startswith("kafka://")
    assert (config.handover.policy, config.handover.tolerance_s) == ("served", 60.0)


def test_addresses_stay_as_they_are(tmp_path: Path) -> None:
    config = load_cycle(write(tmp_path, CYCLE.replace("data/root", "s3://bucket/root").replace("tables/", "s3://b/t/")))
    assert (config.root, config.daily.input_path) == ("s3://bucket/root", "s3://b/t/${bizdate}/*.parquet")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("root:", "rot:", r"cycle.yaml:1: rot: unknown field; did you mean 'root'"),
        ("${bizdate}/*", "today/*", r"cycle.yaml:4: daily.input_path: must hold \$\{bizdate\}"),
        ("tolerance_s: 60", "tolerance_s: -1", r"cycle.yaml:8: handover.tolerance_s: must be >= 0"),
        ("tolerance_s: 60", "tolerance_s: .nan", r"cycle.yaml:8: handover.tolerance_s"),
        ("tolerance_s: 60", "policy: soon", r"cycle.yaml:8: handover.policy: unknown value 'soon'"),
        ("handover:", "boundary: {times: {'20240231': 1.0}}\nhandover:", r"cycle.yaml:8: boundary.times"),
        ("handover:", "schedule: {cron: '0 1 * *', first_date: '20240101'}\nhandover:", r"cycle.yaml:8: schedule.cron: .*5 fields"),
        (
            "handover:",
            "schedule: {cron: '0 1 * * *', first_date: today}\nhandover:",
            r"cycle.yaml:8: schedule: 'today' isn't a date",
        ),
        ("root:", "root: [", r"cycle.yaml:\d+: not YAML"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_cycle(write(tmp_path, CYCLE.replace(old, new, 1)))


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml"):
        load_cycle(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "expected"), [("20240229", True), ("20230229", False), ("2024022", False), ("2024-02-29", False), ("", False)]
)
def test_dates(text: str, expected: bool) -> None:
    assert is_date(text) is expected


def test_the_next_date_and_the_boundary_between_them(config: CycleConfig) -> None:
    assert next_date("20240228") == "20240229"
    assert next_date("20241231") == "20250101"
    assert boundary(config, "20240101") == 1704153600.0  # 2024-01-02T00:00:00Z
    shanghai = config.model_copy(update={"boundary": config.boundary.model_copy(update={"utc_offset_hours": 8.0})})
    assert boundary(shanghai, "20240101") == 1704153600.0 - 8 * 3600
    listed = config.model_copy(update={"boundary": config.boundary.model_copy(update={"times": {"20240101": 5.0}})})
    assert (boundary(listed, "20240101"), boundary(listed, "20240102")) == (5.0, 1704153600.0 + 86400)
    with pytest.raises(ConfigError, match="20240231"):
        next_date("20240231")


def flags(argv: list[str]) -> dict[str, str]:
    return dict(argument[2:].split("=", 1) for argument in argv if argument.startswith("--") and "=" in argument)


def test_commands(config: CycleConfig) -> None:
    root = config.root
    made = commands(config, "20240102", "20240101")
    daily, export, stream = (flags(made[name]) for name in (StepName.TRAIN_DAILY, StepName.FULL_EXPORT, StepName.TRAIN_STREAM))
    assert made[StepName.TRAIN_DAILY][:4] == [sys.executable, "-m", "tidemill", "train"]
    assert daily["model_dir"] == f"{root}/daily/20240102"
    assert daily["train_input_path"].endswith("tables/20240102/*.parquet")
    assert daily["fine_tune_checkpoint"] == f"{root}/daily/20240101"
    assert made[StepName.FULL_EXPORT][3] == "export"
    assert (export["checkpoint_path"], export["export_dir"]) == (f"{root}/daily/20240102", f"{root}/lineages/20240102")
    assert stream["model_dir"] == f"{root}/lineages/20240102", "A16: the stream's folder is the export's"
    assert stream["fine_tune_checkpoint"] == f"{root}/daily/20240102"
    assert stream["train_input_path"].endswith("group.id=ol_20240102")
    edits = json.loads(stream["edit_config_json"])
    assert edits["train_config.handover.successor_dir"] == f"{root}/lineages/20240103"
    assert edits["train_config.handover.tolerance_s"] == 60.0
    assert (edits["data_config.batch_size"], edits["data_config.kafka.group_id"]) == (64, "g-20240102")
    end = boundary(config, "20240102")
    assert edits["train_config.lineage.boundary"] == end
    assert json.loads(daily["edit_config_json"])["train_config.lineage.boundary"] == end


def test_the_first_day_continues_nothing(config: CycleConfig) -> None:
    assert "fine_tune_checkpoint" not in flags(commands(config, "20240101", None)[StepName.TRAIN_DAILY])


def test_launchers(config: CycleConfig) -> None:
    torchrun = ("torchrun", "--nproc-per-node", "2", "-m", "tidemill")
    config = config.model_copy(update={"launcher": ("tm",), "stream": config.stream.model_copy(update={"launcher": torchrun})})
    made = commands(config, "20240101", None)
    assert made[StepName.TRAIN_DAILY][:2] == ["tm", "train"]
    assert made[StepName.FULL_EXPORT][:2] == ["tm", "export"]
    assert made[StepName.TRAIN_STREAM][:6] == [*torchrun, "train"]
    assert serve_command(config)[:3] == ["tm", "serve", config.root]


def run(status: RunStatus, run_id: str = "r1") -> RunRecord:
    return RunRecord(run_id=run_id, kind="train_daily", status=status, started_at=0.0, error="boom" if status == "failed" else None)


def deployment(date: str) -> Deployment:
    return Deployment(number=1, lineage=f"lineages/{date}", snapshot_digest="d", created_at=0.0, nonce="n", reason="r")


STEPS = [
    pytest.param(CycleRecords(), "next waiting waiting waiting", id="nothing yet"),
    pytest.param(CycleRecords(daily=[run("failed")]), "failed waiting waiting waiting", id="daily failed"),
    pytest.param(CycleRecords(daily=[run("interrupted")]), "next waiting waiting waiting", id="daily interrupted"),
    pytest.param(CycleRecords(daily=[run("completed")]), "done next waiting waiting", id="trained"),
    pytest.param(
        CycleRecords(daily=[run("completed"), run("failed", "r2")]), "done next waiting waiting", id="a later rerun failed"
    ),
    pytest.param(CycleRecords(has_snapshot=True), "done done next waiting", id="exported, daily folder cleaned away"),
    pytest.param(CycleRecords(has_snapshot=True, streams=[run("running")]), "done done done next", id="streaming"),
    pytest.param(CycleRecords(has_snapshot=True, streams=[run("failed")]), "done done failed waiting", id="stream failed"),
    pytest.param(
        CycleRecords(has_snapshot=True, streams=[run("running")], is_deployed=True, newest=deployment("20240102")),
        "done done done done",
        id="deployed",
    ),
    pytest.param(
        CycleRecords(has_snapshot=True, lineage=LineageRecord(status="retired"), is_deployed=True, newest=deployment("20240103")),
        "done done done done",
        id="retired",
    ),
    pytest.param(CycleRecords(newest=deployment("20240101")), "next waiting waiting waiting", id="the day before is deployed"),
    pytest.param(CycleRecords(newest=deployment("20240103")), "next waiting waiting refused", id="a later day is deployed"),
]


@pytest.mark.parametrize(("records", "states"), STEPS)
def test_plan(records: CycleRecords, states: str) -> None:
    steps = plan("20240102", records)
    assert [step.name for step in steps] == list(StepName)
    assert " ".join(step.state for step in steps) == states


STARTS = [
    pytest.param(CycleRecords(), [True, None, None], id="nothing yet"),
    pytest.param(CycleRecords(daily=[run("running")]), [True, None, None], id="daily running, says its record"),
    pytest.param(CycleRecords(daily=[run("failed")]), [True, None, None], id="daily failed"),
    pytest.param(CycleRecords(daily=[run("completed")]), [False, True, None], id="trained"),
    pytest.param(CycleRecords(has_snapshot=True), [False, False, True], id="exported"),
    pytest.param(CycleRecords(has_snapshot=True, streams=[run("running")]), [False, False, True], id="streaming, says its record"),
    pytest.param(CycleRecords(has_snapshot=True, streams=[run("failed")]), [False, False, True], id="stream failed"),
    pytest.param(CycleRecords(has_snapshot=True, streams=[run("completed")]), [False, False, False], id="stream completed"),
    pytest.param(
        CycleRecords(has_snapshot=True, streams=[run("running")], lineage=LineageRecord(status="retired")),
        [False, False, False],
        id="retired, by hand, while a record says running",
    ),
    pytest.param(CycleRecords(newest=deployment("20240103")), [None, None, None], id="a later day is deployed"),
]


@pytest.mark.parametrize(("records", "starts"), STARTS)
def test_which_jobs_another_scheduler_may_start(records: CycleRecords, starts: list[bool | None]) -> None:
    """True: start it; False: it is done; None: refused."""
    jobs = [StepName.TRAIN_DAILY, StepName.FULL_EXPORT, StepName.TRAIN_STREAM]
    for name, expected in zip(jobs, starts, strict=True):
        if expected is None:
            with pytest.raises(LineageError, match=r"20240102: .* (waits for|is refused)"):
                must_run(name, "20240102", records)
        else:
            assert must_run(name, "20240102", records) is expected
