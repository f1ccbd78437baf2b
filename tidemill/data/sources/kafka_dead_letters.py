"""Dead letters into a Kafka topic."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tidemill.config.data import KafkaConfig
from tidemill.data.dead_letters import DeadLetter, DeadLetterSink, row_json
from tidemill.data.sources.kafka_client import open_producer, without_secrets
from tidemill.errors import DeadlineError

_KEEP_DEADLINE_S = 60.0
_POLL_S = 0.1


class DeadLetterTopic(DeadLetterSink):
    """A message as it came, or a row as JSON, with headers that say where it was and why it couldn't be used. The key names it, so
    that one that comes again after a crash can be told. `keep` returns when the brokers have all of them."""

    def __init__(self, config: KafkaConfig, topic: str) -> None:
        self.where = f"topic {topic}"
        self._config = config
        self._topic = topic
        self._producer: Producer | None = None

    def keep(self, letters: Sequence[DeadLetter]) -> None:
        if self._producer is None:
            self._producer = open_producer(self._config)
        failures: list[str] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failures.append(error.str())

        try:
            for letter in letters:
                value = letter.payload if letter.values is None else row_json(letter.values)
                key = ":".join("" if part is None else str(part) for part in letter.place.values())
                self._producer.produce(self._topic, value, key, headers=_headers(letter), on_delivery=delivered)
            left = self._flush(self._producer)
        except (KafkaException, BufferError) as error:
            failures.append(str(error))
            left = 0
        if failures or left:
            why = without_secrets(self._config, failures[0]) if failures else f"no answer within {_KEEP_DEADLINE_S:g} s"
            raise DeadlineError(f"kafka {self._config.brokers}: dead letters can't be kept in topic {self._topic!r}: {why}")

    def _flush(self, producer: Producer) -> int:
        until = time.monotonic() + _KEEP_DEADLINE_S
        left = len(producer)
        while left and time.monotonic() < until:
            left = producer.flush(_POLL_S)
        return left


def _headers(letter: DeadLetter) -> list[tuple[str, str | bytes | None]]:
    said = {**letter.place, "reason": letter.reason, "column": letter.column}
    return [(name, str(value)) for name, value in said.items() if value is not None]
