"""A stream's publication: touched rows, cursor, publisher, and the gate that scores each candidate as a server would."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from tidemill.features.batch import Batch
from tidemill.jobs.learner import Learner
from tidemill.jobs.restore import Restored
from tidemill.jobs.run import Run
from tidemill.jobs.start import from_rank_zero
from tidemill.lineage.records import snapshot_digest
from tidemill.publish.cut import Cutter
from tidemill.publish.gate import Candidate, Gate
from tidemill.publish.publisher import Publisher, PublishSettings
from tidemill.publish.recovery import PublishCursor, absorb, open_releases
from tidemill.publish.tracker import TouchedRows
from tidemill.serving.generation import Change, Generation, next_generation
from tidemill.serving.loader import LineageFolder, load_generation, read_changes, read_probes
from tidemill.serving.predictor import Predictor
from tidemill.storage.base import Storage


class CandidateScores:
    """Scores the snapshot's probe rows with a candidate on top of all releases so far (`publish.gate.Score`); one thread.

    The releases are read by the first call, on the publisher's thread: a long lineage's take longer than other ranks would wait.
    """

    def __init__(self, storage: Storage) -> None:
        self._folder = LineageFolder(storage, "")
        self._generation: Generation | None = None
        self._last: Generation | None = None

    def __call__(self, candidate: Candidate) -> Mapping[str, np.ndarray]:
        base = self._base(candidate.term, candidate.sequence)
        change = Change(
            term=candidate.term,
            sequence=candidate.sequence,
            step=candidate.step,
            watermark=candidate.watermark,
            segments=[dict(arrays) for arrays in candidate.segments],
            dense=None if candidate.dense is None else dict(candidate.dense),
            stages=None,
        )
        self._last = next_generation(base, [change])
        probes = self._last.model.probes
        return {} if probes is None else Predictor(self._last).score_table(probes)

    def _base(self, term: int, sequence: int) -> Generation:
        """The newest release before `sequence`: the last candidate, if it was committed, without reading it again."""
        last, up_to = self._last, (term, sequence - 1)
        if self._generation is None:
            self._generation = load_generation(self._folder.storage, "", up_to=up_to)
        elif last is not None and last.sequence + 1 == sequence:
            self._generation = last
        elif self._generation.sequence + 1 != sequence:
            news = read_changes(self._folder, self._generation, up_to=up_to)
            if news.error is not None:
                raise news.error
            self._generation = next_generation(self._generation, news.changes)
        return self._generation


class Probes:
    """The snapshot's probe rows, scored by the trainer. Collective: every rank scores as many batches of the same size."""

    def __init__(self, run: Run, learner: Learner) -> None:
        snapshot = run.start.snapshot
        table = read_probes(LineageFolder(run.storage, ""), snapshot) if snapshot else None
        self._scores = learner.served_scores(run.config.export_config.use_dense_ema)
        padding = learner.step.padding()
        self._batches: list[Batch] = []
        if table is None:
            return
        for at in range(0, table.num_rows, padding.size):
            rows = table.slice(at, padding.size)
            batch = learner.features.transform(rows, size=padding.size, with_labels=False) if run.rank == 0 else padding
            self._batches.append(batch)

    def scores(self) -> dict[str, np.ndarray] | None:
        """By output; None without probe rows, and meaningless above rank 0."""
        if not self._batches:
            return None
        parts = [self._scores(batch) for batch in self._batches]
        return {output: np.concatenate([part[output] for part in parts]) for output in parts[0]}


class Publication:
    """What a publishing run adds to a training run. Construct it after the weights are restored, before training. Collective."""

    def __init__(self, run: Run, learner: Learner, restored: Restored, touched: TouchedRows) -> None:
        storage, writer, model = run.storage, run.start.writer, learner.model
        shards = model.local_shards()
        rank = run.rank
        self.touched = touched
        self.cursor = PublishCursor(snapshot_digest(storage))
        restored.load("touched", self.touched)
        restored.load("cursor", self.cursor)
        opened = int(from_rank_zero(run.agreement, rank, lambda: open_releases(storage, writer)))
        deletes = absorb(storage, self.touched, learner.tables, after=self.cursor.sequence, up_to=opened)
        served = partial(learner.served_dense, run.config.export_config.use_dense_ema)
        cutter = Cutter(shards, self.touched, served if rank == 0 else None, deletes if rank == 0 else {})
        gate = Gate(CandidateScores(storage)) if rank == 0 else Gate()
        self.publisher = Publisher(
            storage,
            writer,
            cutter,
            self.cursor,
            sequence=opened,
            settings=PublishSettings(gate=gate, part_timeout_s=run.config.train_config.publish.part_timeout_s),
        )
