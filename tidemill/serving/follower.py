"""Keeps a server on the newest deployment and its newest release; builds aside, warms, and swaps with one assignment."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tidemill.clock import Clock
from tidemill.contracts import layout
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import CorruptError, DataError, StorageError, TidemillError
from tidemill.logs import event, log
from tidemill.serving.deployments import Target, folder_target, newest_deployment
from tidemill.serving.generation import Change, Generation, next_generation
from tidemill.serving.loader import load_snapshot, read_changes
from tidemill.serving.metrics import Metrics
from tidemill.serving.predictor import Predictor
from tidemill.storage.base import Storage

POLL_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Identity:
    """How this server names itself in its status."""

    server: str
    url: str


class Follower:
    """Polls a store and holds the predictor that scores.

    Whatever fails, the current generation stays, the reason is in the status, the metrics and the log, and the next poll tries
    again. It never obeys a lower deployment number, never goes back within one number, and never picks a lineage by itself.
    Threading: `start` runs `poll` on a thread of its own; `predictor` may be read from any thread, and what it returns stays valid.
    """

    def __init__(
        self, storage: Storage, identity: Identity, metrics: Metrics, clock: Clock, *, poll_interval_s: float = POLL_INTERVAL_S
    ) -> None:
        self._storage = storage
        self._identity = identity
        self._metrics = metrics
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._predictor: Predictor | None = None
        self._is_folder = False
        self._heartbeat = 0
        self._swapped_at: float | None = None
        self._error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    @property
    def predictor(self) -> Predictor | None:
        """The predictor of the generation that scores now; None until the first one is warm."""
        return self._predictor

    @property
    def generation(self) -> Generation | None:
        predictor = self._predictor
        return None if predictor is None else predictor.generation

    @property
    def error(self) -> str | None:
        """Why something newer isn't served; None if all is well."""
        return self._error

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, deadline_s: float = 5.0) -> None:
        """End the thread, and say in the status that this server no longer serves. A build on the way is abandoned."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        self._predictor = None
        self._write_status()

    def poll(self) -> None:
        """One look at the store. Never raises for what the store holds or does."""
        self._heartbeat += 1
        try:
            problem = self._advance()
        except (TidemillError, OSError) as error:
            self._report(error)
        else:
            self._report(problem)
        self._write_status()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
            except Exception as error:  # noqa: BLE001 - the worker loop: a fault that nobody foresaw must not end the following
                log.exception("the follower failed, and goes on")
                self._report(error)
            self._stopping.wait(self._poll_interval_s)

    def _advance(self) -> Exception | None:
        """Move to the newest generation that can be built; to another snapshot only with all its releases.

        Returns why there is a newer one that can't, or raises it.
        """
        found_at = self._clock.time()
        target, torn = self._target()
        if target is None:
            return StorageError(torn or f"{self._storage.url} holds neither deployments nor a snapshot")
        base = self._base(target)
        news = read_changes(target.folder, base, up_to=target.up_to)
        served, problem = _apply(base, news.changes)
        fault = problem or news.error
        if fault is not None and self.generation is not None and base.model is not self.generation.model:
            # What is served now may know more than the front part of another snapshot's releases.
            return fault
        if served is not self.generation:
            self._swap(served, found_at)
            self._metrics.rows_applied.inc(sum(change.num_rows() for change in news.changes if change.sequence <= served.sequence))
        return fault or (StorageError(torn) if torn else None)

    def _target(self) -> tuple[Target | None, str | None]:
        current = self.generation
        torn = None
        if not self._is_folder:
            target, torn = newest_deployment(self._storage, at_least=(current.deployment or 0) if current else 0)
            if target is not None:
                return target, torn
            if current is not None:
                return None, torn or f"deployment {current.deployment}, which is served, has vanished"
        target = folder_target(self._storage)
        self._is_folder = target is not None
        return target, torn

    def _base(self, target: Target) -> Generation:
        """The generation to go on from: the current one if it lies on the way to the target, else the target's snapshot."""
        current = self.generation
        if (
            current is not None
            and current.lineage == target.folder.name
            and target.digest in (None, current.model.digest)
            and (target.up_to is None or current.position <= target.up_to)
        ):
            return current if current.deployment == target.deployment else replace(current, deployment=target.deployment)
        return replace(load_snapshot(target.folder, digest=target.digest), deployment=target.deployment)

    def _swap(self, generation: Generation, found_at: float) -> None:
        before = self.generation
        predictor = Predictor(generation)
        warm_up(predictor)
        self._predictor = predictor
        self._swapped_at = self._clock.time()
        self._metrics.swaps.inc()
        self._metrics.swap_seconds.observe(max(0.0, self._swapped_at - found_at))
        event(
            "serving.swapped",
            **generation.name(),
            found_at=found_at,
            swapped_at=self._swapped_at,
            after_sequence=before.sequence if before is not None and before.lineage == generation.lineage else None,
        )

    def _report(self, error: Exception | None) -> None:
        """Count every failed poll; log a reason when it is new, and once when all is well again."""
        text = None if error is None else str(error)
        if error is not None:
            self._metrics.load_errors.labels(reason=type(error).__name__).inc()
        if text != self._error:
            if text is None:
                log.info("serving: all is well again")
            else:
                log.warning("serving: %s", text)
            event("serving.load_error", error=text)
        self._error = text

    def _write_status(self) -> None:
        """Below a root only: a single folder may be anyone's, read-only."""
        if self._is_folder:
            return
        generation = self.generation
        status = ServingStatus(
            server=self._identity.server,
            url=self._identity.url,
            heartbeat=self._heartbeat,
            ready=generation is not None,
            deployment=generation.deployment if generation else None,
            lineage=generation.lineage if generation else None,
            snapshot_digest=generation.model.digest if generation else None,
            term=generation.term if generation else None,
            sequence=generation.sequence if generation else None,
            step=generation.step if generation else None,
            watermark=generation.watermark if generation else None,
            swapped_at=self._swapped_at,
            error=self._error,
            updated_at=self._clock.time(),
        )
        try:
            self._storage.write(layout.serving_status(self._identity.server), status.to_bytes())
        except (StorageError, OSError) as error:
            self._metrics.status_errors.inc()
            log.warning("serving: the status can't be written: %s", error)


def warm_up(predictor: Predictor) -> None:
    """Score the snapshot's probe rows (without any, one row of nulls), so that the first request meets compiled kernels.

    Raises CorruptError if a probe row's score isn't finite.
    """
    model = predictor.generation.model
    probes = model.probes
    if probes is None:
        with suppress(DataError):  # a feature may have no default
            predictor.score({name: pa.nulls(1) for name in model.feature_columns}, 1)
        return
    for name, scores in predictor.score_table(probes).items():
        if not np.isfinite(scores).all():
            generation = predictor.generation
            raise CorruptError(f"{generation.lineage}: release {generation.sequence} gives {name} that aren't finite")


def _apply(base: Generation, changes: list[Change]) -> tuple[Generation, CorruptError | None]:
    """The generation after as many changes as fit, and what is wrong with the first that doesn't."""
    try:
        return next_generation(base, changes), None
    except CorruptError as error:
        problem = error
    # Seldom: find the last good one, so that a bad release holds up nothing before it.
    served = base
    for change in changes:
        try:
            served = next_generation(served, [change])
        except CorruptError as error:
            return served, error
    return served, problem
