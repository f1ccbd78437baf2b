"""The daily cycle on one machine: a supervisor of child processes that reads records, and holds no state of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tidemill.cadence import StopReason
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import Deployment
from tidemill.errors import ConfigError, DeadlineError, FencedError, LineageError, RetiredError, StorageError, TidemillError
from tidemill.lineage.completeness import wait_for_table
from tidemill.lineage.cycle import (
    CycleConfig,
    CycleStep,
    StepName,
    commands,
    next_date,
    plan,
    serve_command,
)
from tidemill.lineage.deployments import (
    Decided,
    OvertakenError,
    deploy,
    is_deployed,
    lineage_date,
    newest_deployment,
)
from tidemill.lineage.eas import modify, read_template, render_service
from tidemill.lineage.fallback import serving_state
from tidemill.lineage.handover import SuccessorView, Switch, switch_due
from tidemill.lineage.lease import SupervisorLease
from tidemill.lineage.liveness import Liveness
from tidemill.lineage.on_record import read_records, standings, stream_is_over
from tidemill.lineage.orchestrators.children import Children, ChildSpec, RestartPolicy
from tidemill.lineage.orchestrators.guard import ServingGuard, followed_lineage
from tidemill.lineage.records import RunRecorder, RunStart, new_run_id, read_lineage, snapshot_digest
from tidemill.lineage.schedule import DateAction, actions, due_dates
from tidemill.lineage.watches import SwitchWatch
from tidemill.logs import event, log
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

SERVER = "serve"
_MAX_BACKOFF_S = 60.0
# Between two looks at what is due; dates are due by the minute.
_LOOK_S = 5.0
# Between two looks at the lease and at what is served: as often as heartbeats move.
_ATTEND_S = 2.0
# Starting these again would end the same way: the config is wrong, a newer run writes the lineage, the lineage has retired.
_HOPELESS = frozenset({ConfigError.exit_code, FencedError.exit_code, RetiredError.exit_code})


class _StopRequestedError(Exception):
    """Unwinds a date's run after `request_stop`."""


@dataclass(frozen=True, slots=True)
class CycleResult:
    """How a date's run ended. `predecessor`: the lineage served before; `retired`: whether it has retired; `lag_s`: by how much
    this date's lineage trailed then."""

    date: str
    deployment: Deployment
    predecessor: str | None
    retired: bool
    lag_s: float | None


