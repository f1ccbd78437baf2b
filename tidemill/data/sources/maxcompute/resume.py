"""What becomes of each saved position under the input path of now: pure functions of (state, config) (B2 to B6).

| saved position | what happens |
|---|---|
| of an unknown table, or another source's text with a `#` in it | warning, skipped |
| without a partition index (an older version's), of one of our tables | error: restart from scratch |
| index beyond the sessions of the same path (is_orderby_partition was switched off) | error |
| two sessions at one index | error |
| of a partition (or of just these partitions) that is named still, read to its end | skipped; its session isn't asked for |
| the same, read in part | its session goes on, at the index of now; it is validated first |
| of partitions that aren't named now, read to their end | done with; the new ones start afresh |
| of a partition that isn't named now, read in part | error |
| of a session over partitions of which only some are named now | error that shows the difference |
| nothing read yet (a partition without rows has no position at all) | a fresh session at its own index |

Rank 0 applies them, asks the service about the sessions that go on, and shares the verdict, so every rank sees the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.config.odps_uri import OdpsPath, OdpsTable, parse_odps_path, partition_key
from tidemill.contracts.positions import MAXCOMPUTE
from tidemill.contracts.progress import SplitState
from tidemill.data.intervals import IntervalSet
from tidemill.errors import SourceChangedError

_ANEW = "restart from scratch in an empty model_dir (--fine_tune_checkpoint without --continue_train keeps the weights)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session stands: an index within an input path, and the partitions that it spans; none: the whole table."""

    path: OdpsPath
    index: int
    partitions: tuple[str, ...]

    @property
    def name(self) -> str:
        """The split's name."""
        table = str(self.path.table)
        return f"{table}/{'&'.join(self.partitions)}" if self.partitions else table

    @property
    def keys(self) -> frozenset[str]:
        """The partitions, however they are worded."""
        return _keys(self.partitions)


def places(paths: Iterable[OdpsPath], *, ordered: bool) -> list[Place]:
    """One place for each partition, as written, if reading is ordered by partition; else one for each path (B1)."""
    found = []
    for path in paths:
        groups = [(partition,) for partition in path.partitions] if ordered and path.partitions else [path.partitions]
        found += [Place(path, index, partitions) for index, partitions in enumerate(groups)]
    return found


@dataclass(frozen=True, slots=True)
class Decision:
    """`kept`: the saved state of each place that isn't to start afresh. `notes`: what to warn of."""

    kept: dict[Place, SplitState]
    notes: tuple[str, ...]


def decide(saved: Sequence[SplitState], now: Sequence[Place]) -> Decision:
    """Apply the rules above. Raises SourceChangedError naming the position and what to do."""
    kept: dict[Place, SplitState] = {}
    notes: list[str] = []
    sessions: dict[tuple[str, int], str] = {}
    for state in saved:
        if state.kind != MAXCOMPUTE or not state.intervals:
            continue
        path = _path(state)
        if path is None or all(place.path.table.key != path.table.key for place in now):
            notes.append(f"positions of {state.split} are skipped: this job doesn't read that table")
            continue
        _require_one_session(state, sessions)
        place = _place_of(state, path, now)
        if place is not None:
            kept[place] = state
    return Decision(kept, tuple(notes))


def is_finished(state: SplitState) -> bool:
    """Whether all rows were read; only if their number is known."""
    return state.num_rows is not None and IntervalSet.of(state.intervals).count() == state.num_rows


def _path(state: SplitState) -> OdpsPath | None:
    try:
        return parse_odps_path(str(state.fingerprint.get("input_path", "")))
    except ValueError:
        return None


def _require_one_session(state: SplitState, sessions: dict[tuple[str, int], str]) -> None:
    path, index, session = (state.fingerprint.get(name) for name in ("input_path", "sess_idx", "session"))
    if index is None:
        raise SourceChangedError(
            f"position {path}#{session}: was written by an older version, without the partition's index,"
            f" so nobody can say which partition it belongs to; {_ANEW}"
        )
    before = sessions.setdefault((str(path), index), str(session))
    if before != session:
        raise SourceChangedError(
            f"position {path}#{index}: two sessions, {before} and {session}, at one index; restore the checkpoint's files"
        )


def _place_of(state: SplitState, path: OdpsPath, now: Sequence[Place]) -> Place | None:
    """Where the state goes on; None if it is done with."""
    index = state.fingerprint["sess_idx"]
    same_path = [place for place in now if place.path.text == path.text]
    if same_path and index >= len(same_path):
        raise SourceChangedError(
            f"position {path.text}#{index}: this path has {len(same_path)} session(s) now; is_orderby_partition was true when"
            f" the checkpoint was saved: set it back, or {_ANEW}"
        )
    if state.num_rows is None:
        raise SourceChangedError(
            f"position {path.text}#{index}: the state doesn't say how many rows its session has, so what is left of it"
            f" isn't known; {_ANEW}"
        )
    read = _keys(_partitions(state, path.table))
    for place in now:
        if place.path.table.key == path.table.key and place.keys == read:
            return place
    _require_done_with(state, read, _named(path.table, now))
    return None


def _require_done_with(state: SplitState, read: frozenset[str], named: frozenset[str] | None) -> None:
    """`named`: the partitions of the same table in the input path of now, None for all."""
    disjoint = bool(read) and named is not None and not read & named
    if is_finished(state) and disjoint:
        return
    rows = f"{IntervalSet.of(state.intervals).count():,} of {state.num_rows:,} rows"
    if len(read) == 1 and disjoint:
        raise SourceChangedError(
            f"{state.split} was read in part ({rows}), and the input path doesn't name it any more; put it back, or {_ANEW}"
        )
    gone = "all others" if not read and named else _listed(read - (named or read))
    new = "all others" if named is None and read else _listed((named or frozenset()) - read)
    raise SourceChangedError(
        f"{state.split} was read ({rows}) in one session, and the input path now names other partitions, or splits them up"
        f" otherwise (no longer named: {gone}; new: {new}); name the same partitions with the same is_orderby_partition,"
        f" or partitions none of which was read, or {_ANEW}"
    )


def _named(table: OdpsTable, now: Sequence[Place]) -> frozenset[str] | None:
    groups = [place.keys for place in now if place.path.table.key == table.key]
    return frozenset().union(*groups) if all(groups) else None


def _partitions(state: SplitState, table: OdpsTable) -> tuple[str, ...]:
    text = state.split.removeprefix(str(table)).removeprefix("/")
    return tuple(text.split("&")) if text else ()


def _keys(partitions: Iterable[str]) -> frozenset[str]:
    return frozenset(partition_key(partition) for partition in partitions)


def _listed(partitions: Iterable[str]) -> str:
    return ", ".join(sorted(partitions)) or "none"
