"""The daily cycle: its config, and as pure functions what a date's steps are, how they stand, and the commands that run them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tidemill.config import yaml_syntax
from tidemill.config.base import Config, Seconds, Unsigned
from tidemill.config.build import Builder
from tidemill.config.tree import ConfigSyntaxError, Finding, Node, locate, path_text
from tidemill.contracts import layout
from tidemill.contracts.lineage import Deployment, LineageRecord, RunRecord
from tidemill.errors import ConfigError, LineageError
from tidemill.lineage.cron import parse_cron
from tidemill.lineage.dates import BIZDATE, dated
from tidemill.lineage.eas import EasConfig


class JobConfig(Config):
    """One of the jobs of a day. `${bizdate}` in any text stands for the date."""

    input_path: str
    """Where the rows are: files of the day (`data/${bizdate}/*.parquet`), or the topic (`kafka://...`)."""
    eval_input_path: str = ""
    """Evaluation data; empty: as the pipeline config says."""
    edits: dict[str, Any] = Field(default_factory=dict)
    """Changes to the pipeline config for this job, as in --edit_config_json: dotted path -> value."""
    launcher: tuple[str, ...] = ()
    """Command that `train ...` is appended to, if not the cycle's own. Several ranks:
    `[torchrun, --nproc-per-node, "2", -m, tidemill]`."""


class CompleteConfig(Config):
    """When a day's table may be trained on."""

    marker: str = ""
    """A file, pattern or MaxCompute partition that is there once the table is complete (`tables/${bizdate}/_SUCCESS`); empty: each
    pattern of the input matches a file, each of its partitions is there, and there are rows."""
    wait_s: Seconds = 0.0
    """How long to wait for that; then the step fails, and a schedule tries it again after `schedule.retry_s`."""


class DailyConfig(JobConfig):
    """The daily job. `${bizdate}` in any text stands for the date."""

    complete: CompleteConfig = CompleteConfig()
    """When the day's table may be trained on."""


class BoundaryConfig(Config):
    """Where day T's table ends and its stream begins: midnight after the date, unless the date is listed."""

    utc_offset_hours: float = Field(default=0.0, ge=-24, le=24, allow_inf_nan=False)
    """Time zone of that midnight."""
    times: dict[str, float] = Field(default_factory=dict)
    """Date -> boundary in Unix seconds, where days aren't calendar days."""


class FallBackConfig(Config):
    """When serving goes back to the lineage before, after a switch; what a person deployed it leaves alone."""

    watch_s: Seconds = 3600.0
    """For how long after its switch a lineage may be left; 0: never."""
    dead_s: Seconds = 300.0
    """Left if its stream has shown no sign of life for so long; at once if it has ended and isn't started again."""
    bad_s: Seconds = 600.0
    """Left if its quality gate has paused publication for so long."""
    well_s: Seconds = 600.0
    """Returned to once it has been alive and publishing for so long; once, the next time it takes a person."""


class CycleHandover(Config):
    """How a lineage hands over to the next one."""

    policy: Literal["caught_up", "served", "healthy"] = "served"
    """`caught_up`: the predecessor retires, then serving switches. `served`: serving switches, and once it is confirmed the
    predecessor retires."""
    tolerance_s: Seconds = 300.0
    """Event time by which the successor may trail."""
    confirm_timeout_s: Seconds = 600.0
    """With `served`: the alarm comes when the servers haven't confirmed for so long."""
    report_interval_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds between progress reports (and checks)."""
    liveness_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """A heartbeat that doesn't move for so long is dead; so is a supervisor's, whose root another one may take over then."""
    fall_back: FallBackConfig = FallBackConfig()
    """When serving goes back to the lineage before."""


class ServingTarget(Config):
    """The servers that follow the root's deployments."""

    model_name: str = ""
    """Name in requests; empty: the snapshot's own."""
    port: Unsigned | None = None
    """The local supervisor runs a server on this port; not given: servers run elsewhere."""
    host: str = "127.0.0.1"
    """Address of that server."""
    options: tuple[str, ...] = ()
    """Further options of `tidemill serve` for that server, such as `--poll-interval=0.2`."""
    eas: EasConfig | None = None
    """A PAI-EAS service that each deployment modifies; it needs `handover.policy: caught_up`, since it confirms nothing here."""


