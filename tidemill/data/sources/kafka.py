"""Rows from Kafka topics: one split a partition. Positions and runs: see `kafka_runs`.

Where a partition without progress starts, and where a backfill ends, is decided when it is first discovered and kept in its
fingerprint, so that a run that goes on doesn't decide otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidemill.config.data import KafkaConfig
from tidemill.contracts.progress import ROW_BITS, SplitState
from tidemill.data.assignment import Assigned
from tidemill.data.dead_letters import DeadLetters
from tidemill.data.intervals import IntervalSet
from tidemill.data.messages.decoder import Columns, Decoder
from tidemill.data.messages.make import make_decoder
from tidemill.data.source import Source, SplitReader
from tidemill.data.sources.kafka_client import (
    EARLIEST,
    KIND,
    LATEST,
    Bounds,
    End,
    KafkaClient,
    Topic,
    check_client,
    made_anew,
    topic_partition,
)
from tidemill.data.sources.kafka_commits import GroupCommits
from tidemill.data.sources.kafka_reader import PartitionsReader
from tidemill.data.sources.kafka_runs import MessageRows, Partition
from tidemill.data.split import Split, SplitId
from tidemill.errors import ConfigError, SourceChangedError
from tidemill.logs import event, log

_COMMIT_DEADLINE_S = 5.0


class KafkaSource(Source):
    """Partitions of topics. `columns`: name and type of what to read (for JSON necessary, types too; the event time's column has
    to be among them). `event_time_column`: a timestamp, or a number of Unix seconds; None: the messages' timestamps are meant.
    `start_at`: where partitions without progress start, at the first message that the broker has had since then (Unix seconds);
    None: at their earliest. The config's start_timestamp_ms goes before it. `dead_letters`: takes messages that can't be read;
    None: they are counted against the config's budget and reported. A config with ends makes a source whose readers end.
    """

    kind = KIND
    bounded = False
    Config = KafkaConfig

    def __init__(
        self,
        config: KafkaConfig,
        columns: Columns | None = None,
        *,
        event_time_column: str | None = None,
        start_at: float | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        _check(config, columns, event_time_column)
        self.config = config
        self.event_time_column = event_time_column
        self._start_at = start_at
        self._dead_letters = dead_letters or DeadLetters(max_poison=config.max_poison, window=config.poison_window)
        self._columns = columns
        self._interrupted = threading.Event()
        self._client = self._new_client()
        self._commits = GroupCommits(config)

    @property
    def is_backfill(self) -> bool:
        """Whether reading ends."""
        return self.config.end_timestamp_ms is not None or bool(self.config.end_offsets)

    def discover(self) -> list[Split]:
        """All partitions. Raises DataError for a topic that can't be read, DeadlineError if no broker answers."""
        return [split for name in self.config.topic for split in self._splits(self._client.topic(name))]

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        return self.open_all([Assigned(split, remaining, done)])

    def open_all(self, assigned: Sequence[Assigned], mine: Callable[[SplitId], bool] | None = None) -> SplitReader:
        """One consumer of all the rank's partitions. Raises SourceChangedError naming a partition whose progress doesn't fit it."""
        topic_ids: dict[str, str | None] = dict.fromkeys(self.config.topic)
        topic_ids |= {topic_partition(part.split.id)[0]: part.split.fingerprint.get("topic_id") for part in assigned}
        # A client of its own, since readers may be opened by any thread.
        client = self._new_client()
        try:
            return PartitionsReader(
                self.config,
                MessageRows(self.config, self.decoder(), self.event_time_column, self._dead_letters),
                self._partitions(client, assigned),
                client=client,
                fit=self._fit,
                mine=None if self.is_backfill else mine or (lambda split: False),
                topic_ids=topic_ids,
            )
        except BaseException:
            client.close()
            raise

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        was, found = fingerprint.get("cluster"), split.fingerprint.get("cluster")
        if was is not None and found is not None and was != found:
            raise SourceChangedError(f"{split.id}: cluster was {was}, is {found}: this is another topic; its positions don't fit")
        why = _why_anew(fingerprint, split.fingerprint)
        if why is not None:
            raise SourceChangedError(made_anew(str(split.id), *why))

    def replaced(self, splits: Sequence[Split], states: Mapping[SplitId, SplitState]) -> set[SplitId]:
        """All partitions of topics that were made anew, if the config says to go on without what is lost."""
        if self.config.on_data_loss == "fail":
            return set()
        now = {split.id: split.fingerprint for split in splits}
        anew = {
            topic_partition(split)[0]
            for split, state in states.items()
            if split in now and _why_anew(state.fingerprint, now[split]) is not None
        }
        return {split for split in states if split.kind == KIND and topic_partition(split)[0] in anew}

    def resumed(self, splits: Sequence[Split], states: Mapping[SplitId, SplitState]) -> list[Split]:
        """Known partitions start where they would have; partitions added to a known topic since start at their beginning, and so
        do those of a topic that was made anew."""
        known_topics = {topic_partition(split)[0] for split in states if split.kind == KIND}
        replaced = self.replaced(splits, states)
        for anew in sorted(replaced):
            log.warning("%s: its topic was deleted and made anew; what wasn't read of it is lost, going on with the new one", anew)
            event("source.topic_replaced", split=anew.name, read=_end_of(states[anew]))
        found: list[Split] = []
        for split in splits:
            kept: dict[str, Any] = {}
            if split.id in states and split.id not in replaced:
                kept = _decided(states[split.id].fingerprint, split.fingerprint)
            elif topic_partition(split.id)[0] in known_topics:
                kept = {"start": split.fingerprint["earliest"]}
            found.append(replace(split, fingerprint={**split.fingerprint, **kept}))
        return found

    def place_of(self, split: SplitId, position: int) -> dict[str, Any]:
        topic, partition = topic_partition(split)
        return {"topic": topic, "partition": partition, "offset": position >> ROW_BITS, "row": position & ((1 << ROW_BITS) - 1)}

    def commit(self, done: Mapping[SplitId, IntervalSet]) -> None:
        if self.config.group_id:
            self._commits.commit(done)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._commits.close(deadline_s=_COMMIT_DEADLINE_S)
        self._client.close()

    def decoder(self) -> Decoder:
        """A new decoder of the topics' messages."""
        return make_decoder(self.config, self._columns, interrupted=self._interrupted)

    def _new_client(self) -> KafkaClient:
        return KafkaClient(self.config, patience_s=self.config.connect_timeout_s, interrupted=self._interrupted)

    def _splits(self, topic: Topic) -> list[Split]:
        splits = topic.splits()
        lows = [low or 0 for low in self._client.offsets(splits, EARLIEST)]
        starts, ends = self._starts(splits, lows), self._ends(splits)
        return [
            topic.split(split, low, start=start, end=end) for split, low, start, end in zip(splits, lows, starts, ends, strict=True)
        ]

    def _starts(self, splits: Sequence[SplitId], lows: Sequence[int]) -> list[int]:
        """The first offset to read of partitions without progress."""
        start_ms = self.config.start_timestamp_ms
        if start_ms is None and self._start_at is not None:
            start_ms = max(0, int(self._start_at * 1000))
        return list(lows) if start_ms is None else self._at_or_end(splits, start_ms)

    def _ends(self, splits: Sequence[SplitId]) -> list[End]:
        time_ms = self.config.end_timestamp_ms
        if time_ms is not None:
            return [End(offset, time_ms) for offset in self._at_or_end(splits, time_ms)]
        ends = self.config.end_offsets
        missing = [split.name for split in splits if split.name not in ends] if ends else []
        if missing:
            raise ConfigError(f"data_config.kafka.end_offsets: no offset for {', '.join(missing)}; all partitions need one")
        return [End(ends.get(split.name)) for split in splits]

    def _at_or_end(self, splits: Sequence[SplitId], time_ms: int) -> list[int]:
        """The first offsets since a time; the end, as a number that stays, where there is nothing that late yet."""
        # Asked first: what arrives between the two questions is behind both answers.
        ends = self._client.offsets(splits, LATEST)
        at = self._client.offsets(splits, time_ms)
        return [end or 0 if offset is None else offset for offset, end in zip(at, ends, strict=True)]

    def _partitions(self, client: KafkaClient, assigned: Sequence[Assigned]) -> list[Partition]:
        bounds = client.bounds([part.split.id for part in assigned])
        partitions: list[Partition] = []
        for part, bound in zip(assigned, bounds, strict=True):
            split, fingerprint = part.split.id, part.split.fingerprint
            position = part.done.first_gap(fingerprint["start"] << ROW_BITS)
            offset = position >> ROW_BITS
            # What is read again of a message that was trained in part is left out by the rows that are done.
            partitions.append(
                Partition(
                    split,
                    *topic_partition(split),
                    offset=self._fit(split, offset, bound),
                    next=offset << ROW_BITS,
                    done=part.done,
                    end=fingerprint.get("end") if self.is_backfill else None,
                )
            )
        return partitions

    def _fit(self, split: SplitId, offset: int, bounds: Bounds) -> int:
        """Where reading can go on if it should at `offset`. Raises SourceChangedError for one beyond the end, and for expired
        messages if the config says so."""
        if offset > bounds.end:
            raise SourceChangedError(
                f"{split}: to go on at offset {offset}, but it ends at {bounds.end}: the topic was truncated or made anew"
            )
        if offset >= bounds.earliest:
            return offset
        count = bounds.earliest - offset
        lost = f"{split}: messages {offset} to {bounds.earliest - 1} ({count}) expired before they were read"
        if self.config.on_data_loss == "fail":
            raise SourceChangedError(f"{lost}; set kafka.on_data_loss to earliest to go on without them")
        log.warning("%s; going on at %d", lost, bounds.earliest)
        event("source.data_loss", split=split.name, first=offset, lost=count)
        return bounds.earliest


