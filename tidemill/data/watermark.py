"""One rank's event time: what its share of the data has been trained up to (D2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tidemill.clock import EventTime, event_time
from tidemill.data.split import Provenance, SplitId


class Watermark:
    """The minimum, over the rank's partitions that aren't idle, of the largest time trained in each; it never goes back.

    `reached` and `value` are those of the checkpoint that a run resumes from. Times in runs are taken as they are: the loader
    has replaced those that can't be true by NaN. Belongs to the training thread.
    """

    def __init__(
        self, partitions: Iterable[SplitId], *, reached: Mapping[SplitId, float] | None = None, value: float | None = None
    ) -> None:
        known = reached or {}
        self._reached = {split: known.get(split, math.nan) for split in partitions}
        self._value = value

    def advance(self, provenance: Provenance) -> None:
        """Record that a batch was trained."""
        _reach(self._reached, provenance)

    def report(self, pending: Sequence[Provenance], idle: Callable[[SplitId], bool]) -> tuple[EventTime | None, bool]:
        """(event time, abstains) as it will be once the batches in hand are trained.

        `pending`: the batches that the coming round trains; a partition with rows in them isn't idle, whatever `idle` says. The
        time is None while a partition that isn't idle has none. Abstains if all partitions are idle, or there are none;
        bounded splits are never idle, so a rank that has finished its share goes on counting.
        """
        reached = dict(self._reached)
        for provenance in pending:
            _reach(reached, provenance)
        in_hand = {run.split for provenance in pending for run in provenance.runs}
        busy = [time for split, time in reached.items() if split in in_hand or not idle(split)]
        if busy and not any(math.isnan(time) for time in busy):
            lowest = min(busy)
            self._value = lowest if self._value is None else max(self._value, lowest)
        return (None if self._value is None else event_time(self._value)), not busy


def _reach(reached: dict[SplitId, float], provenance: Provenance) -> None:
    for run in provenance.runs:
        if run.split in reached and not math.isnan(run.event_time):
            known = reached[run.split]
            reached[run.split] = run.event_time if math.isnan(known) else max(known, run.event_time)