class Limits(Config):
    """How long each part may take, and how often what died is restarted."""

    train_daily_s: Seconds = 86400.0
    """The daily job."""
    full_export_s: Seconds = 14400.0
    """The export."""
    catch_up_s: Seconds = 86400.0
    """From the start of the stream until serving switches."""
    retire_s: Seconds = 3600.0
    """From the switch until the predecessor has retired."""
    stop_s: Seconds = 120.0
    """From SIGTERM to SIGKILL."""
    max_restarts: Unsigned = 10
    """Restarts of one job within `restart_window_s`; then it is given up."""
    restart_window_s: Seconds = 600.0
    """See max_restarts."""
    backoff_s: Seconds = 0.5
    """Pause before a restart, doubled each time within the window, up to a minute."""


class ScheduleConfig(Config):
    """When dates are run, by `cycle run` without --date."""

    cron: str
    """Minute, hour, day, month, weekday in the boundary's time zone: a date is due at the first time at or after its boundary."""
    first_date: str
    """The first date that is ever run."""
    skip: tuple[str, ...] = ()
    """Dates that are never run: their tables will never come, and the next date continues from the one before."""
    retry_s: Seconds = 600.0
    """Pause before a date that failed (its table is late, say) is tried again."""


class DataWorksConfig(Config):
    """How `cycle render --target dataworks` writes the nodes."""

    cycle_path: str
    """Where this config lies in the containers of DLC jobs."""
    submit: dict[str, Any] = Field(default_factory=dict)
    """Options of `dlc submit pytorchjob` for every node (`workspace_id: "123"`). The node must wait for its job's end."""
    submit_for: dict[str, Any] = Field(default_factory=dict)
    """Step -> its own options, such as `train_stream: {workers: 2}`."""
    job_prefix: str = "tidemill"
    """First part of the jobs' names."""
    cron: str = "00 00 01 * * ?"
    """When a cycle's nodes may start, as DataWorks writes it."""


class CycleConfig(Config):
    """cycle.yaml. Relative paths are relative to its folder."""

    root: str
    """The root folder or URL: daily jobs, lineages, deployments."""
    pipeline_config: str
    """The pipeline config that all jobs share."""
    daily: DailyConfig
    """The daily job; its input_path holds `${bizdate}`."""
    stream: JobConfig
    """The streaming job. One group.id a lineage: put `${bizdate}` into it."""
    boundary: BoundaryConfig = BoundaryConfig()
    """Where a day's table ends."""
    handover: CycleHandover = CycleHandover()
    """How a lineage hands over."""
    serving: ServingTarget = ServingTarget()
    """What serves."""
    limits: Limits = Limits()
    """Deadlines and restarts."""
    schedule: ScheduleConfig | None = None
    """When dates are run."""
    dataworks: DataWorksConfig | None = None
    """For DataWorks as the scheduler."""
    launcher: tuple[str, ...] = ()
    """Command that `train ...`, `export ...` and `serve ...` are appended to; empty: this interpreter with `-m tidemill`."""
    logs: str = ""
    """Local folder for the logs of child processes; empty: ROOT/logs, for a root on this machine."""


