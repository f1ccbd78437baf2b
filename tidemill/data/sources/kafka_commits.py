"""Shows a consumer group's dashboards how far the last committed checkpoint has come. Nothing reads it back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tidemill.config.data import KafkaConfig
from tidemill.contracts.progress import ROW_BITS
from tidemill.data.intervals import IntervalSet
from tidemill.data.sources.kafka_client import KIND, open_admin, topic_partition, without_secrets
from tidemill.data.split import SplitId
from tidemill.logs import log

_TIMEOUT_S = 10.0


class GroupCommits:
    """Commits offsets by requests that nobody waits for; one that fails is only logged, and made good by the next.

    Belongs to one thread.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin: AdminClient | None = None
        self._under_way: Future[Any] | None = None
        self._failing = False
        self._skipped: list[TopicPartition] = []

    def commit(self, done: Mapping[SplitId, IntervalSet]) -> None:
        """Of each partition that was read, the first offset that isn't wholly done. Never waits; skipped while one is under way."""
        offsets = [
            TopicPartition(*topic_partition(split), rows.first_gap(rows.intervals[0][0]) >> ROW_BITS)
            for split, rows in done.items()
            if split.kind == KIND and rows
        ]
        if not offsets:
            return
        if self._under_way is not None and not self._under_way.done():
            self._skipped = offsets
            return
        self._send(offsets)

    def _send(self, offsets: list[TopicPartition]) -> Future[Any]:
        self._skipped = []
        if self._admin is None:
            self._admin = open_admin(self._config)
        group = self._config.group_id
        asked = self._admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, offsets)], request_timeout=_TIMEOUT_S)
        self._under_way = asked[group]
        self._under_way.add_done_callback(self._note)
        # What the client logs waits for this.
        self._admin.poll(0)
        return self._under_way

    def close(self, *, deadline_s: float) -> None:
        """Wait for the last commit, for so long at most; one that was skipped, while another was under way, is made then."""
        until = time.monotonic() + deadline_s
        # What fails is told by `_note`.
        with suppress(KafkaException, TimeoutError):
            if self._under_way is not None:
                self._under_way.result(deadline_s)
            if self._skipped:
                self._send(self._skipped).result(max(0.0, until - time.monotonic()))
        self._admin = None

    def _note(self, answer: Future[Any]) -> None:
        """Called by a thread of the client."""
        error = answer.exception()
        if error is None:
            errors = [part.error for part in answer.result().topic_partitions if part.error is not None]
            error = KafkaException(errors[0]) if errors else None
        if error is not None and not self._failing:
            why = without_secrets(self._config.client, str(error))
            log.warning("kafka %s: offsets of group %s weren't committed: %s", self._config.brokers, self._config.group_id, why)
        self._failing = error is not None
