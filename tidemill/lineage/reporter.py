"""Rank 0's hand-over thread: tells how far this run is, watches the successor, and decides (A3, A8, A10, D8).

The training thread only leaves its newest figures here and reads a boolean; whatever the store does, it never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.clock import Clock, SystemClock
from tidemill.config.train import HandoverConfig
from tidemill.contracts import layout
from tidemill.contracts.progress import ProgressReport, WindowFigures, read_progress
from tidemill.errors import ConfigError, StorageError, TidemillError
from tidemill.lineage.deployments import confirmed, serving_statuses
from tidemill.lineage.handover import (
    NOT_CONFIRMED,
    Confirmation,
    Decision,
    OwnProgress,
    Policy,
    SuccessorView,
    Verdict,
    decide,
)
from tidemill.lineage.health import NOT_COMPARED, Health, HealthBounds, compare
from tidemill.lineage.liveness import LivenessTracker
from tidemill.lineage.progress import ProgressReader
from tidemill.logs import event, log
from tidemill.storage.base import Storage

# A heartbeat counts as dead after this many of its intervals without a move.
_BEATS_TO_DIE = 6
_REPORT_INTERVAL_S = 5.0
_LIVENESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Point:
    """The training thread's newest figures. `data_ts`: the quorum's event time; None: absent."""

    data_ts: float | None
    step: int = 0
    released_watermark: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    windows: Sequence[WindowFigures] = ()


@dataclass(frozen=True, slots=True)
class HandoverSettings:
    """How often to report and check, and when to hand over; checked by `validate_handover`.

    `on_report`: check after each `report` too, not only every `report_interval_s`. `liveness_s`: a heartbeat that doesn't move for
    so long is dead; several times the writers' report intervals.
    """

    policy: Policy = "served"
    tolerance_s: float = 300.0
    confirm_timeout_s: float = 600.0
    report_interval_s: float = _REPORT_INTERVAL_S
    liveness_s: float = _LIVENESS_S
    on_report: bool = False
    bounds: HealthBounds = field(default_factory=HealthBounds)


def handover_settings(config: HandoverConfig) -> HandoverSettings:
    """The settings that a pipeline config means. Without a report interval each `report` is a check (the training thread reports
    every log_step_count_steps), and an idle stream still shows its heartbeat."""
    interval_s = config.report_interval_s or _REPORT_INTERVAL_S
    return HandoverSettings(
        policy=config.policy,
        tolerance_s=config.tolerance_s,
        confirm_timeout_s=config.confirm_timeout_s,
        report_interval_s=interval_s,
        liveness_s=max(_LIVENESS_S, _BEATS_TO_DIE * interval_s),
        on_report=not config.report_interval_s,
        bounds=HealthBounds(
            min_events=config.health.min_events,
            auc=config.health.auc,
            normalized_entropy=config.health.normalized_entropy,
            calibration=config.health.calibration,
        ),
    )


@dataclass(frozen=True, slots=True)
class Successor:
    """Where the successor's progress.json is (or will be). `root` and `lineage` (its key in the root) are needed by `served`."""

    storage: Storage
    root: Storage | None = None
    lineage: str | None = None


