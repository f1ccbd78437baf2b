"""Keeps a DemoState up to date from what the processes write down: documents, logs and the players' status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.contracts import layout
from tidemill.contracts.progress import read_progress
from tidemill.contracts.release import ReleaseManifest
from tidemill.demo.playlog import IMPRESSION_SCHEMA, IMPRESSIONS, ArrowTail, read_status
from tidemill.demo.quality import auc
from tidemill.demo.state import DemoState, LineageState, ReleaseState
from tidemill.errors import NotFoundError, TidemillError
from tidemill.lineage.deployments import serving_statuses
from tidemill.lineage.orchestrators.children import Children
from tidemill.lineage.records import read_lineage, run_records
from tidemill.logs import log
from tidemill.storage.base import Storage

POLL_S = 0.25
_SAMPLE_S = 1.0
_AUC_S = 2.0
_AUC_ROWS = 6000
"""Random impressions that the live AUCs are computed on: the newest ones."""

Scorer = Callable[[pa.Table], np.ndarray]


class Watcher:
    """A thread that looks at the processes of a demo and never touches them.

    `scorer`: gives the frozen snapshot's scores of rows; None until there is a snapshot.
    """

    def __init__(
        self, state: DemoState, root: Storage, children: Children, players: Path, schema: pa.Schema = IMPRESSION_SCHEMA
    ) -> None:
        self._state = state
        self._root = root
        self._children = children
        self._players = players
        self._tail = ArrowTail(players / IMPRESSIONS, schema)
        self._recent: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._sampled_at = 0.0
        self._scored_at = 0.0
        self.scorer: Scorer | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the worker loop: the view may be stale, the demo goes on
                log.warning("the demo's watcher: %r", error)

    def _look(self) -> None:
        state, now = self._state, time.time()
        played = read_status(self._players)
        if played.started_at is not None and played.event_time is not None:
            state.event_time = played.event_time
            state.requests, state.failed, state.impressions = played.requests, played.failed, played.impressions
            state.latency_p50_s, state.latency_p99_s = played.latency_p50_s, played.latency_p99_s
            state.last_error = played.last_error
        for lineage in list(state.lineages.values()):
            self._look_at_lineage(lineage, now)
        self._look_at_server()
        if now - self._sampled_at >= _SAMPLE_S:
            self._sampled_at = now
            self._sample(now)
        if self.scorer is not None and now - self._scored_at >= _AUC_S:
            self._scored_at = now
            self._score(self.scorer)

    def _look_at_lineage(self, lineage: LineageState, now: float) -> None:
        state, key = self._state, f"{lineage.name}/{layout.PROGRESS}"
        try:
            progress = read_progress(self._root.read(key), where=key)
        except (NotFoundError, TidemillError):
            progress = None
        if progress is not None:
            lineage.first_progress_at = lineage.first_progress_at or now
            lineage.step, lineage.watermark = progress.step, progress.data_ts
            lineage.released_watermark = progress.released_watermark
            lineage.metrics = progress.metrics or {}
        record = read_lineage(self._root, prefix=lineage.name)
        if record is not None and record.status == "retired":
            lineage.status, lineage.lag_s = "retired", None
            return
        child = self._children.state(f"train_stream-{lineage.name.rsplit('/', 1)[1]}")
        if child is not None:
            lineage.restarts = child.restarts
            names = {"running": "running", "stopped": "ended", "exited": "ended", "given_up": "ended"}
            lineage.status = names.get(child.status, "down")
        runs = run_records(self._root, prefix=lineage.name)
        lineage.sequence = max((run.sequence for run in runs if run.sequence is not None), default=None)
        self._look_for_releases(lineage)
        if state.event_time is not None and lineage.watermark is not None:
            lineage.lag_s = max(0.0, state.event_time - lineage.watermark)

    def _look_for_releases(self, lineage: LineageState) -> None:
        """Read the manifests that have come since the last look; sequences have no gaps."""
        while True:
            sequence = lineage.releases[-1].sequence + 1 if lineage.releases else 1
            key = f"{lineage.name}/{layout.release(sequence)}"
            try:
                found = ReleaseManifest.parse(self._root.read(key), where=key)
            except NotFoundError:
                return
            rows = sum(segment.upserts + segment.deletes for segment in found.segments)
            lineage.releases.append(ReleaseState(sequence, found.step, rows, found.stages.committed_at))

    def _look_at_server(self) -> None:
        state, server = self._state, self._state.server
        for status in serving_statuses(self._root):
            server.url, server.ready, server.error = status.url, status.ready, status.error
            server.lineage, server.sequence, server.watermark = status.lineage, status.sequence, status.watermark
        if state.event_time is not None and server.watermark is not None:
            server.behind_s = max(0.0, state.event_time - server.watermark) / state.speed

    def _sample(self, now: float) -> None:
        for lineage in self._state.lineages.values():
            if lineage.watermark is not None and lineage.status != "retired":
                self._state.samples.append(
                    {
                        "at": now,
                        "event_time": self._state.event_time,
                        "lineage": lineage.name,
                        "watermark": lineage.watermark,
                        "released_watermark": lineage.released_watermark,
                        "lag_s": lineage.lag_s,
                    }
                )

    def _score(self, scorer: Scorer) -> None:
        rows = self._tail.read_new()
        rows = rows.filter(pc.equal(rows["is_random"], 1))
        if rows.num_rows:
            self._recent.append((rows["click"].to_numpy(), rows["served_score"].to_numpy(), scorer(rows)))
        while len(self._recent) > 1 and sum(len(part[0]) for part in self._recent[1:]) > _AUC_ROWS:
            self._recent.pop(0)
        if self._recent:
            clicks, served, frozen = (np.concatenate(column) for column in zip(*self._recent, strict=True))
            self._state.auc_served, self._state.auc_frozen = auc(clicks, served), auc(clicks, frozen)
