"""A Kafka cluster's answers to questions: topics, partitions, offsets. No rows; those are the reader's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from tidemill.config.data import KafkaConfig
from tidemill.config.dump import REDACTED, is_secret
from tidemill.data.split import Split, SplitId
from tidemill.errors import ConfigError, DataError, DeadlineError

T = TypeVar("T")

KIND = "kafka"
EARLIEST, LATEST = -2, -1
"""What the protocol takes for a time: the first message that is left, and the end."""

_CALL_TIMEOUT_S = 5.0
_PARTITIONS_PER_CALL = 100
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0

# What clients make of a cluster that knows no identities: nothing, or 16 zero bytes in base 64.
_NO_TOPIC_ID = ("None", "A" * 22)

_OURS = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "auto.offset.reset": "error",
    # Its offset is the reader's position, past whatever holds no message: the one way to know that a partition was read to its end.
    "enable.partition.eof": "true",
}
_DEFAULTS = {
    "fetch.wait.max.ms": 50,
    "max.partition.fetch.bytes": 4 << 20,
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 16 << 10,
    "enable.metrics.push": False,
}
_ALLOWED = {**_OURS, "auto.offset.reset": "earliest"}
_FIELDS = {"bootstrap.servers": "brokers", "group.id": "group_id", "auto.offset.reset": "start_timestamp_ms"}
_TRANSIENT = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError._DESTROY_BROKER,
    # What the client says of a partition while it doesn't know its leader.
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
}


@dataclass(frozen=True, slots=True)
class End:
    """Before which offset reading ends (None: it doesn't), and the time that this was made of, if it was."""

    offset: int | None = None
    time_ms: int | None = None


NO_END = End()


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it. `topic_id` None: the cluster is too old to give topics an identity."""

    name: str
    partitions: tuple[int, ...]
    cluster_id: str | None
    topic_id: str | None

    def splits(self) -> list[SplitId]:
        """The partitions' ids."""
        return [SplitId(KIND, f"{self.name}:{number}") for number in self.partitions]

    def split(self, partition: SplitId, earliest: int, *, start: int, end: End = NO_END) -> Split:
        """A partition with what must not change between runs, and where its reading starts and ends."""
        fingerprint = {"cluster": self.cluster_id, "topic_id": self.topic_id, "earliest": earliest, "start": start}
        ends = {"end": end.offset, "end_ms": end.time_ms}
        return Split(partition, None, fingerprint | {key: value for key, value in ends.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offset of a partition's first message, and the one that its next message will have."""

    earliest: int
    end: int


def made_anew(what: str, was: object, found: object) -> str:
    """What there is to say of a topic that another one has taken the place of."""
    return (
        f"{what} was deleted and made anew ({was}, is {found}): the offsets that were read are another topic's. Set "
        "kafka.on_data_loss to earliest to go on at the beginning of the new one, without what wasn't read of the old; or train "
        "in a new model_dir"
    )


def topic_partition(split: SplitId) -> tuple[str, int]:
    """("clicks", 3) of "clicks:3"."""
    topic, _, partition = split.name.rpartition(":")
    return topic, int(partition)


def passes(error: KafkaError) -> bool:
    """Whether waiting can help."""
    return not error.fatal() and (error.retriable() or error.code() in _TRANSIENT)


def check_client(config: KafkaConfig) -> None:
    """Raises ConfigError naming a setting in `client` that the client doesn't know, or that is ours. Connects to nothing."""
    for key, value in config.client.items():
        if key in _FIELDS | _ALLOWED and str(value).lower() != _ALLOWED.get(key):
            instead = f"kafka.{_FIELDS[key]} says that" if key in _FIELDS else "positions are kept in checkpoints, not in the group"
            raise ConfigError(f"kafka.client: {key} can't be set here; {instead}")
    settings = consumer_settings(config)
    del settings["bootstrap.servers"]
    try:
        Consumer(settings, logger=client_log).close()
    except KafkaException as error:
        raise ConfigError(f"kafka.client: {without_secrets(config.client, error.args[0].str())}") from None


def consumer_settings(config: KafkaConfig) -> dict[str, Any]:
    """All that a consumer is made with."""
    return {
        **_DEFAULTS,
        **config.client,
        **_OURS,
        "bootstrap.servers": config.brokers,
        # The client wants one even where nothing is committed; manual assignment never joins it.
        "group.id": config.group_id or "tidemill",
    }


def open_consumer(config: KafkaConfig, on_error: Callable[[KafkaError], None]) -> Consumer:
    """A new client of the cluster. `on_error` is called for what concerns no single partition, by the thread that polls."""
    return Consumer({**consumer_settings(config), "error_cb": on_error}, logger=client_log)


def open_admin(config: KafkaConfig) -> AdminClient:
    """A new client for questions that a consumer can't ask."""
    return AdminClient({**config.client, "bootstrap.servers": config.brokers}, logger=client_log)


def open_producer(config: KafkaConfig) -> Producer:
    """A new client that writes to the cluster, each message once and in order."""
    settings = {key: value for key, value in config.client.items() if key not in _ALLOWED}
    return Producer({**settings, "bootstrap.servers": config.brokers, "enable.idempotence": True}, logger=client_log)


def without_secrets(settings: Mapping[str, object], text: str) -> str:
    """A message of the client in which no value of a secret among its settings is left."""
    for key, value in settings.items():
        if is_secret(key) and str(value):
            text = text.replace(str(value), REDACTED)
    return text


class KafkaClient:
    """Asks a cluster. Each question is asked again while its errors pass, for `patience_s`; then it raises DeadlineError, and for
    other errors DataError at once, both naming what was asked. `interrupted`: once it is set, no question is asked again (one that
    is under way takes a few seconds at most). Belongs to one thread."""

    def __init__(self, config: KafkaConfig, *, patience_s: float, interrupted: threading.Event | None = None) -> None:
        self._config = config
        self._patience_s = patience_s
        self._interrupted = interrupted or threading.Event()
        self._timeout_s = min(_CALL_TIMEOUT_S, config.connect_timeout_s)
        self._opened: Consumer | None = None
        self._opened_admin: AdminClient | None = None

    def topic(self, name: str) -> Topic:
        """A topic's partitions. Raises DataError too for a topic that isn't there."""
        metadata = self._patiently(partial(self._consumer().list_topics, name, self._timeout_s), f"topic {name!r}")
        found = metadata.topics[name]
        if found.error is not None or not found.partitions:
            raise DataError(f"kafka {self._config.brokers}: topic {name!r}: {found.error or 'it has no partitions'}")
        return Topic(name, tuple(sorted(found.partitions)), metadata.cluster_id, self.topic_ids([name])[name])

    def topic_ids(self, names: Sequence[str]) -> dict[str, str | None]:
        """The topics' identities (KIP-516); None where the cluster gives none, or doesn't let us ask. Raises DataError too for a
        topic that isn't there."""

        def ask() -> dict[str, str | None]:
            admin = self._admin()
            try:
                answers = admin.describe_topics(TopicCollection(list(names)), request_timeout=self._timeout_s)
                return {name: _topic_id(answer, self._timeout_s) for name, answer in answers.items()}
            finally:
                # What the client logs waits for this.
                admin.poll(0)

        return self._patiently(ask, f"the identity of {', '.join(map(repr, names))}")

    def offsets(self, splits: Sequence[SplitId], time_ms: int) -> list[int | None]:
        """For each split the offset of its first message at or after a broker time; None where there is none.

        EARLIEST and LATEST as times: the first that is left, and the one that the next message will have.
        """

        def ask() -> list[int | None]:
            offsets: list[int | None] = []
            for answer in self.ask_offsets(splits, time_ms):
                if isinstance(answer, KafkaError):
                    raise KafkaException(answer)
                offsets.append(answer)
            return offsets

        names = ", ".join(split.name for split in splits[:3]) + (", ..." if len(splits) > 3 else "")
        return self._patiently(ask, f"offsets of {names}")

    def ask_offsets(self, splits: Sequence[SplitId], time_ms: int) -> list[int | KafkaError | None]:
        """`offsets`, asked once, with the errors of single partitions in their places. Raises KafkaException."""
        answers: list[int | KafkaError | None] = []
        for first in range(0, len(splits), _PARTITIONS_PER_CALL):
            some = splits[first : first + _PARTITIONS_PER_CALL]
            asked = [TopicPartition(*topic_partition(split), time_ms) for split in some]
            found = self._consumer().offsets_for_times(asked, timeout=self._timeout_s)
            answers += [part.error or (None if part.offset == OFFSET_END else part.offset) for part in found]
        return answers

    def bounds(self, splits: Sequence[SplitId]) -> list[Bounds]:
        """Where each partition begins and ends."""
        lows, highs = self.offsets(splits, EARLIEST), self.offsets(splits, LATEST)
        return [Bounds(low or 0, high or 0) for low, high in zip(lows, highs, strict=True)]

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = self._opened_admin = None

    def _patiently(self, call: Callable[[], T], what: str) -> T:
        until = time.monotonic() + self._patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                where, why = f"kafka {self._config.brokers}: {what}", without_secrets(self._config.client, error.str())
                if not passes(error):
                    raise DataError(f"{where}: {why}") from None
                if time.monotonic() + pause > until:
                    raise DeadlineError(f"{where}: no answer within {self._patience_s:g} s ({why})") from None
                if self._interrupted.wait(pause):
                    raise DeadlineError(f"{where}: given up, since the run ends ({why})") from None
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _consumer(self) -> Consumer:
        if self._opened is None:
            self._opened = open_consumer(self._config, lambda error: None)
        return self._opened

    def _admin(self) -> AdminClient:
        if self._opened_admin is None:
            self._opened_admin = open_admin(self._config)
        return self._opened_admin


def _topic_id(answer: Future[Any], timeout_s: float) -> str | None:
    """None too where we may not ask. Raises KafkaException for what may pass, and for a topic that isn't there."""
    try:
        topic_id = str(answer.result(timeout_s).topic_id)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
    except KafkaException as exception:
        error: KafkaError = exception.args[0]
        if passes(error) or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise
        return None
    return None if topic_id in _NO_TOPIC_ID else topic_id


class _StateChanges(logging.Filter):
    """Leaves out what the client says at each attempt to connect: the reader tells once that a cluster is away, or back."""

    _REPEATED = frozenset({"FAIL", "ERROR", "BGQUEUE", "CONFWARN", "MAXPOLL", "TERMINATE", "DESTROY", "SESSTMOUT"})

    def filter(self, record: logging.LogRecord) -> bool:
        facility = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return facility not in self._REPEATED


client_log = logging.getLogger("tidemill.kafka")
"""What every client of a cluster logs to."""
client_log.addFilter(_StateChanges())
