"""What the requests of a running broker work on: options, stored data, groups, injected faults, counters."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.testing.broker.groups import ConsumerGroup
from tidemill.testing.broker.protocol import ApiKey, ErrorCode, RequestReader
from tidemill.testing.broker.store import FolderLock, OffsetStore, TopicStore

# Injected "errors" that close the connection instead of answering: without doing what was asked, or after doing it (the
# case in which a client repeats what has already happened).
DROP_REQUEST = -1
DROP_ANSWER = -2


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """How a broker runs. Port 0 picks a free port; control port None opens none."""

    directory: Path
    host: str = "127.0.0.1"
    port: int = 9092
    control_port: int | None = None
    fsync: bool = False
    auto_create: int = 0
    """Partitions of a topic that is created by being asked for; 0: topics are created by an admin client only."""
    max_request_bytes: int = 100_000_000
    rebalance_delay_s: float = 0.1
    parent: int | None = None
    """Process that the broker dies with."""


@dataclass(slots=True)
class Faults:
    round_trip_s: float = 0.0
    down: bool = False
    errors: dict[ApiKey, deque[int]] = field(default_factory=lambda: defaultdict(deque))

    def take_error(self, api: ApiKey) -> int:
        """The error for this request, if one was injected; each is used up by one request."""
        queue = self.errors[api]
        return queue.popleft() if queue else ErrorCode.NONE


@dataclass(frozen=True, slots=True)
class Call:
    """One request: where to read its body, its API version, the injected error (0: none), and the address that the
    client reached the broker at, which is the address to tell it."""

    body: RequestReader
    version: int
    error: int
    host: str
    port: int


class Broker:
    """Owned by the event loop's thread. Raises StorageError if another broker writes in the folder."""

    def __init__(self, options: BrokerOptions) -> None:
        self.options = options
        options.directory.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(options.directory)
        self.topics = TopicStore(options.directory, options.fsync)
        self.offsets = OffsetStore(options.directory, options.fsync)
        self.groups: dict[str, ConsumerGroup] = {}
        self.faults = Faults()
        self.counts: Counter[str] = Counter()

    def group(self, name: str) -> ConsumerGroup:
        if name not in self.groups:
            self.groups[name] = ConsumerGroup(self.options.rebalance_delay_s)
        return self.groups[name]

    def tick(self) -> None:
        now = time.monotonic()
        for group in self.groups.values():
            group.tick(now)

    def close(self) -> None:
        self.offsets.close()
        self.topics.close()
        self._lock.release()