class LocalCycle:
    """Runs the cycle's jobs as child processes of this one; one instance a root, on whichever machine (`SupervisorLease`).

    Everything that decides is read from records, so a supervisor that died is simply started again, and a date's run goes on where
    its records stand. Its children died with it; what they had started themselves (ranks of torchrun) may live on, and is fenced
    by the term of the run that follows: it stops at its next commit. Use it as a context manager; leaving it stops all children
    (SIGTERM, then SIGKILL after `limits.stop_s`). `run_date` belongs to one thread; `request_stop` and `children` may be used from
    any.
    """

    def __init__(self, config: CycleConfig, *, poll_s: float = 0.2, clock: Clock | None = None) -> None:
        self.config = config
        self.root = open_storage(config.root)
        self._logs = _logs_folder(config, self.root)
        self._poll_s = poll_s
        self.clock = clock or SystemClock()
        self._stopping = threading.Event()
        # A plain boolean: a signal handler may interrupt this very thread while it holds the Event's lock.
        self._stop_requested = False
        self._lease: SupervisorLease | None = None
        self._guard: ServingGuard | None = None
        self._attend_at = 0.0
        self._children: Children | None = None
        self._successors: dict[str, str] = {}

    @property
    def logs(self) -> Path:
        """Folder of the children's output."""
        return self._logs

    @property
    def children(self) -> Children:
        """The child processes: "serve", "train_daily-<date>", "full_export-<date>", "train_stream-<date>"."""
        if self._children is None:
            raise LineageError("the cycle hasn't been started")
        return self._children

    @property
    def lease(self) -> SupervisorLease:
        """The claim to this root."""
        if self._lease is None:
            raise LineageError("the cycle hasn't been started")
        return self._lease

    @property
    def guard(self) -> ServingGuard:
        """What looks after serving."""
        if self._guard is None:
            raise LineageError("the cycle hasn't been started")
        return self._guard

    def __enter__(self) -> LocalCycle:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Take the root, and start the server if the config has one here. Raises LineageError if another supervisor has it."""
        self._lease = SupervisorLease(self.root, self.config.handover.liveness_s, clock=self.clock)
        self._children = Children(self._logs)
        self._guard = ServingGuard(
            self.root, self.config.handover, self._lease.run_id, self._gave_up, self._modify_eas, clock=self.clock
        )
        if self.config.serving.port is not None:
            self._children.start(ChildSpec(SERVER, serve_command(self.config), self._restarts(), is_over=lambda code: False))

    def close(self) -> None:
        """Stop all children and give the root back. Idempotent."""
        self._stopping.set()
        try:
            if self._children is not None:
                self._children.close(deadline_s=self.config.limits.stop_s)
        finally:
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.release()

    def request_stop(self) -> None:
        """Make `run_date` and `wait` return soon. Safe in a signal handler."""
        self._stop_requested = True

    def plan(self, date: str) -> list[CycleStep]:
        """How a date's steps stand."""
        return plan(date, read_records(self.root, date))

    def run_date(self, date: str) -> CycleResult | None:
        """Run what is left of a date: train, export, stream, deploy, and see the predecessor retire. Idempotent.

        The stream goes on after the return. None: stopped on request; run the date again to go on. Raises LineageError if a job
        fails for good or the date is older than the deployed one, DeadlineError if a limit is passed.
        """
        try:
            return self._run_date(date)
        except _StopRequestedError:
            return None

    def run_schedule(self) -> None:
        """Run every date when it is due, in order, until a stop is requested; streams go on in between.

        A date that fails is tried again after the schedule's pause, and later ones wait for it: they build on it.
        """
        if self.config.schedule is None:
            raise ConfigError("schedule: the cycle's config needs this section to run without --date")
        retry_s = self.config.schedule.retry_s
        is_resumed = False
        while not self._paused():
            try:
                if not is_resumed or self._newest_has_died():
                    self._resume_newest()
                    is_resumed = True
                due = due_dates(self.config, self.clock.time())
                left = actions(due, standings(self.root, due))
                well = self._act(left[0]) if left else True
                well = well and not self._newest_has_died()
            except FencedError:
                raise
            except (LineageError, StorageError) as error:
                log.error("the cycle can't go on, trying again after %g s: %s", retry_s, error)
                well, left = False, []
            if not well:
                self._wait_s(retry_s)
            elif not left:
                self._wait_s(_LOOK_S)

    def _resume_newest(self) -> None:
        """Start the stream of the lineage that is followed, if it hasn't ended for good."""
        lineage = followed_lineage(self.guard.history.read())
        if lineage is not None:
            self.start_stream(lineage_date(lineage))

    def _newest_has_died(self) -> bool:
        """Whether the stream of the lineage that is followed ended too often to be restarted, and isn't over."""
        lineage = followed_lineage(self.guard.history.read())
        if lineage is None:
            return False
        date = lineage_date(lineage)
        return self._has_ended(child_name(StepName.TRAIN_STREAM, date)) and not stream_is_over(self.root, date)

    def _gave_up(self, date: str) -> bool:
        """Whether this supervisor had a date's stream, which ended and isn't started again by itself."""
        state = self.children.state(child_name(StepName.TRAIN_STREAM, date))
        return state is not None and state.status in ("exited", "given_up")

    def _act(self, action: DateAction) -> bool:
        """Whether it came to its end, or was stopped on request."""
        try:
            if action.kind == "train_daily":
                self.train_daily(action.date)
            else:
                self.run_date(action.date)
        except FencedError:
            raise
        except (LineageError, DeadlineError, StorageError) as error:
            log.error("%s of %s failed, trying again: %s", action.kind, action.date, error)
            event("cycle.step", step=action.kind, date=action.date, state="failed")
            return False
        return True

    def _wait_s(self, seconds: float) -> bool:
        """Whether a stop was requested before the time was over."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            if self._paused():
                return True
        return False

    def train_daily(self, date: str) -> None:
        """Run a date's daily job alone: its day joins the daily line, and gets no stream. Idempotent; returns on a stop request."""
        parent = read_records(self.root, date).parent
        argv = commands(self.config, date, parent)[StepName.TRAIN_DAILY]
        with suppress(_StopRequestedError):
            self._run_job(StepName.TRAIN_DAILY, date, argv, self.config.limits.train_daily_s)

    def _run_date(self, date: str) -> CycleResult:
        records = read_records(self.root, date)
        refused = [step for step in plan(date, records) if step.state == "refused"]
        if refused:
            raise LineageError(f"{date}: {refused[0].name} is refused: {refused[0].detail}")
        argv = commands(self.config, date, records.parent)
        predecessor = self._resume_predecessor(date)
        limits = self.config.limits
        self._run_job(StepName.TRAIN_DAILY, date, argv[StepName.TRAIN_DAILY], limits.train_daily_s)
        self._run_job(StepName.FULL_EXPORT, date, argv[StepName.FULL_EXPORT], limits.full_export_s)
        self.start_stream(date, argv[StepName.TRAIN_STREAM])
        deployment = self._deploy(date, predecessor)
        return self._see_retirement(date, deployment, predecessor)

    def start_stream(self, date: str, argv: list[str] | None = None, *, successor: str | None = None) -> None:
        """Keep a date's stream running until its record says completed or retired. Does nothing if it runs or has retired.

        `successor`: the date that it hands over to; None: the next one. A stream that runs for another one is started again.
        """
        name, successor = child_name(StepName.TRAIN_STREAM, date), successor or next_date(date)
        state = self.children.state(name)
        running = state is not None and state.status in ("starting", "running", "ending", "waiting")
        if (running and self._successors[name] == successor) or stream_is_over(self.root, date):
            return
        if running:
            log.info("%s starts again, to hand over to %s", name, successor)
            self.children.stop(name, deadline_s=self.config.limits.stop_s)
        if argv is None:
            argv = commands(self.config, date, None, successor)[StepName.TRAIN_STREAM]
        self.lease.require()
        self.children.start(ChildSpec(name, argv, self._restarts(), is_over=lambda code: self._must_not_restart(date, code)))
        self._successors[name] = successor
        event("cycle.step", step=StepName.TRAIN_STREAM, date=date, state="started")

    def _must_not_restart(self, date: str, code: int) -> bool:
        if code in _HOPELESS or stream_is_over(self.root, date):
            return True
        try:
            self.lease.require()
        except FencedError:
            return True
        return False

    def wait(self) -> None:
        """Wait until every stream has ended for good, or a stop is requested.

        Raises LineageError if one of them died and won't be restarted, rather than being completed or retired.
        """
        streams = [name for name in self.children.states() if name.startswith(StepName.TRAIN_STREAM)]
        while not self._paused():
            if all(self._has_ended(name) for name in streams):
                self._look_after_serving()
                for name in streams:
                    self._require_over(name)
                return

    def _require_over(self, stream: str) -> None:
        state = self.children.state(stream)
        if state is None or state.status == "stopped":
            return
        if not stream_is_over(self.root, stream.removeprefix(f"{StepName.TRAIN_STREAM}-")):
            raise LineageError(f"{stream} ended with {state.exit_code} and isn't restarted; see {self.children.log_path(stream)}")

    def _resume_predecessor(self, date: str) -> str | None:
        """The lineage that is (or was, if this date is deployed already) served before this date's; None: there is none.

        Its stream is started again if nobody runs it and it hasn't ended for good: it serves on until the switch, and retires.
        """
        history = self.guard.history.read()
        found = serving_state([past for past in history if past.lineage < layout.lineage(date)])
        if found is None:
            return None
        if followed_lineage(history) is not None:
            # Dates may have been skipped in between: the stream must know whom it hands over to.
            self.start_stream(lineage_date(found.followed), successor=date)
        return found.followed

    def _run_job(self, name: StepName, date: str, argv: list[str], limit_s: float) -> None:
        if self._is_done(name, date):
            return
        if name is StepName.TRAIN_DAILY and not wait_for_table(self.config.daily, date, self._wait_s, self.clock):
            raise _StopRequestedError
        child = child_name(name, date)
        event("cycle.step", step=name, date=date, state="started")
        self.lease.require()
        self.children.start(ChildSpec(child, argv, self._restarts(), is_over=lambda code: code not in (75, -9, -15)))
        try:
            self._wait_until(lambda: self._has_ended(child), limit_s, f"{name} of {date}")
        except DeadlineError:
            self.children.stop(child, deadline_s=self.config.limits.stop_s)
            raise
        if not self._is_done(name, date):
            state = self.children.state(child)
            code = state.exit_code if state else None
            raise LineageError(f"{name} of {date} ended with {code} and is not complete; see {self.children.log_path(child)}")
        event("cycle.step", step=name, date=date, state="done")

    def _is_done(self, name: StepName, date: str) -> bool:
        return any(step.name is name and step.state == "done" for step in self.plan(date))

    def _has_ended(self, child: str) -> bool:
        state = self.children.state(child)
        return state is None or state.status in ("exited", "stopped", "given_up")

    def _deploy(self, date: str, predecessor: str | None) -> Deployment:
        newest = newest_deployment(self.root)
        if newest is not None and is_deployed(self.root, layout.lineage(date)):
            return newest
        folder = open_storage(f"{self.config.root.rstrip('/')}/{layout.cycle(date)}")
        recorder = RunRecorder(folder, RunStart(new_run_id(self.clock), "deploy", date), clock=self.clock)
        try:
            deployment = self._deploy_when_due(date, predecessor, recorder)
        except _StopRequestedError:
            recorder.finish(StopReason.PREEMPTED)
            raise
        except BaseException as error:
            recorder.finish(StopReason.FAILED, error=error)
            raise
        recorder.finish(StopReason.EXHAUSTED)
        event("cycle.step", step=StepName.DEPLOY, date=date, state="done", number=deployment.number)
        return deployment

    def _deploy_when_due(self, date: str, predecessor: str | None, recorder: RunRecorder) -> Deployment:
        lineage, liveness_s = layout.lineage(date), self.config.handover.liveness_s
        watch = SwitchWatch(self.root, lineage, predecessor, liveness_s, clock=self.clock) if predecessor else None
        switch, made = Switch(False, ""), None

        def attempt() -> bool:
            nonlocal switch, made
            newest, before = newest_deployment(self.root), switch.reason
            switch = self._switch(watch)
            if switch.reason != before:
                log.info("deploy of %s: %s", date, switch.reason)
            self._require_stream(date)
            if switch.due:
                made = self._deploy_now(date, switch.reason, Decided(recorder.record.run_id, newest.number if newest else 0))
            return made is not None

        self._wait_until(attempt, self.config.limits.catch_up_s, f"deploy of {date}", lambda: switch.reason)
        assert made is not None
        recorder.update(details={"number": made.number, "reason": made.reason})
        return made

    def _deploy_now(self, date: str, reason: str, decided: Decided) -> Deployment | None:
        """None: somebody else has deployed meanwhile, so all is to be looked at again."""
        self.lease.require()
        self._modify_eas(date)
        lineage = layout.lineage(date)
        try:
            return deploy(self.root, lineage, snapshot_digest(self.root, lineage), reason, decided=decided, clock=self.clock)
        except OvertakenError as error:
            log.info("deploy of %s: %s", date, error)
            return None

    def _modify_eas(self, date: str) -> None:
        """Before the deployment is on record: if this fails or dies, the date's next run does it again."""
        eas = self.config.serving.eas
        if eas is not None:
            service = render_service(eas, read_template(eas.template), self.config.root, date)
            modify(eas, service, self._logs / f"eas-{date}.json", clock=self.clock)

    def _switch(self, watch: SwitchWatch | None) -> Switch:
        handover = self.config.handover
        if watch is None:
            return switch_due(None, SuccessorView(None), handover.policy, handover.tolerance_s)
        return switch_due(watch.predecessor(), watch.successor(), handover.policy, handover.tolerance_s)

    def _require_stream(self, date: str) -> None:
        child = child_name(StepName.TRAIN_STREAM, date)
        if self._has_ended(child) and not stream_is_over(self.root, date):
            path = self.children.log_path(child)
            raise LineageError(f"the stream of {date} has ended before it could be deployed; see {path}")

    def _see_retirement(self, date: str, deployment: Deployment, predecessor: str | None) -> CycleResult:
        """Wait until the predecessor has retired, or is known not to run."""
        if predecessor is None:
            return CycleResult(date, deployment, None, False, None)
        watch = SwitchWatch(self.root, layout.lineage(date), predecessor, self.config.handover.liveness_s, clock=self.clock)
        child = child_name(StepName.TRAIN_STREAM, lineage_date(predecessor))
        try:
            self._wait_until(
                lambda: watch.is_retired() or (self._has_ended(child) and watch.liveness() is Liveness.DEAD),
                self.config.limits.retire_s,
                f"retirement of {predecessor}",
            )
        except DeadlineError as error:
            log.error("%s; it trains on", error)
            event("cycle.not_retired", lineage=predecessor, date=date)
        record = read_lineage(self.root, prefix=predecessor)
        retired = record is not None and record.status == "retired"
        lag_s = record.handover_lag_s if record is not None else None
        event("cycle.done", date=date, predecessor=predecessor, retired=retired, lag_s=lag_s)
        return CycleResult(date, deployment, predecessor, retired, lag_s)

    def _wait_until(self, condition: Callable[[], bool], limit_s: float, what: str, why: Callable[[], str] = lambda: "") -> None:
        """Poll a condition; a store that fails is asked again. Raises DeadlineError, _StopRequestedError."""
        until = self.clock.monotonic() + limit_s
        problem = ""
        while True:
            try:
                if condition():
                    return
                problem = why()
            except StorageError as error:
                problem = str(error)
            if self.clock.monotonic() > until:
                raise DeadlineError(f"{what}: not done after {limit_s:g} s{': ' if problem else ''}{problem}")
            if self._paused():
                raise _StopRequestedError

    def _paused(self) -> bool:
        """Wait for the time between two looks, and look after what is served; whether a stop was requested.

        Raises FencedError if another supervisor has taken over.
        """
        stop = self._stopping.wait(self._poll_s) or self._stop_requested
        if not stop and self.clock.monotonic() >= self._attend_at:
            self._attend_at = self.clock.monotonic() + _ATTEND_S
            self._look_after_serving()
        return stop

    def _look_after_serving(self) -> None:
        try:
            self.lease.require()
            self.guard.look()
        except FencedError:
            raise
        except TidemillError as error:
            log.warning("what is served can't be looked after, trying again: %s", error)

    def _restarts(self) -> RestartPolicy:
        limits = self.config.limits
        return RestartPolicy(limits.max_restarts, limits.restart_window_s, limits.backoff_s, _MAX_BACKOFF_S)


def child_name(step: StepName, date: str) -> str:
    """The name of a date's job among the supervisor's children, and of its log file."""
    return f"{step}-{date}"


def _logs_folder(config: CycleConfig, root: Storage) -> Path:
    if config.logs:
        return Path(config.logs)
    if isinstance(root, LocalStorage):
        return root.root / "logs"
    raise ConfigError(f"logs: name a local folder for the logs of child processes, since the root {config.root} isn't local")
