"""Where a run's data goes on: behind its own checkpoint, behind its parent's, or at the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.contracts.progress import DataloaderState, SplitState
from tidemill.data.assignment import AssignmentBase
from tidemill.data.progress import Progress, is_complete, without_replaced
from tidemill.data.source import Source
from tidemill.data.split import Split, SplitId
from tidemill.jobs.discovery import discover, share_splits
from tidemill.jobs.start import Sharing
from tidemill.logs import log


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says of its data. `base` None: it is the parent's, whose passes don't count here."""

    state: DataloaderState
    base: AssignmentBase | None


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """The splits to read, what is done of them, and the assignment that goes on, if one does."""

    splits: list[Split]
    progress: Progress
    base: AssignmentBase | None


def find_positions(source: Source, agreement: Sharing, rank: int, saved: Saved | None, *, num_passes: int | None) -> Positions:
    """Discover what is to be read, or resume what was. Collective; raises on every rank what rank 0 finds.

    A run that had made all its passes is over, unless the input names splits that it hasn't read (the next day's partitions): then
    it makes its passes over those. Splits that were read to the end before that are carried along in all later checkpoints, so that
    they are known as read when a later input names them again.
    """

    def look(states: Sequence[SplitState]) -> list[Split]:
        return discover(source, agreement, rank, saved=states)

    if saved is None:
        return Positions(look(()), Progress(), None)
    state, base = saved.state, saved.base
    if source.continues_parent and _is_over(state, base, num_passes):
        fresh = _fresh_positions(look, state.splits)
        # Behind its own data a run that has nothing new is over; behind its parent's it has nothing to read, which it will tell.
        if base is None or any(split.num_rows for split in fresh.splits):
            return fresh
    carried = _carried(state.splits, base) if source.continues_parent else set()
    splits = [split for split in look(state.splits) if split.id not in carried]
    states = without_replaced(source, splits, state.splits)
    return Positions(splits, _progress(states, carried, state.passes_completed if base else 0), base)


def _is_over(state: DataloaderState, base: AssignmentBase | None, num_passes: int | None) -> bool:
    """Whether everything that the state lists was read as often as it was to be."""
    if any(split.num_rows is None for split in state.splits):
        return False
    if base is None:
        return state.passes_completed > 0 and all(not split.intervals or is_complete(split) for split in state.splits)
    return num_passes is not None and state.passes_completed >= num_passes


def _fresh_positions(look: Callable[[Sequence[SplitState]], list[Split]], states: Sequence[SplitState]) -> Positions:
    """Positions on the splits that are new. A split that had no rows is new too."""
    read = [state.model_copy(update={"intervals": [(0, state.num_rows)]}) for state in states if state.num_rows]
    carried = {_id(state) for state in read}
    splits = [split for split in look(read) if split.id not in carried]
    rows = sum(split.num_rows or 0 for split in splits)
    log.info("%d splits of the checkpoint were read to the end; %d new ones with %d rows", len(read), len(splits), rows)
    return Positions(splits, _progress(read, carried, 0), None)


def _progress(states: Sequence[SplitState], carried: set[SplitId], passes: int) -> Progress:
    progress = Progress.from_states([state for state in states if _id(state) not in carried], passes=passes)
    progress.carry(state for state in states if _id(state) in carried)
    return progress


def _carried(states: Sequence[SplitState], base: AssignmentBase | None) -> set[SplitId]:
    """The splits that were read to the end before the passes of the run that saved them; for a child, before its own."""
    offered = set(base.splits) if base else set()
    return {_id(state) for state in states if is_complete(state) and state.intervals and _id(state) not in offered}


def _id(state: SplitState) -> SplitId:
    return SplitId(state.kind, state.split)


def renew(source: Source, agreement: Sharing, rank: int) -> Callable[[Sequence[Split]], list[Split]]:
    """How a pass after the first gets its splits: as rank 0 renews them. Collective when called."""

    def again(splits: Sequence[Split]) -> list[Split]:
        return share_splits(agreement, rank, lambda: source.renew(splits))

    return again