def load_cycle(path: str | Path) -> CycleConfig:
    """Read and check a cycle's config. Raises ConfigError with one line for each error: `file:line: field: what is wrong`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml_syntax.parse(text, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't read this config: {error}") from None
    except ConfigSyntaxError as failure:
        raise ConfigError(str(failure.finding)) from None
    builder = Builder(_no_components)
    builder.normalise(CycleConfig, root, ())
    config = builder.build(CycleConfig, root)
    findings = builder.findings
    if isinstance(config, CycleConfig):
        findings = findings + _cross_check(config, root)
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors or not isinstance(config, CycleConfig):
        raise ConfigError("\n".join(errors))
    return _with_absolute_paths(config, Path(path).absolute().parent)


def _no_components(family: str, kind: str) -> type[Config]:
    raise ConfigError(f"a cycle has no {family}, so no {kind!r}")


def _cross_check(config: CycleConfig, root: Node) -> list[Finding]:
    findings = []

    def report(message: str, *path: str) -> None:
        findings.append(Finding(locate(root, path), path_text(path), message))

    if BIZDATE not in config.daily.input_path:
        report("must hold ${bizdate}, or every day would be trained on the same data", "daily", "input_path")
    for date in config.boundary.times:
        if not is_date(date):
            report(f"{date!r} isn't a date (YYYYMMDD)", "boundary", "times", date)
    if config.schedule is not None:
        try:
            parse_cron(config.schedule.cron)
        except ConfigError as error:
            report(str(error), "schedule", "cron")
        for date in (config.schedule.first_date, *config.schedule.skip):
            if not is_date(date):
                report(f"{date!r} isn't a date (YYYYMMDD)", "schedule")
    for step, options in (config.dataworks.submit_for if config.dataworks else {}).items():
        if step not in (StepName.TRAIN_DAILY, StepName.FULL_EXPORT, StepName.TRAIN_STREAM) or not isinstance(options, dict):
            report("must be the options of train_daily, full_export or train_stream", "dataworks", "submit_for", step)
    eas = config.serving.eas
    if eas is not None and config.handover.policy != "caught_up":
        report("needs handover.policy: caught_up; the service confirms nothing in the root", "serving", "eas")
    if eas is not None and BIZDATE not in eas.version:
        report("must hold ${bizdate}, or lineages would write over each other's embeddings", "serving", "eas", "version")
    for name in ("feature_view_name", "version") if eas is not None else ():
        for path, value in config.stream.edits.items():
            if path.endswith(f"feature_store_config.{name}") and value != getattr(eas, name):
                report(f"differs from what the stream writes ({path}: {value})", "serving", "eas", name)
    return findings


def _with_absolute_paths(config: CycleConfig, folder: Path) -> CycleConfig:
    def absolute(path: str) -> str:
        return path if "://" in path or not path else str(folder / path)

    changes: dict[str, Any] = {name: absolute(getattr(config, name)) for name in ("root", "pipeline_config", "logs")}
    complete = config.daily.complete
    complete = complete.model_copy(update={"marker": absolute(complete.marker)})
    changes["daily"] = config.daily.model_copy(update={"input_path": absolute(config.daily.input_path), "complete": complete})
    if config.serving.eas is not None:
        eas = config.serving.eas.model_copy(update={"template": absolute(config.serving.eas.template)})
        changes["serving"] = config.serving.model_copy(update={"eas": eas})
    return config.model_copy(update=changes)


def is_date(text: str) -> bool:
    """Whether a text is a business date, YYYYMMDD."""
    try:
        return f"{datetime.strptime(text, '%Y%m%d'):%Y%m%d}" == text
    except ValueError:
        return False


def next_date(date: str) -> str:
    """The following business date. Raises ConfigError for a text that isn't one."""
    return f"{_day(date) + timedelta(days=1):%Y%m%d}"


def boundary(config: CycleConfig, date: str) -> float:
    """The event time at which a date's table ends and its stream begins."""
    if date in config.boundary.times:
        return config.boundary.times[date]
    return (_day(date) + timedelta(days=1)).timestamp() - config.boundary.utc_offset_hours * 3600


def _day(date: str) -> datetime:
    if not is_date(date):
        raise ConfigError(f"{date!r} isn't a business date: write YYYYMMDD")
    return datetime.strptime(date, "%Y%m%d").replace(tzinfo=UTC)


class StepName(StrEnum):
    """The steps of a date, in their order."""

    TRAIN_DAILY = "train_daily"
    FULL_EXPORT = "full_export"
    TRAIN_STREAM = "train_stream"
    DEPLOY = "deploy"


