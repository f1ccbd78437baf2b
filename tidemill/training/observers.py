"""What a run writes down about each step: which rows entered it, and what the model thought of them before it learned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pyarrow as pa

from tidemill.clock import Clock, SystemClock
from tidemill.data.split import Delivery, Provenance
from tidemill.errors import StorageError

if TYPE_CHECKING:
    from tidemill.features.batch import Batch


class LateRows:
    """Counts this rank's rows that came too late: their event time lay below the watermark that all ranks had agreed on before."""

    def __init__(self, published: Callable[[], float | None]) -> None:
        self._published = published
        self.count = 0

    def entering(self, step: int, provenance: Provenance) -> None:
        watermark = self._published()
        if watermark is not None and provenance.event_time is not None:
            # A row without an event time is NaN, which is below nothing.
            self.count += int(np.count_nonzero(provenance.event_time < watermark))

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        return


class StepLog:
    """`steps-<rank>.jsonl`: one line a step, written before the step is trained (the ledger of a proof reads it).

    `{"step": n, "at": unix seconds, "runs": [[kind, split, start, stop, rows, stride, gap], ...]}` (see `data.split.Run`; shuffled
    rows in the order of their positions). A line is one unbuffered write, so a killed process leaves whole lines, but for the last.
    """

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._clock = clock or SystemClock()

    def entering(self, step: int, provenance: Provenance) -> None:
        data = step_line(step, self._clock.time(), provenance)
        with _writing(self._path):
            written = os.write(self._fd, data)
        if written != len(data):
            # A second write for the rest could leave a line in two pieces, with another's between them.
            raise StorageError(f"{self._path}: only {written} of {len(data)} bytes of step {step} were written; is the disk full?")

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        return

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def step_line(step: int, at: float, provenance: Provenance) -> bytes:
    """A line of a step log."""
    runs = [(r.split.kind, r.split.name, r.start, r.stop, r.rows, r.stride, r.gap) for r in provenance.runs]
    for rows in provenance.scattered:
        spans = zip(*(edges.tolist() for edges in rows.spans()), strict=True)
        runs += [(rows.split.kind, rows.split.name, start, stop, stop - start, 1, 0) for start, stop in spans]
    return orjson.dumps({"step": step, "at": at, "runs": runs}, option=orjson.OPT_APPEND_NEWLINE)


class ScoreLog:
    """`scores-<rank>.arrows`: an Arrow IPC stream of each row's score as it was before the row was trained on.

    Columns: step (int64), score (float32), label (float32), and the batch's extras, with the types that they had first. Rows are
    gathered, and written when a batch comes a second after the last write; what a killed process had not written is lost, which
    only a later step of the same rows can replace.
    """

    FLUSH_S = 1.0

    def __init__(self, path: Path, *, label: str, output: str = "probs", clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("wb")
        self._label = label
        self._output = output
        self._clock = clock or SystemClock()
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._schema: pa.Schema | None = None
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
        with _writing(self._path):
            if self._writer is None:
                self._schema = self._rows[0].schema
                self._writer = pa.ipc.new_stream(self._file, self._schema)
            for rows in self._rows:
                # A column without a value in one batch, say, has another type there, and a stream has one schema.
                self._writer.write_batch(rows if rows.schema.equals(self._schema) else rows.cast(self._schema))
            self._rows.clear()
            self._file.flush()

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.close()
        self._file.close()


def read_scores(path: Path) -> pa.Table | None:
    """All whole batches of a score log, also of one that a killed process left open; None if it holds none, or isn't there."""
    if not path.exists():
        return None
    batches: list[pa.RecordBatch] = []
    # A killed process leaves a stream that ends in the middle of a batch.
    with path.open("rb") as file, suppress(pa.ArrowInvalid, OSError):
        batches.extend(pa.ipc.open_stream(file))
    return pa.Table.from_batches(batches) if batches else None
