"""Reads the partitions of one rank through one consumer, by manual assignment: no group membership, so nothing ever rebalances."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from confluent_kafka import KafkaError, Message

from tidemill.config.data import KafkaConfig
from tidemill.contracts.progress import ROW_BITS
from tidemill.data.intervals import NOTHING
from tidemill.data.source import SplitReader
from tidemill.data.sources.kafka_client import KIND, Bounds, KafkaClient, open_consumer, passes, topic_partition, without_secrets
from tidemill.data.sources.kafka_ends import EndWait
from tidemill.data.sources.kafka_runs import MessageRows, Partition, cover
from tidemill.data.sources.kafka_watch import KafkaWatch
from tidemill.data.split import RawBatch, Run, Split, SplitId
from tidemill.errors import DataError, DeadlineError
from tidemill.logs import event, log

_CALM_S = 1.0
"""How long after its last error a cluster has to answer before it counts as well again."""
_PAUSE_S = 2.0
"""Time without a read after which the topics may have become others: an evaluation, a frozen process."""
_TELL_EVERY_S = 60.0
"""How often to say what reading that is to end waits for."""
_SURE_S = 15.0
"""How long what the cluster said of the topics' identities holds; it is asked once a second, and may take a while to answer."""


class PartitionsReader(SplitReader):
    """Reads `partitions` until each has reached its end; those without one go on for ever.

    `client` is asked where partitions begin, and closed with the reader. `fit`: (split, offset, bounds) -> where reading can go on;
    raises if it can't. `mine`: whether a partition that appears later is read here; None: they are left alone, and the reader ends.
    `topic_ids`: topic -> the identity that it has to keep, None if unknown.
    """

    def __init__(
        self,
        config: KafkaConfig,
        rows: MessageRows,
        partitions: Sequence[Partition],
        *,
        client: KafkaClient,
        fit: Callable[[SplitId, int, Bounds], int],
        mine: Callable[[SplitId], bool] | None,
        topic_ids: Mapping[str, str | None],
    ) -> None:
        self._config = config
        self._rows = rows
        self._partitions = list(partitions)
        self._client = client
        self._fit = fit
        self._mine = mine
        self._known: dict[SplitId, Partition] = {part.split: part for part in self._partitions}
        self._fetched: set[SplitId] = set()
        self._found: list[Split] = []
        self._expired = False
        self._trouble: str | None = None
        self._trouble_at = 0.0
        self._fatal: KafkaError | None = None
        self._held: list[Message] = []
        self._waiting = EndWait(_TELL_EVERY_S)
        self._message_at = self._read_at = self._same_since = time.monotonic()
        # What expired before it could be read is covered by a run without rows, which comes first.
        self._passed = {part.split: part.offset for part in self._partitions}
        self._consumer = open_consumer(config, self._on_error)
        self._assign()
        self._watch = KafkaWatch(config, self._known, topic_ids=topic_ids, look_for_new=mine is not None)

    def read(self, timeout_s: float) -> RawBatch | None:
        self._watch.check()
        self._take_found()
        if self._mine is None and not self._fetched and not self._passed:
            raise EOFError
        messages = self._consume(timeout_s if self._fetched or self._mine else 0.0)
        if any([message.error() is not None for message in messages]):  # noqa: C419 - a list is faster than a generator here
            for message in messages:
                self._on_partition_error(message, message.error())
            messages = [message for message in messages if message.error() is None]
        if self._expired:
            # A partition that ran into expired offsets can't be moved alone. All go back to what was given, so what came with
            # the error comes again.
            self._assign()
            messages, self._passed = [], {part.split: part.offset for part in self._partitions}
        if self._fatal is not None:
            raise DataError(f"kafka {self._config.brokers}: {without_secrets(self._config.client, self._fatal.str())}")
        self._note_health(bool(messages))
        raw = self._rows.batch(messages, self._partitions) if messages else RawBatch(self._rows.none, ())
        raw = replace(raw, runs=(*raw.runs, *self._take_passed()))
        self._leave_finished()
        if self._mine is None:
            self._waiting.look(self._partitions, self._watch)
        return raw if raw.runs else None

    def _consume(self, timeout_s: float) -> list[Message]:
        """The next messages, once the topics are known to be the same still: what came after a pause may be another topic's."""
        self._heed_pause()
        if not self._held:
            self._held = self._consumer.consume(self._rows.ask_for, timeout_s)
            self._heed_pause()
        since = max(self._same_since, self._read_at - _SURE_S)
        if not self._held or not self._watch.confirms(since, timeout_s):
            return []
        messages, self._held = self._held, []
        return messages

    def _heed_pause(self) -> None:
        """Find out whether nothing was read for so long that the topics may be others."""
        now = time.monotonic()
        if now - self._read_at > _PAUSE_S:
            self._same_since = now
        self._read_at = now

    def found(self) -> list[Split]:
        found, self._found = self._found, []
        return found

    def is_caught_up(self, split: SplitId) -> bool:
        part = self._known.get(split)
        return part is None or part.is_finished or self._watch.is_at_end(split, part.reached)

    def close(self) -> None:
        self._watch.close()
        self._consumer.close()
        self._client.close()

    def _assign(self) -> None:
        self._expired = False
        unfinished = [part for part in self._partitions if not part.is_finished]
        self._consumer.assign([part.place() for part in unfinished])
        self._fetched = {part.split for part in unfinished}

    def _take_found(self) -> None:
        """Read this rank's new partitions too, from their beginnings."""
        if self._mine is None:
            return
        new: list[Partition] = []
        for split, (topic, low) in self._watch.take_found().items():
            if split not in self._known and self._mine(split):
                new.append(Partition(split, *topic_partition(split), low, low << ROW_BITS, NOTHING))
                self._found.append(topic.split(split, low, start=low))
                log.info("%s is new; reading it from offset %d", split, low)
                event("source.partition_found", split=split.name, first=low)
        if new:
            self._partitions += new
            self._known = {part.split: part for part in self._partitions}
            self._consumer.incremental_assign([part.place() for part in new])
            self._fetched |= {part.split for part in new}
            self._watch.watch(self._known)

    def _take_passed(self) -> list[Run]:
        """Runs for what holds no further message."""
        passed, self._passed = self._passed, {}
        runs: list[Run] = []
        for split, offset in passed.items():
            part = self._known[split]
            offset = offset if part.end is None else min(offset, part.end)
            if offset << ROW_BITS > part.next:
                runs.append(cover(part, offset))
        return runs

    def _leave_finished(self) -> None:
        finished = [part for part in self._partitions if part.is_finished and part.split in self._fetched]
        if finished:
            self._consumer.incremental_unassign([part.place() for part in finished])
            self._fetched -= {part.split for part in finished}

    def _on_error(self, error: KafkaError) -> None:
        """Called by the client within `consume`."""
        if passes(error):
            # What comes back may be another cluster, or an empty one that was filled again.
            self._same_since = time.monotonic()
            self._note_trouble(error.str())
        elif self._fatal is None:
            self._fatal = error

    def _on_partition_error(self, message: Message, error: KafkaError | None) -> None:
        if error is None:
            return
        split = SplitId(KIND, f"{message.topic()}:{message.partition()}")
        if error.code() == KafkaError._PARTITION_EOF:
            self._passed[split] = message.offset() or 0
        elif passes(error):
            self._note_trouble(error.str())
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            part = self._known[split]
            part.offset = self._fit(split, part.reached, self._client.bounds([split])[0])
            self._expired = True
        else:
            raise DataError(f"kafka {self._config.brokers}: {split.name}: {without_secrets(self._config.client, error.str())}")

    def _note_trouble(self, why: str) -> None:
        self._trouble_at = time.monotonic()
        if self._trouble is None:
            self._trouble = without_secrets(self._config.client, why)
            log.warning("kafka %s: %s; waiting for it to pass", self._config.brokers, self._trouble)

    def _note_health(self, got_messages: bool) -> None:
        """Say once that a trouble is over. Raises DeadlineError if the cluster hasn't been heard of for too long."""
        now = time.monotonic()
        if got_messages:
            self._message_at = now
        if self._watch.failure:
            self._note_trouble(self._watch.failure)
        if self._trouble is None:
            return
        heard_at = max(self._message_at, self._watch.answered_at)
        if heard_at > self._trouble_at + _CALM_S:
            log.info("kafka %s: it has passed", self._config.brokers)
            self._trouble = None
        elif now - heard_at > self._config.outage_timeout_s:
            waited = f"can't be reached for {now - heard_at:.0f} s"
            raise DeadlineError(f"kafka {self._config.brokers}: {waited} ({self._watch.failure or self._trouble})")