StepState = Literal["done", "next", "waiting", "failed", "refused"]
"""next: can be run now. waiting: for an earlier step. failed: can be run again, its last run failed. refused: never."""


@dataclass(frozen=True, slots=True)
class CycleStep:
    """One step of a date and how it stands."""

    name: StepName
    state: StepState
    detail: str


@dataclass(frozen=True, slots=True)
class CycleRecords:
    """What is on record of a date. `parent`: the newest earlier date whose daily job is complete; `cycle`: the runs of its export
    and deployment."""

    daily: Sequence[RunRecord] = ()
    cycle: Sequence[RunRecord] = ()
    has_snapshot: bool = False
    lineage: LineageRecord | None = None
    streams: Sequence[RunRecord] = ()
    is_deployed: bool = False
    newest: Deployment | None = None
    parent: str | None = None


def plan(date: str, records: CycleRecords) -> list[CycleStep]:
    """How a date's four steps stand, by its records alone. Pure. A finished step is never run again."""
    steps = [_daily_step(records), _export_step(date, records), _stream_step(records), _deploy_step(date, records)]
    planned: list[CycleStep] = []
    for step in steps:
        earlier = next((before.name for before in planned if before.state != "done"), None)
        if earlier is not None and step.state in ("next", "failed"):
            step = CycleStep(step.name, "waiting", f"for {earlier}")
        planned.append(step)
    return planned


def must_run(name: StepName, date: str, records: CycleRecords) -> bool:
    """Whether a job of a date is to be started by whoever schedules it; False: it is done. Pure.

    A stream whose record says "running" is started again: its scheduler knows that it doesn't run. Raises LineageError if an
    earlier step isn't done, or the date is refused.
    """
    steps = {step.name: step for step in plan(date, records)}
    refused = next((step for step in steps.values() if step.state == "refused"), None)
    if refused is not None:
        raise LineageError(f"{date}: {refused.name} is refused: {refused.detail}")
    if steps[name].state == "waiting":
        raise LineageError(f"{date}: {name} waits {steps[name].detail}: run that first")
    if name is StepName.TRAIN_STREAM:
        retired = records.lineage is not None and records.lineage.status == "retired"
        return not retired and not (records.streams and records.streams[-1].status == "completed")
    return steps[name].state != "done"


def _daily_step(records: CycleRecords) -> CycleStep:
    name = StepName.TRAIN_DAILY
    completed = [record for record in records.daily if record.status == "completed"]
    if completed:
        return CycleStep(name, "done", f"run {completed[-1].run_id}")
    if records.has_snapshot:
        return CycleStep(name, "done", "its snapshot is there")
    parent = f"continues {records.parent}" if records.parent else "the first day"
    return _unfinished(name, records.daily, parent)


def _export_step(date: str, records: CycleRecords) -> CycleStep:
    if records.has_snapshot:
        return CycleStep(StepName.FULL_EXPORT, "done", f"{layout.lineage(date)}/{layout.SNAPSHOT}")
    return _unfinished(StepName.FULL_EXPORT, [run for run in records.cycle if run.kind == "export"], "")


def _stream_step(records: CycleRecords) -> CycleStep:
    name = StepName.TRAIN_STREAM
    if records.lineage is not None and records.lineage.status == "retired":
        return CycleStep(name, "done", f"retired in favour of {records.lineage.successor}")
    if records.streams and records.streams[-1].status in ("running", "completed"):
        last = records.streams[-1]
        return CycleStep(name, "done", f"run {last.run_id} {last.status} (heartbeat {last.heartbeat})")
    return _unfinished(name, records.streams, "")


def _unfinished(name: StepName, runs: Sequence[RunRecord], detail: str) -> CycleStep:
    if runs and runs[-1].status == "failed":
        return CycleStep(name, "failed", f"run {runs[-1].run_id}: {runs[-1].error}")
    return CycleStep(name, "next", f"run {runs[-1].run_id} was {runs[-1].status}" if runs else detail)


