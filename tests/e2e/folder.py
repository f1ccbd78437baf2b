"""A folder that a stream reads, and a writer of files that keeps its own list of what it wrote."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.stream import StreamSettings
from tidemill.checkpoint.discovery import read_checkpoint, read_dataloader_state
from tidemill.contracts.progress import FILE_ROW_BITS
from tidemill.data.click_world import World
from tidemill.data.split import SplitId
from tidemill.storage.open import open_storage

NUM_SPLITS = 3


class DropFolder:
    """In a stream's place for a topic. Files appear in order of their names, but for every seventh, which appears late."""

    def __init__(self, folder: Path, lineage: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.name = str(folder)
        self.broker = SimpleNamespace(bootstrap="")
        self._lineage = lineage
        self._written: dict[str, np.ndarray] = {}
        self._table = World(7).day_table(2, 6000)
        self._next = 0

    @property
    def times(self) -> np.ndarray:
        """The event times of all rows written."""
        return np.concatenate(list(self._written.values()))

    def send(self, name: str, event_times: np.ndarray) -> None:
        """One file."""
        rows = self._table.take(pa.array((self._next + np.arange(len(event_times))) % self._table.num_rows))
        self._next += len(event_times)
        place = rows.schema.get_field_index("event_time")
        pq.write_table(rows.set_column(place, "event_time", pa.array(event_times, pa.float64())), self.folder / "_writing")
        (self.folder / "_writing").rename(self.folder / name)
        self._written[name] = event_times

    @contextmanager
    def feeding(self, rows_per_file: int, first_at: float) -> Iterator[None]:
        """Write a file every tenth of a second."""
        stopping = threading.Event()

        def feed() -> None:
            number, late = len(self._written), []
            while not stopping.is_set():
                file = (f"{number:05}.parquet", first_at + np.arange(number, number + 1, 1 / rows_per_file))
                late.append(file) if number % 7 == 3 else self.send(*file)
                if number % 7 == 5 and late:
                    self.send(*late.pop())
                number += 1
                time.sleep(0.1)
            for file in late:
                self.send(*file)

        thread = threading.Thread(target=feed, name="feeder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(60.0)

    def expected(self, boundary: float) -> dict[SplitId, np.ndarray]:
        """By split, the positions of all rows of a stream that begins at a boundary, by the numbers that the newest checkpoint says
        its files have."""
        storage = open_storage(self._lineage)
        states = read_dataloader_state(storage, read_checkpoint(storage)[1]).splits
        numbers = {name: (state, number) for state in states for name, (number, _) in state.fingerprint.get("files", {}).items()}
        assert numbers.keys() == self._written.keys()
        positions: dict[SplitId, list[np.ndarray]] = {}
        for name, times in self._written.items():
            state, number = numbers[name]
            rows = (number << FILE_ROW_BITS) + np.flatnonzero(times >= boundary)
            positions.setdefault(SplitId(state.kind, state.split), []).append(rows)
        return {split: np.sort(np.concatenate(rows)) for split, rows in positions.items()}


@dataclass(frozen=True, slots=True)
class FolderSettings(StreamSettings):
    """A stream from a folder."""

    def edits(self, topic: DropFolder, checkpoint: Path) -> dict[str, object]:
        edits = StreamSettings.edits(self, topic, checkpoint)
        del edits["data_config.kafka"]
        folder = {"poll_s": 0.05, "num_splits": NUM_SPLITS, "max_wait_s": self.max_wait_s, "idle_timeout_s": self.idle_timeout_s}
        return {
            **edits,
            "train_input_path": topic.name,
            "data_config.dataset_type": "FolderDataset",
            "data_config.folder": folder,
        }