class HandoverThread:
    """Writes progress.json and decides, every `report_interval_s`; idle or not, the heartbeat moves on.

    `report` and `verdict` never wait. A verdict to hand over stays. `successor` None: reports only. Errors of the store are
    logged when they are new and tried again at the next interval. `check` is one interval's work: the thread calls it; a test may
    call it instead of `start`.
    """

    def __init__(
        self,
        storage: Storage,
        run_id: str,
        term: int,
        settings: HandoverSettings,
        successor: Successor | None = None,
        clock: Clock | None = None,
    ) -> None:
        if successor is not None and settings.policy != "caught_up" and (successor.root is None or successor.lineage is None):
            raise ConfigError(
                f"train_config.handover.policy: {settings.policy!r} needs a successor inside a root (ROOT/lineages/<date>), "
                "whose servers confirm; use 'caught_up' for one elsewhere"
            )
        self._storage = storage
        self._run_id = run_id
        self._term = term
        self._settings = settings
        self._successor = successor
        self._clock = clock or SystemClock()
        self._reader = None if successor is None else ProgressReader(successor.storage, settings.liveness_s, clock=clock)
        self._servers = LivenessTracker(settings.liveness_s, clock)
        self._point = Point(None)
        self._decision = Decision(Verdict.NONE, "no check yet")
        self._handed_over = False
        self._heartbeat = 0
        self._mark: float | None = None
        self._mark_restored = False
        self._marked_at: float | None = None
        self._alarmed = False
        self._warned_absent = False
        self._problem: str | None = None
        self._stopping = False
        self._last: Point | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hand-over", daemon=True)

    @property
    def verdict(self) -> bool:
        """Whether this run is to hand over; once True, always."""
        return self._handed_over

    @property
    def decision(self) -> Decision:
        """The newest decision; the one to hand over once there is one."""
        return self._decision

    def report(self, point: Point) -> None:
        """Leave the newest figures; the latest wins. Any thread; doesn't wait."""
        self._point = point
        if self._settings.on_report:
            self._wake.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, deadline_s: float = 5.0) -> None:
        """End the thread; a store that hangs is left behind. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def finish(self, point: Point, *, deadline_s: float = 5.0) -> None:
        """Tell a run's last figures, which stand in progress.json from then on, and end the thread."""
        self._last = point
        self.stop(deadline_s=deadline_s)

    def check(self) -> None:
        """Write progress.json, look at the successor, decide. Raises nothing that a store or a file can cause."""
        point = self._point
        self._tell(point)
        if self._successor is not None and not self._handed_over:
            self._decide(point)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                self.check()
            except Exception:  # noqa: BLE001 - the worker loop: a fault that nobody foresaw must not end the reports
                log.exception("the hand-over check failed; trying again")
            if not self._stopping:
                self._wake.wait(self._settings.report_interval_s)
        if self._last is not None:
            self._tell(self._last)

    def _tell(self, point: Point) -> None:
        try:
            self._restore_mark()
            self._write(point)
        except (StorageError, OSError) as error:
            self._complain(f"{layout.PROGRESS} can't be written: {error}")
        else:
            self._problem = None

    def _write(self, point: Point) -> None:
        if point.data_ts is None:
            if not self._warned_absent:
                log.warning("no event time from a quorum of ranks yet: %s isn't written, no hand-over", layout.PROGRESS)
            self._warned_absent = True
            return
        self._heartbeat += 1
        report = ProgressReport(
            data_ts=point.data_ts,
            run_id=self._run_id,
            term=self._term,
            heartbeat=self._heartbeat,
            step=point.step,
            released_watermark=point.released_watermark,
            handover_mark=self._mark,
            metrics=dict(point.metrics) or None,
            windows=list(point.windows) or None,
        )
        self._storage.write(layout.PROGRESS, report.to_bytes())

    def _restore_mark(self) -> None:
        """A mark that an earlier run of this lineage has set still stands: the deployer may have acted on it."""
        if self._mark_restored:
            return
        try:
            self._mark = read_progress(self._storage.read(layout.PROGRESS), where=layout.PROGRESS).handover_mark
        except StorageError as error:
            if error.retryable:
                raise
        self._mark_restored = True
        if self._mark is not None:
            self._marked_at = self._clock.monotonic()

    def _decide(self, point: Point) -> None:
        assert self._reader is not None
        settings = self._settings
        own = OwnProgress(point.data_ts, self._run_id, self._mark)
        view = self._reader.look()
        health = self._health(point, view)
        decision = decide(own, view, settings.policy, settings.tolerance_s, self._confirmation(), health)
        self._decision = decision
        lag = "unknown" if decision.lag_s is None else f"{decision.lag_s:.1f} s"
        log.info("hand-over check: lag %s, verdict %s: %s", lag, decision.verdict, decision.reason)
        event(
            "handover.checked",
            verdict=decision.verdict,
            reason=decision.reason,
            lag_s=decision.lag_s,
            data_ts=point.data_ts,
            health=health.reason,
        )
        if decision.verdict is Verdict.MARK:
            self._set_mark(point)
        elif decision.verdict is Verdict.HAND_OVER:
            self._handed_over = True
        elif self._marked_at is not None:
            self._alarm_if_late(decision)

    def _health(self, point: Point, view: SuccessorView) -> Health:
        """How the successor does on the windows that both have; looked at under `healthy` only."""
        if self._settings.policy != "healthy" or view.progress is None:
            return NOT_COMPARED
        return compare(point.windows, view.progress.windows or (), self._settings.bounds)

    def _set_mark(self, point: Point) -> None:
        self._mark, self._marked_at = point.data_ts, self._clock.monotonic()
        event("handover.marked", handover_mark=self._mark, lag_s=self._decision.lag_s)
        try:
            self._write(point)
        except (StorageError, OSError) as error:
            self._complain(f"the hand-over mark can't be written yet: {error}")

    def _alarm_if_late(self, decision: Decision) -> None:
        assert self._marked_at is not None
        waited_s = self._clock.monotonic() - self._marked_at
        if waited_s > self._settings.confirm_timeout_s and not self._alarmed:
            self._alarmed = True
            log.error("hand-over: not confirmed for %.0f s since the mark, training on: %s", waited_s, decision.reason)
            event("handover.alarm", waited_s=waited_s, reason=decision.reason)

    def _confirmation(self) -> Confirmation:
        successor = self._successor
        if self._settings.policy == "caught_up" or successor is None or successor.root is None or successor.lineage is None:
            return NOT_CONFIRMED
        try:
            return confirmed(serving_statuses(successor.root), successor.lineage, self._servers)
        except (TidemillError, OSError) as error:
            return Confirmation(False, f"what the servers serve can't be read: {error}")

    def _complain(self, problem: str) -> None:
        """Log a problem when it is new."""
        if problem != self._problem:
            log.warning("hand-over: %s", problem)
        self._problem = problem
