"""Topics on the development broker, and what a run reads of them."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tidemill.config.data import KafkaConfig
from tidemill.contracts.progress import ROW_BITS
from tidemill.data.assignment import owner
from tidemill.data.intervals import IntervalSet
from tidemill.data.loader import Loader
from tidemill.data.progress import Progress, merge_states, without_replaced
from tidemill.data.sources.kafka import KafkaSource
from tidemill.data.split import SplitId
from tidemill.jobs.feed import DataFeed
from tidemill.testing.source_contract import SourceContract

COLUMNS = {"event_id": pa.string(), "event_time": pa.float64()}
DEADLINE_S = 20.0
MESSAGE = 1 << ROW_BITS
_numbers = itertools.count()


def new_topic(broker, partitions=1):
    name = f"clicks-{next(_numbers)}"
    create_topic(broker, name, partitions)
    return name


def create_topic(broker, name, partitions=1):
    admin = admin_of(broker)
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(DEADLINE_S)


def row(number):
    return {"event_id": f"e{number}", "event_time": 1000.0 + number}


def produce(broker, topic, messages, *, partition=0, first_ms=None):
    """Message i has the timestamp first_ms + 1000 * i; 1,000 s unless the broker has another first one."""
    first_ms = first_ms or getattr(broker, "first_ms", 1_000_000)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0, "linger.ms": 1})
    for number, message in enumerate(messages):
        value = message if message is None or isinstance(message, bytes) else json.dumps(message)
        producer.produce(topic, value, partition=partition, timestamp=first_ms + 1000 * number)
    assert producer.flush(DEADLINE_S) == 0


def source(broker, topic, columns=None, start_at=None, event_time_column=None, **config):
    config = {"topic": (topic,), "brokers": broker.bootstrap, "client": {"log_level": 0, "fetch.wait.max.ms": 10}, **config}
    return KafkaSource(KafkaConfig(**config), columns or COLUMNS, event_time_column=event_time_column, start_at=start_at)


class Run:
    """One rank's life: what it read, and what its checkpoints say. `saved`: what the run goes on from."""

    def __init__(
        self, source, saved=(), *, ranks=(1, 0), batch_size=4, max_wait_s=0.2, idle_timeout_s=10.0, drop_before=None, depth=4
    ):
        self.source, self.rows, self.deliveries = source, [], []
        world_size, rank = ranks

        def open_loader(assigned):
            return Loader(
                source,
                assigned,
                batch_size=batch_size,
                transform=lambda table, size: table.column("event_id").to_pylist(),
                max_wait_s=max_wait_s,
                idle_timeout_s=idle_timeout_s,
                drop_before=drop_before,
                depth=depth,
                mine=lambda split: owner(split, world_size) == rank,
            )

        splits = source.resume(saved) if saved else source.discover()
        self.feed = DataFeed(
            splits,
            open_loader,
            rank=rank,
            world_size=world_size,
            progress=Progress.from_states(without_replaced(source, splits, saved)),
            commit=source.commit,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.feed.close()
        self.source.close()

    @property
    def states(self):
        """What a checkpoint would say of this rank now."""
        return self.feed.states()

    @property
    def done(self):
        """Partition -> intervals of offsets; of rows within messages only if some are done in part."""
        return {split.name: rows.intervals for split, rows in self.feed.progress.done.items()}

    def step(self, timeout_s=0.1):
        """Train the next batch, if one comes in time; whether one did."""
        self.feed.event_time([])
        delivery = self.feed.take(timeout_s)
        if delivery is not None:
            self.rows.extend(int(key[1:]) for key in delivery.payload)
            self.deliveries.append(delivery)
            self.feed.trained(delivery.provenance)
        return delivery is not None

    def train(self, until: Callable[["Run"], bool]):
        """Train until something holds; the rows so far."""
        deadline = time.monotonic() + DEADLINE_S
        while not until(self):
            assert time.monotonic() < deadline, f"only {self.rows} came"
            self.step()
        return self.rows

    def train_all(self):
        """Train until the source ends; the rows."""
        with pytest.raises(EOFError):
            self.train(lambda run: False)
        return self.rows


def merged(runs):
    """What a checkpoint of several ranks says."""
    return merge_states(run.states for run in runs)


def count(number):
    return lambda run: len(run.rows) >= number


def split_of(topic, partition=0):
    return SplitId("kafka", f"{topic}:{partition}")


def offsets(*pairs):
    """Intervals of whole messages."""
    return tuple((start * MESSAGE, stop * MESSAGE) for start, stop in pairs)


def admin_of(broker):
    return AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})


def delete_before(broker, topic, offset):
    admin = admin_of(broker)
    [future] = admin.delete_records([TopicPartition(topic, 0, offset)]).values()
    future.result(DEADLINE_S)


def add_partitions(broker, topic, count):
    admin = admin_of(broker)
    admin.create_partitions([NewPartitions(topic, count)])[topic].result(DEADLINE_S)


def make_anew(broker, topic, partitions=1):
    admin = admin_of(broker)
    admin.delete_topics([topic])[topic].result(DEADLINE_S)
    create_topic(broker, topic, partitions)


def eventually(holds: Callable[[], bool]):
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class KafkaContract(SourceContract):
    """The contract of sources, on whatever `broker` is in the module that derives from it."""

    @pytest.fixture(autouse=True)
    def _broker(self, broker):
        self.broker, self.topic = broker, None

    def make(self, directory: Path) -> KafkaSource:
        if self.topic is None:
            self.topic = new_topic(self.broker, 3)
            for partition, sizes in enumerate(([1] * 25, [3, 1, 10, 1, 1, 2], [])):
                numbers = itertools.count(100 * partition)
                messages = [[row(next(numbers)) for _ in range(size)] for size in sizes]
                produce(self.broker, self.topic, [m[0] if len(m) == 1 else m for m in messages], partition=partition)
        return source(self.broker, self.topic, event_time_column="event_time")

    def num_rows(self) -> int:
        return 43

    def _left(self, directory, splits, assigned, progress) -> int:
        sizes = {0: [1] * 25, 1: [3, 1, 10, 1, 1, 2], 2: []}
        left = 0
        for part in assigned:
            rows = sizes[int(part.split.id.name.rpartition(":")[2])]
            at = np.array([offset * MESSAGE + k for offset, size in enumerate(rows) for k in range(size)], np.int64)
            left += int((~progress.done.get(part.split.id, IntervalSet()).holds(at)).sum())
        return left
