"""Reading another lineage's progress.json: anything unusable is a reason, never an exception (A9)."""

from __future__ import annotations

from tidemill.clock import Clock
from tidemill.contracts import layout
from tidemill.contracts.progress import ProgressReport, read_progress
from tidemill.errors import NotFoundError, TidemillError
from tidemill.lineage.handover import SuccessorView
from tidemill.lineage.liveness import LivenessTracker
from tidemill.storage.base import Storage


class ProgressReader:
    """Follows one lineage's progress.json. The folder need not exist yet. Not thread-safe.

    `prefix`: the lineage's folder inside the store, "" for a store rooted at it. A report of a lower term than one seen before
    is a leftover and ignored (D6).
    """

    def __init__(self, storage: Storage, liveness_s: float, *, prefix: str = "", clock: Clock | None = None) -> None:
        self._storage = storage
        self._key = f"{prefix}/{layout.PROGRESS}" if prefix else layout.PROGRESS
        self._tracker = LivenessTracker(liveness_s, clock)
        self._highest_term = 0

    def look(self) -> SuccessorView:
        """Read once. Raises nothing for what the file holds or the store says."""
        try:
            progress = read_progress(self._storage.read(self._key), where=f"{self._storage.url}/{self._key}")
        except NotFoundError:
            return SuccessorView(None, self._tracker.judge(self._key), f"no {self._key} yet")
        except (TidemillError, OSError) as error:
            return SuccessorView(None, self._tracker.judge(self._key), str(error))
        return self._judge(progress)

    def _judge(self, progress: ProgressReport) -> SuccessorView:
        term = progress.term or 0
        if term < self._highest_term:
            problem = f"{self._key} is of term {term}, but term {self._highest_term} has been seen: a leftover"
            return SuccessorView(None, self._tracker.judge(self._key), problem)
        self._highest_term = term
        if progress.heartbeat is None:
            return SuccessorView(progress, problem="")
        writer = f"{progress.run_id}/{term}"
        return SuccessorView(progress, self._tracker.observe(self._key, progress.heartbeat, writer=writer), "")
