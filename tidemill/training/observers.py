"""What a run writes down about each step: which rows entered it, and what the model thought of them before it learned."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from tidemill.clock import Clock, SystemClock
from tidemill.data.split import Delivery, Provenance
from tidemill.features.batch import Batch


class StepLog:
    """`steps-<rank>.jsonl`: one line a step, written before the step is trained (the ledger of a proof reads it).

    `{"step": n, "at": unix seconds, "runs": [[kind, split, start, stop, rows, stride, gap], ...]}` (see `data.split.Run`). A line
    is one unbuffered write, so a killed process leaves whole lines, but for the last.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._clock = clock or SystemClock()

    def entering(self, step: int, provenance: Provenance) -> None:
        runs = [(r.split.kind, r.split.name, r.start, r.stop, r.rows, r.stride, r.gap) for r in provenance.runs]
        line = {"step": step, "at": self._clock.time(), "runs": runs}
        os.write(self._fd, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        return

    def close(self) -> None:
        os.close(self._fd)


class ScoreLog:
    """`scores-<rank>.arrows`: an Arrow IPC stream of each row's score as it was before the row was trained on.

    Columns: step (int64), score (float32), label (float32), and the batch's extras as they came. Rows are gathered and written about
    once a second; what a killed process had not written is lost, which only a later step of the same rows can replace.
    """

    FLUSH_S = 1.0

    def __init__(self, path: Path, *, label: str, output: str = "probs", clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._label = label
        self._output = output
        self._clock = clock or SystemClock()
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._rows: list[pa.RecordBatch] = []
        self._flushed_at = self._clock.monotonic()

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        batch = delivery.payload
        rows = batch.num_rows
        columns: dict[str, pa.Array] = {
            "step": pa.array(np.full(rows, step, dtype=np.int64)),
            "score": pa.array(outputs[self._output][:rows].astype(np.float32, copy=False)),
            "label": pa.array(batch.labels[self._label][:rows].numpy()),
        }
        columns.update(batch.extras)
        self._rows.append(pa.RecordBatch.from_pydict(columns))
        if self._clock.monotonic() - self._flushed_at >= self.FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what has been gathered."""
        self._flushed_at = self._clock.monotonic()
        if not self._rows:
            return
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._file, self._rows[0].schema)
        for rows in self._rows:
            self._writer.write_batch(rows)
        self._rows.clear()
        self._file.flush()

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.close()
        self._file.close()


def read_scores(path: Path) -> pa.Table | None:
    """All whole batches of a score log, also of one that a killed process left open; None if it holds none."""
    batches: list[pa.RecordBatch] = []
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            batches.extend(stream)
    except (pa.ArrowInvalid, OSError):
        # The stream ends in the middle of a batch: the process was killed while it wrote.
        pass
    return pa.Table.from_batches(batches) if batches else None
