"""Dead letters into a Kafka topic."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message

from tidemill.config.data import KafkaConfig
from tidemill.data.dead_letters import DeadLetter, DeadLetterSink, row_json
from tidemill.data.sources.kafka_client import open_producer, without_secrets
from tidemill.errors import ConfigError, DeadlineError, TidemillError

_POLL_S = 0.1


class DeadLetterTopic(DeadLetterSink):
    """A message as it came, or a row as JSON, with headers that say where it was and why it couldn't be used. The key names it, so
    that one that comes again after a crash can be told. `keep` returns when the brokers have all of them; an outage is waited for
    as long as the config says, or until `close`.

    Raises ConfigError if there is no such topic, DeadlineError if no broker answers.
    """

    def __init__(self, config: KafkaConfig, topic: str) -> None:
        self.where = f"topic {topic}"
        self._config = config
        self._topic = topic
        self._closed = threading.Event()
        self._producer = open_producer(config)
        self._require_topic()

    def keep(self, letters: Sequence[DeadLetter]) -> None:
        failures: list[str] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(error.str())

        try:
            for letter in letters:
                value = letter.payload if letter.values is None else row_json(letter.values)
                key = ":".join("" if part is None else str(part) for part in letter.place.values())
                self._producer.produce(self._topic, value, key, headers=_headers(letter), on_delivery=delivered)
            self._flush()
        except (KafkaException, BufferError) as error:
            failures.append(str(error))
        if failures:
            raise self._failed(DeadlineError, failures[0])

    def close(self) -> None:
        self._closed.set()

    def _flush(self) -> None:
        until = time.monotonic() + self._config.outage_timeout_s
        while self._producer.flush(_POLL_S):
            if self._closed.is_set() or time.monotonic() > until:
                self._producer.purge()
                why = "the run ends" if self._closed.is_set() else f"no answer within {self._config.outage_timeout_s:g} s"
                raise self._failed(DeadlineError, why)

    def _require_topic(self) -> None:
        try:
            found = self._producer.list_topics(self._topic, self._config.connect_timeout_s).topics[self._topic]
        except KafkaException as error:
            raise self._failed(DeadlineError, str(error)) from None
        if found.error is not None:
            raise self._failed(ConfigError, f"{found.error}; create it, or keep them in a file")

    def _failed(self, kind: type[TidemillError], why: str) -> TidemillError:
        where = f"kafka {self._config.brokers}: dead letters can't be kept in topic {self._topic!r} (kafka.dead_letter.topic)"
        return kind(f"{where}: {without_secrets(self._config.client, why)}")


def _headers(letter: DeadLetter) -> list[tuple[str, str | bytes | None]]:
    said = {**letter.place, "reason": letter.reason, "column": letter.column}
    return [(name, str(value)) for name, value in said.items() if value is not None]
