"""A topic of the development broker, and a producer that keeps its own list of what it delivered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import orjson
import pyarrow as pa
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill.contracts.progress import ROW_BITS
from tidemill.data.click_world import World
from tidemill.data.split import SplitId
from tidemill.testing.broker import DevelopmentBroker

_TIMEOUT_S = 60.0
_NONE = np.empty(0, np.int64)


class Topic:
    """Rows of the click world with event times of the test's choosing. Messages are stamped with their newest row's event time.

    Threading: any thread may send and look.
    """

    def __init__(self, broker: DevelopmentBroker, *, partitions: int = 2, name: str = "impressions") -> None:
        self.broker = broker
        self.name = name
        self.partitions = partitions
        settings = {"bootstrap.servers": broker.bootstrap, "log_level": 0}
        admin = AdminClient(settings)
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(_TIMEOUT_S)
        self._producer = Producer({**settings, "linger.ms": 2, "acks": "all", "enable.idempotence": True})
        self._delivered: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._failed: list[str] = []
        self._table = World(7).day_table(2, 6000)
        self._next = 0

    def expected(self, boundary: float) -> dict[SplitId, np.ndarray]:
        """By split, the positions of all rows of a stream that begins at a boundary: what a clean ledger holds."""
        self.flush()
        return {
            SplitId("kafka", f"{self.name}:{partition}"): np.sort(
                np.concatenate([rows[times >= boundary] for found, rows, times in self._delivered if found == partition] or [_NONE])
            )
            for partition in range(self.partitions)
        }

    @property
    def ends(self) -> dict[str, int]:
        """By split's name, the offset behind the last message delivered."""
        self.flush()
        return {
            f"{self.name}:{partition}": sum(found == partition for found, *_ in self._delivered)
            for partition in range(self.partitions)
        }

    def flush(self) -> None:
        assert self._producer.flush(_TIMEOUT_S) == 0
        assert not self._failed

    def send(self, event_times: np.ndarray, *, partition: int | None = None) -> None:
        """One JSON message a row; over all partitions in turn unless one is named."""
        for number, (row, at) in enumerate(zip(self._rows(event_times).to_pylist(), event_times.tolist(), strict=True)):
            where = number % self.partitions if partition is None else partition
            self._produce(orjson.dumps(row), where, np.array([at]))

    def send_arrow(self, event_times: np.ndarray, rows_per_message: int, *, partition: int = 0) -> None:
        """Arrow IPC messages of several rows each."""
        table = self._rows(event_times)
        for start in range(0, table.num_rows, rows_per_message):
            part = table.slice(start, rows_per_message)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as writer:
                writer.write_table(part)
            self._produce(sink.getvalue().to_pybytes(), partition, event_times[start : start + rows_per_message])

    @contextmanager
    def feeding(self, rows_per_s: float, first_at: float, *, speed: float = 10.0, partition: int | None = None) -> Iterator[None]:
        """Send rows all the while, their event times `speed` times as fast as the clock, beginning with `first_at`."""
        stopping = threading.Event()

        def feed() -> None:
            began, sent = time.monotonic(), 0
            while not stopping.wait(0.05):
                due = int((time.monotonic() - began) * rows_per_s)
                self.send(first_at + speed / rows_per_s * np.arange(sent, due), partition=partition)
                sent = due

        thread = threading.Thread(target=feed, name="feeder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join(_TIMEOUT_S)
        self.flush()

    def _rows(self, event_times: np.ndarray) -> pa.Table:
        chosen = (self._next + np.arange(len(event_times))) % self._table.num_rows
        self._next += len(event_times)
        rows = self._table.take(pa.array(chosen))
        return rows.set_column(rows.schema.get_field_index("event_time"), "event_time", pa.array(event_times, pa.float64()))

    def _produce(self, value: bytes, partition: int, event_times: np.ndarray) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failed.append(error.str())
                return
            rows = (message.offset() << ROW_BITS) + np.arange(len(event_times))
            self._delivered.append((message.partition(), rows, event_times))

        stamp = max(0, int(event_times.max() * 1000))
        self._producer.produce(self.name, value, partition=partition, timestamp=stamp, on_delivery=delivered)
        self._producer.poll(0)