def _why_anew(was: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, Any] | None:
    """By what it shows that a partition's topic isn't the one that it was: what was, and what is; None: nothing shows it. Old
    checkpoints, and old clusters, name no id."""
    known = was.get("topic_id"), found.get("topic_id")
    if None not in known and known[0] != known[1]:
        return f"its topic_id was {known[0]}", known[1]
    first = was.get("earliest"), found.get("earliest")
    if first[0] is not None and first[1] is not None and first[1] < first[0]:
        return f"its earliest offset was {first[0]}", first[1]
    return None


def _decided(was: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run decided about a partition, which a later one doesn't decide anew: messages that came since may have any
    time."""
    keys = ["start", *(["end"] if was.get("end_ms") is not None and was["end_ms"] == found.get("end_ms") else [])]
    return {key: was[key] for key in keys if key in was}


def _end_of(state: SplitState) -> int:
    """The offset behind the last message that was read."""
    return max((stop for _, stop in state.intervals), default=0) >> ROW_BITS


def _check(config: KafkaConfig, columns: Columns | None, event_time_column: str | None) -> None:
    make_decoder(config, columns)
    if columns is not None and event_time_column is not None and event_time_column not in columns:
        raise ConfigError(f"data_config.event_time.column: {event_time_column!r} isn't among the columns that are read")
    if config.end_timestamp_ms is not None and config.end_timestamp_ms > time.time() * 1000:
        raise ConfigError("data_config.kafka.end_timestamp_ms lies in the future; a backfill ends with what is there")
    if config.end_timestamp_ms is not None and config.end_offsets:
        raise ConfigError("data_config.kafka: end_timestamp_ms and end_offsets are two ends; give one")
    check_client(config)
