"""One rank's event time: what its share of the data has been trained up to (D2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tidemill.clock import EventTime, event_time
from tidemill.data.split import Provenance, SplitId


class Watermark:
    """The minimum, over the rank's partitions that aren't idle, of the largest time trained in each; it never goes back.

    `reached` and `value` are those of the checkpoint that a run resumes from. `left`: positions still to be trained of bounded
    splits; one that has been trained to its end holds nothing back any more, and when all have, the time is the largest of
    them. `in_order`: rows of a split are trained in the order in which they lie. If not, rows of any time may still come from one
    that isn't at its end, so that it has no time until then. Times in runs are taken as they are: the loader has replaced those
    that can't be true by NaN. Belongs to the training thread.
    """

    def __init__(
        self,
        partitions: Iterable[SplitId],
        *,
        reached: Mapping[SplitId, float] | None = None,
        value: float | None = None,
        left: Mapping[SplitId, int] | None = None,
        in_order: bool = True,
    ) -> None:
        known = reached or {}
        self._reached = {split: known.get(split, math.nan) for split in partitions}
        self._left = dict(left or {})
        self._value = value
        self._in_order = in_order

    def add(self, split: SplitId) -> None:
        """A partition that appeared while the others were read."""
        self._reached.setdefault(split, math.nan)

    def advance(self, provenance: Provenance) -> None:
        """Record that a batch was trained."""
        _reach(self._reached, self._left, provenance)

    def report(self, pending: Sequence[Provenance], idle: Callable[[SplitId], bool]) -> tuple[EventTime | None, bool]:
        """(event time, abstains) as it will be once the batches in hand are trained.

        `pending`: the batches that the coming round trains; a partition with rows in them isn't idle, whatever `idle` says. The
        time is None while a partition that isn't idle has none. Abstains if all partitions are idle, or there are none;
        bounded splits are never idle, so a rank that has finished its share goes on counting.
        """
        reached, left = dict(self._reached), dict(self._left)
        for provenance in pending:
            _reach(reached, left, provenance)
        in_hand = {split for provenance in pending for split, _, _ in provenance.parts()}
        busy = {split: time for split, time in reached.items() if split in in_hand or not idle(split)}
        unfinished = [time for split, time in busy.items() if left.get(split, 1) > 0]
        if unfinished and self._in_order and not any(math.isnan(time) for time in unfinished):
            self._rise(min(unfinished))
        elif not unfinished:
            self._rise(max((time for time in busy.values() if not math.isnan(time)), default=None))
        return (None if self._value is None else event_time(self._value)), not busy

    def _rise(self, time: float | None) -> None:
        if time is not None:
            self._value = time if self._value is None else max(self._value, time)


def _reach(reached: dict[SplitId, float], left: dict[SplitId, int], provenance: Provenance) -> None:
    for split, positions, time in provenance.parts():
        if split in left:
            left[split] -= positions
        if split in reached and not math.isnan(time):
            known = reached[split]
            reached[split] = time if math.isnan(known) else max(known, time)
