"""Scores requests on one thread, several at once when several wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.clock import Clock
from tidemill.errors import DeadlineError, NotReadyError, TidemillError
from tidemill.logs import log
from tidemill.serving.generation import Generation
from tidemill.serving.metrics import Metrics
from tidemill.serving.predictor import Predictor

BATCH_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The scores of one request, and the generation that made them."""

    generation: Generation
    scores: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request: feature columns of `num_rows` rows, or of one row that stands for all."""

    columns: Mapping[str, pa.Array]
    num_rows: int
    deadline: float
    """By the clock's monotonic time; a job that waits longer isn't scored."""
    reply: Callable[[Answer | Exception], None]
    """Called once, on the scoring thread."""

    def schema(self) -> tuple[tuple[str, pa.DataType], ...]:
        return tuple(sorted(((name, array.type) for name, array in self.columns.items()), key=lambda pair: pair[0]))


class Batcher:
    """A bounded queue and the thread that scores from it.

    It takes whatever waits, up to `BATCH_ROWS` rows, and never waits for more. All jobs of a batch are scored by one generation.
    Threading: any thread may submit.
    """

    def __init__(self, predictor: Callable[[], Predictor | None], metrics: Metrics, clock: Clock, *, capacity: int = 256) -> None:
        self._predictor = predictor
        self._metrics = metrics
        self._clock = clock
        self._capacity = capacity
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        metrics.queue_depth.set_function(lambda: float(len(self._jobs)))

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its reply comes later. Raises NotReadyError if the queue is full or closed."""
        with self._changed:
            if self._closed:
                raise NotReadyError("the server is stopping")
            if len(self._jobs) >= self._capacity:
                raise NotReadyError(f"{self._capacity} requests are waiting already; try again")
            self._jobs.append(job)
            self._changed.notify()

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Take no more jobs, score those that wait, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while jobs := self._take():
            try:
                self._score(jobs)
            except Exception as error:  # noqa: BLE001 - the worker loop: one fault must not end all scoring
                log.exception("scoring failed")
                for job in jobs:
                    job.reply(error)

    def _take(self) -> list[Job]:
        """What waits, up to BATCH_ROWS rows but at least one job; empty once the batcher is closed and nothing waits."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            jobs: list[Job] = []
            rows = 0
            while self._jobs and (not jobs or rows + self._jobs[0].num_rows <= BATCH_ROWS):
                jobs.append(self._jobs.popleft())
                rows += jobs[-1].num_rows
            return jobs

    def _score(self, jobs: list[Job]) -> None:
        now = self._clock.monotonic()
        late = [job for job in jobs if job.deadline < now]
        for job in late:
            job.reply(DeadlineError("the request waited past its deadline"))
        predictor = self._predictor()
        alike: dict[tuple[tuple[str, pa.DataType], ...], list[Job]] = {}
        for job in jobs:
            if job.deadline < now:
                continue
            if predictor is None:
                job.reply(NotReadyError("no generation is warm yet"))
            else:
                alike.setdefault(job.schema(), []).append(job)
        if predictor is not None:
            for group in alike.values():
                self._score_group(predictor, group)

    def _score_group(self, predictor: Predictor, jobs: list[Job]) -> None:
        """Score jobs with equal columns at once; if that fails, each on its own, so that only the bad ones fail."""
        num_rows = sum(job.num_rows for job in jobs)
        columns = jobs[0].columns if len(jobs) == 1 else _joined(jobs)
        try:
            scores = predictor.score(columns, num_rows)
        except Exception as error:  # noqa: BLE001 - a plug-in call: features and programs may fail in any way
            if len(jobs) > 1:
                for job in jobs:
                    self._score_group(predictor, [job])
                return
            if not isinstance(error, TidemillError):
                log.exception("a request can't be scored")
            jobs[0].reply(error)
            return
        self._metrics.batch_rows.observe(num_rows)
        self._metrics.rows.inc(num_rows)
        at = 0
        for job in jobs:
            job.reply(Answer(predictor.generation, {name: values[at : at + job.num_rows] for name, values in scores.items()}))
            at += job.num_rows


def _joined(jobs: list[Job]) -> dict[str, pa.Array]:
    """The jobs' columns one after the other; a single row that stands for all is repeated."""
    return {name: pa.concat_arrays([_repeated(job.columns[name], job.num_rows) for job in jobs]) for name in jobs[0].columns}


def _repeated(array: pa.Array, num_rows: int) -> pa.Array:
    if len(array) == num_rows:
        return array
    return array.take(pa.array(np.zeros(num_rows, np.int64)))
