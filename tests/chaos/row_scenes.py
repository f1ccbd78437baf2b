"""Where the rows of a story come from: each kind of source, the ids that it holds, and what may happen to it."""

from __future__ import annotations

import gzip
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.maxcompute import MaxComputeEmulator

_TIMEOUT_S = 60.0


class Scene(ABC):
    """One source of one story. `bounded`: whether it ends by itself. Ids are numbered from 0 over all of it."""

    bounded = True

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        self.rng = rng
        self.folder = folder
        self.num_ids = 0
        folder.mkdir(parents=True)

    @property
    @abstractmethod
    def source(self) -> dict[str, Any]:
        """What a `TrainerSpec` says of it."""

    environment: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While the block runs, rows keep coming (if the source is a stream)."""
        yield

    def disturb(self) -> str:
        """Something happens to the source that costs no row; what."""
        return ""

    def close(self) -> None:
        return

    def take_ids(self, count: int) -> np.ndarray:
        """The next ids."""
        self.num_ids += count
        return np.arange(self.num_ids - count, self.num_ids, dtype=np.int64)

    def sizes(self) -> list[int]:
        """Rows of several parts: empty, tiny and large ones."""
        count = int(self.rng.integers(2, 8))
        return [*self.rng.choice([0, 1, 7, 900, 3000, 9000], size=count).tolist(), 12000]


class ParquetScene(Scene):
    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        super().__init__(rng, folder)
        for number, size in enumerate(self.sizes()):
            rows = pa.table({"id": self.take_ids(size)})
            pq.write_table(rows, folder / f"part-{number:03d}.parquet", row_group_size=int(rng.choice([50, 1000])))

    @property
    def source(self) -> dict[str, Any]:
        return {"kind": "parquet", "paths": f"{self.folder}/*.parquet"}


class CsvScene(Scene):
    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        super().__init__(rng, folder)
        for number, size in enumerate(self.sizes()):
            text = "".join(["id,note\n", *(f'{one},"a\n""{one}"""\n' for one in self.take_ids(size))]).encode()
            if rng.random() < 0.5:
                (folder / f"part-{number:03d}.csv").write_bytes(text)
            else:
                (folder / f"part-{number:03d}.csv.gz").write_bytes(gzip.compress(text))

    @property
    def source(self) -> dict[str, Any]:
        return {"kind": "csv", "paths": f"{self.folder}/*", "with_header": True}


class MaxComputeScene(Scene):
    """A table of several partitions, each with a session of its own or one over all."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        super().__init__(rng, folder)
        self._emulator = MaxComputeEmulator(folder / "maxcompute")
        sizes = self.sizes()
        self._days = [f"ds=202403{number:02d}" for number in range(1, len(sizes) + 1)]
        rng.shuffle(self._days)
        rows = {day: pa.table({"id": self.take_ids(size)}) for day, size in zip(self._days, sizes, strict=True)}
        self._emulator.add_table("shop", "clicks", partitions=rows)
        self._by_partition = bool(rng.random() < 0.6)
        configuration = folder / "odps.ini"
        configuration.write_text(f"access_id=a\naccess_key=b\nend_point={self._emulator.endpoint}\n")
        self.environment = {"ODPS_CONFIG_FILE_PATH": str(configuration)}

    @property
    def source(self) -> dict[str, Any]:
        return {
            "kind": "maxcompute",
            "paths": [f"odps://shop/tables/clicks/{'&'.join(self._days)}"],
            "is_orderby_partition": self._by_partition,
        }

    def disturb(self) -> str:
        faults, times = self._emulator.faults, int(self.rng.integers(1, 4))
        fault = self.rng.choice(["unavailable", "dropped", "cut", "ended early"])
        if fault == "unavailable":
            faults.refuse("read_rows", times)
        elif fault == "dropped":
            faults.drop("read_rows", times)
        elif fault == "cut":
            faults.cut(int(self.rng.integers(0, 4000)), times)
        else:
            faults.end_early(int(self.rng.integers(0, 2)), times)
        return str(fault)

    def close(self) -> None:
        self._emulator.close()


class KafkaScene(Scene):
    """A topic to which messages of one or several rows are produced all the while."""

    bounded = False

    def __init__(self, rng: np.random.Generator, folder: Path, broker: DevelopmentBroker) -> None:
        super().__init__(rng, folder)
        self._broker = broker
        self._topic = f"rows-{folder.parent.name}"
        self._partitions = int(rng.integers(1, 6))
        self._format = str(rng.choice(["json", "arrow"]))
        settings = {"bootstrap.servers": broker.bootstrap, "log_level": 0}
        admin = AdminClient(settings)
        admin.create_topics([NewTopic(self._topic, self._partitions, 1)])[self._topic].result(_TIMEOUT_S)
        self._producer = Producer({**settings, "linger.ms": 2, "acks": "all", "enable.idempotence": True})
        self._failed: list[str] = []

    @property
    def source(self) -> dict[str, Any]:
        return {
            "kind": "kafka",
            "brokers": self._broker.bootstrap,
            "topic": [self._topic],
            "message_format": self._format,
            "max_wait_s": 0.05,
            "idle_timeout_s": 2.0,
        }

    @contextmanager
    def going_on(self) -> Iterator[None]:
        with _repeating(self._produce, pause_s=0.02):
            yield
        assert self._producer.flush(_TIMEOUT_S) == 0
        assert not self._failed, self._failed

    def disturb(self) -> str:
        self._broker.kill()
        threading.Event().wait(float(self.rng.uniform(0.0, 1.5)))
        self._broker.start()
        return "broker killed"

    def _produce(self) -> None:
        for _ in range(int(self.rng.integers(1, 10))):
            ids = self.take_ids(int(self.rng.choice([1, 1, 3, 40])))
            self._producer.produce(
                self._topic, self._encoded(ids), partition=int(self.rng.integers(self._partitions)), on_delivery=self._delivered
            )
        self._producer.poll(0)

    def _encoded(self, ids: np.ndarray) -> bytes:
        if self._format == "json":
            rows = [{"id": one} for one in ids.tolist()]
            return orjson.dumps(rows[0] if len(rows) == 1 else rows)
        sink = pa.BufferOutputStream()
        table = pa.table({"id": ids})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=16)
        return sink.getvalue().to_pybytes()

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed.append(str(error))


class FolderScene(Scene):
    """Files that appear one after the other."""

    bounded = False

    @property
    def source(self) -> dict[str, Any]:
        return {"kind": "folder", "path": str(self.folder)}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        with _repeating(self._add, pause_s=0.15):
            yield

    def _add(self) -> None:
        ids = self.take_ids(int(self.rng.choice([1, 20, 150])))
        name = f"rows-{ids[0]:09d}.parquet"
        pq.write_table(pa.table({"id": ids}), self.folder / f".{name}")
        (self.folder / f".{name}").rename(self.folder / name)


@contextmanager
def _repeating(act: Callable[[], None], *, pause_s: float) -> Iterator[None]:
    """Call `act` on a thread of its own until the block ends; what it raised is raised then."""
    stopping = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not stopping.wait(pause_s):
                act()
        except BaseException as error:  # noqa: BLE001 - the worker edge: raised when the block ends
            errors.append(error)

    thread = threading.Thread(target=run, name="rows", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_TIMEOUT_S)
    if errors:
        raise errors[0]