def _deploy_step(date: str, records: CycleRecords) -> CycleStep:
    newest, lineage = records.newest, layout.lineage(date)
    if records.is_deployed:
        served = "" if newest is not None and newest.lineage == lineage else f"; now {newest.lineage if newest else 'nothing'}"
        return CycleStep(StepName.DEPLOY, "done", f"deployed{served}")
    if newest is not None and newest.lineage > lineage:
        return CycleStep(StepName.DEPLOY, "refused", f"{newest.lineage} is newer and deployed")
    detail = f"after {newest.lineage}" if newest else "the first deployment"
    return _unfinished(StepName.DEPLOY, [run for run in records.cycle if run.kind == "deploy"], detail)


def commands(config: CycleConfig, date: str, parent: str | None, successor: str | None = None) -> dict[StepName, list[str]]:
    """The commands of a date's jobs as argument lists.

    `parent`: the date whose daily job this one continues; None: the first. `successor`: the date that its stream hands over to;
    None: the next one.
    """
    daily, lineage = _folder(config, layout.daily(date)), _folder(config, layout.lineage(date))
    end = {"train_config.lineage.boundary": boundary(config, date)}
    train_daily = [
        *_train(config, config.daily, daily, {**end, **config.daily.edits}, date),
        *([f"--fine_tune_checkpoint={_folder(config, layout.daily(parent))}"] if parent else []),
    ]
    export = [
        *_launcher(config.launcher),
        "export",
        f"--pipeline_config_path={daily}/{layout.PIPELINE}",
        f"--model_dir={daily}",
        f"--checkpoint_path={daily}",
        f"--export_dir={lineage}",
    ]
    edits = {
        "data_config.dataset_type": "KafkaDataset",
        **end,
        **_handover_edits(config, successor or next_date(date)),
        **config.stream.edits,
    }
    stream = [*_train(config, config.stream, lineage, edits, date), f"--fine_tune_checkpoint={daily}"]
    return {StepName.TRAIN_DAILY: train_daily, StepName.FULL_EXPORT: export, StepName.TRAIN_STREAM: stream}


def _train(config: CycleConfig, job: JobConfig, folder: str, edits: Mapping[str, Any], date: str) -> list[str]:
    argv = [
        *_launcher(job.launcher or config.launcher),
        "train",
        f"--pipeline_config_path={config.pipeline_config}",
        f"--model_dir={folder}",
        f"--train_input_path={dated(job.input_path, date)}",
        "--continue_train",
        f"--edit_config_json={json.dumps(dated(dict(edits), date), sort_keys=True)}",
    ]
    if job.eval_input_path:
        argv.append(f"--eval_input_path={dated(job.eval_input_path, date)}")
    return argv


def _handover_edits(config: CycleConfig, successor: str) -> dict[str, Any]:
    handover = config.handover
    values = {
        "successor_dir": _folder(config, layout.lineage(successor)),
        "policy": handover.policy,
        "tolerance_s": handover.tolerance_s,
        "confirm_timeout_s": handover.confirm_timeout_s,
        "report_interval_s": handover.report_interval_s,
    }
    return {f"train_config.handover.{name}": value for name, value in values.items()}


def serve_command(config: CycleConfig) -> list[str]:
    """The command of the server that follows the root."""
    serving = config.serving
    argv = [*_launcher(config.launcher), "serve", config.root, f"--host={serving.host}", f"--port={serving.port or 0}"]
    if serving.model_name:
        argv.append(f"--model-name={serving.model_name}")
    return [*argv, *serving.options]


def shell_line(argv: Sequence[str]) -> str:
    """A command as a person would type it."""
    return shlex.join(argv)


def _launcher(given: Sequence[str]) -> list[str]:
    return list(given) or [sys.executable, "-m", "tidemill"]


def _folder(config: CycleConfig, key: str) -> str:
    return f"{config.root.rstrip('/')}/{key}"
