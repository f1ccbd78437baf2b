"""The data folder: its lock, its topics, the committed offsets of consumer groups.

lock             held by the one broker that writes here
broker.json      where that broker listens (written by the server)
topics.json      cluster id; id, partitions and start offsets of every topic
offsets.jsonl    committed offsets, one a line, later lines win; rewritten at start
topics/T/N.log   record batches of partition N of topic T
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from tidemill.errors import StorageError
from tidemill.testing.broker.log import PartitionLog
from tidemill.testing.broker.protocol import ErrorCode

logger = logging.getLogger(__name__)

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_MAX_PARTITIONS = 1000


class CommittedOffset(NamedTuple):
    offset: int
    metadata: str


class OffsetKey(NamedTuple):
    group: str
    topic: str
    partition: int


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader, or a start after a crash, sees the old or the new file whole."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class FolderLock:
    """The right to write in a folder; ends with the process, however that ends."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise StorageError(
                f"{directory} is in use by another development broker (process {owner}); stop that one or use another folder"
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()


class TopicStore:
    """All topics of the broker. Methods return Kafka error codes, since their callers are requests."""

    def __init__(self, directory: Path, fsync: bool) -> None:
        self._catalog = directory / "topics.json"
        self._folder = directory / "topics"
        self._fsync = fsync
        self._topics: dict[str, list[PartitionLog]] = {}
        saved = json.loads(self._catalog.read_text()) if self._catalog.exists() else {}
        # A topic that an older broker made has none saved, and gets one now.
        self._ids = {name: uuid.UUID(saved.get("topic_ids", {}).get(name) or uuid.uuid4().hex) for name in saved.get("topics", {})}
        self.cluster_id: str = saved.get("cluster_id") or uuid.uuid4().hex[:22]
        for name, start_offsets in saved.get("topics", {}).items():
            self._open(name, start_offsets)
        self._save()
        highest = max((log.max_producer_id for logs in self._topics.values() for log in logs), default=-1)
        self._last_producer_id = max(highest, int(time.time() * 1000))

    @property
    def names(self) -> list[str]:
        return list(self._topics)

    def partitions(self, topic: str) -> list[PartitionLog]:
        """Empty if there is no such topic."""
        return self._topics.get(topic, [])

    def partition(self, topic: str, index: int) -> PartitionLog | None:
        logs = self._topics.get(topic, [])
        return logs[index] if 0 <= index < len(logs) else None

    def topic_id(self, topic: str) -> uuid.UUID:
        """The identity of a topic that is there; another one for each topic, also of the same name."""
        return self._ids[topic]

    def name_of(self, topic_id: bytes) -> str | None:
        return next((name for name, known in self._ids.items() if known.bytes == topic_id), None)

    def new_producer_id(self) -> int:
        self._last_producer_id += 1
        return self._last_producer_id

    def check_create(self, topic: str, num_partitions: int) -> ErrorCode:
        if not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
            return ErrorCode.INVALID_TOPIC
        if topic in self._topics:
            return ErrorCode.TOPIC_ALREADY_EXISTS
        return ErrorCode.NONE if 0 < num_partitions <= _MAX_PARTITIONS else ErrorCode.INVALID_PARTITIONS

    def create(self, topic: str, num_partitions: int) -> ErrorCode:
        error = self.check_create(topic, num_partitions)
        if not error:
            # What a killed broker left of a deleted topic of the same name must not come back to life.
            shutil.rmtree(self._folder / topic, ignore_errors=True)
            self._ids[topic] = uuid.uuid4()
            self._open(topic, [0] * num_partitions)
            self._save()
        return error

    def delete(self, topic: str) -> ErrorCode:
        logs = self._topics.pop(topic, None)
        if logs is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        del self._ids[topic]
        self._save()
        for log in logs:
            log.close()
        shutil.rmtree(self._folder / topic)
        return ErrorCode.NONE

    def grow(self, topic: str, num_partitions: int, validate_only: bool = False) -> ErrorCode:
        if topic not in self._topics:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        missing = num_partitions - len(self._topics[topic])
        if missing <= 0 or num_partitions > _MAX_PARTITIONS:
            return ErrorCode.INVALID_PARTITIONS
        if not validate_only:
            self._open(topic, [0] * missing)
            self._save()
        return ErrorCode.NONE

    def delete_records(self, log: PartitionLog, before_offset: int) -> ErrorCode:
        """Move the partition's start to `before_offset` (-1: to its end). The bytes stay in the file."""
        target = log.next_offset if before_offset == -1 else before_offset
        if not 0 <= target <= log.next_offset:
            return ErrorCode.OFFSET_OUT_OF_RANGE
        log.start_offset = max(log.start_offset, target)
        self._save()
        return ErrorCode.NONE

    def close(self) -> None:
        for logs in self._topics.values():
            for log in logs:
                log.close()

    def _open(self, topic: str, start_offsets: list[int]) -> None:
        """Open partitions behind those that are open already, one for each start offset."""
        (self._folder / topic).mkdir(parents=True, exist_ok=True)
        logs = self._topics.setdefault(topic, [])
        for start_offset in start_offsets:
            path = self._folder / topic / f"{len(logs)}.log"
            logs.append(PartitionLog(path, self._fsync, start_offset))

    def _save(self) -> None:
        topics = {name: [log.start_offset for log in logs] for name, logs in self._topics.items()}
        ids = {name: topic_id.hex for name, topic_id in self._ids.items()}
        catalog = {"cluster_id": self.cluster_id, "topics": topics, "topic_ids": ids}
        write_atomically(self._catalog, json.dumps(catalog, indent=1))


class OffsetStore:
    """Committed offsets. `flush` makes all earlier `commit` calls outlive a killed process."""

    def __init__(self, directory: Path, fsync: bool) -> None:
        path = directory / "offsets.jsonl"
        self._fsync = fsync
        self._offsets: dict[OffsetKey, CommittedOffset] = _load_offsets(path)
        lines = (_offset_line(key, committed) for key, committed in self._offsets.items())
        write_atomically(path, "".join(lines))
        self._file = path.open("a")

    def get(self, key: OffsetKey) -> CommittedOffset | None:
        return self._offsets.get(key)

    def keys(self, group: str) -> list[OffsetKey]:
        return [key for key in self._offsets if key.group == group]

    @property
    def groups(self) -> set[str]:
        return {key.group for key in self._offsets}

    def commit(self, key: OffsetKey, committed: CommittedOffset) -> None:
        self._offsets[key] = committed
        self._file.write(_offset_line(key, committed))

    def forget_topic(self, topic: str) -> None:
        for key in [key for key in self._offsets if key.topic == topic]:
            del self._offsets[key]
            self._file.write(_offset_line(key, None))
        self.flush()

    def flush(self) -> None:
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def _offset_line(key: OffsetKey, committed: CommittedOffset | None) -> str:
    return json.dumps([*key, *(committed or (None, None))]) + "\n"


def _load_offsets(path: Path) -> dict[OffsetKey, CommittedOffset]:
    offsets: dict[OffsetKey, CommittedOffset] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            group, topic, partition, offset, metadata = json.loads(line)
        except ValueError:
            # Only the last line can be torn: its commit was never acknowledged.
            logger.warning("%s:%d: left out a torn line", path, number)
            continue
        key = OffsetKey(group, topic, partition)
        if offset is None:
            offsets.pop(key, None)
        else:
            offsets[key] = CommittedOffset(offset, metadata)
    return offsets
