"""Says what reading that is to end waits for: a partition that ends before its end is no stall that nobody sees."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tidemill.data.sources.kafka_runs import Partition
from tidemill.data.sources.kafka_watch import KafkaWatch
from tidemill.data.split import SplitId
from tidemill.logs import event, log


class EndWait:
    """Tells of partitions that were read to their last message and aren't at their end yet: once each, and again every so often.

    Belongs to the reading thread.
    """

    def __init__(self, tell_every_s: float) -> None:
        self._tell_every_s = tell_every_s
        self._since: dict[SplitId, float] = {}
        self._told_at = float("-inf")

    def look(self, partitions: Sequence[Partition], watch: KafkaWatch) -> None:
        """To be called at each read."""
        now = time.monotonic()
        waiting = [part for part in partitions if not part.is_finished and watch.is_at_end(part.split, part.reached)]
        new = [part for part in waiting if part.split not in self._since]
        self._since = {part.split: self._since.get(part.split, now) for part in waiting}
        if waiting and (new or now - self._told_at >= self._tell_every_s):
            self._told_at = now
            for part in waiting:
                self._tell(part, watch.end(part.split), now)

    def _tell(self, part: Partition, head: int | None, now: float) -> None:
        waited = now - self._since[part.split]
        log.warning(
            "%s: reading is to end at offset %s, but messages end at %s so far; waiting for more since %.0f s. If none are to "
            "come, stop the run, or give an earlier end",
            part.split,
            part.end,
            head,
            waited,
        )
        event("source.waiting_for_end", split=part.split.name, end=part.end, reached=part.reached, waited_s=waited)
