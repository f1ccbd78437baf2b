"""Which rank reads what: pure functions of the splits, of what is done, and of the number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.split import Split, SplitId

Done = Mapping[SplitId, IntervalSet]


@dataclass(frozen=True, slots=True)
class Assigned:
    """What one rank reads of one split. `remaining`: the positions to read, None for an unbounded split; `done`: those trained
    already, by any rank. `share`: the positions that the assignment's base had given to the rank, where that is more."""

    split: Split
    remaining: IntervalSet | None
    done: IntervalSet = NOTHING
    share: IntervalSet | None = None

    @property
    def whole(self) -> IntervalSet | None:
        """The rank's positions as the assignment's base dealt them; None for an unbounded split."""
        return self.remaining if self.share is None else self.share

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it is left to read."""
        return self.remaining is not None and not self.remaining


@dataclass(frozen=True, slots=True)
class AssignmentBase:
    """What an assignment was computed from. Kept in the checkpoint, so that a run that resumes with as many ranks gives each
    rank the rest of its own rows, in the same batches."""

    world_size: int
    splits: tuple[SplitId, ...]
    done: dict[SplitId, IntervalSet]

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` is the inverse."""
        return {
            "world_size": self.world_size,
            "splits": [
                {"kind": split.kind, "split": split.name, "intervals": [list(pair) for pair in self.done.get(split, NOTHING)]}
                for split in self.splits
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The base that `to_json` wrote."""
        done = {
            SplitId(entry["kind"], entry["split"]): IntervalSet.of((start, stop) for start, stop in entry["intervals"])
            for entry in value["splits"]
        }
        return cls(int(value["world_size"]), tuple(done), {split: rows for split, rows in done.items() if rows})


def assign(splits: Sequence[Split], done: Done, world_size: int, rank: int) -> list[Assigned]:
    """The rank's share of what is left, in the order of `splits`.

    Bounded: the rows left of all splits, laid end to end, are dealt in one contiguous stretch a rank whose sizes differ by at
    most 1; of splits that are read in turn each rank gets a stretch. Splits of which the rank has no row are left out.
    Unbounded: a split belongs to one rank as a whole, to its `owner`. Over all ranks each row is dealt once.
    """
    ordered = sorted(splits, key=lambda split: _place(split.id))
    unbounded = [split for split in ordered if split.num_rows is None and owner(split.id, world_size) == rank]
    bounded = [split for split in splits if split.num_rows is not None]
    return _deal(bounded, done, world_size, rank) + [Assigned(s, None, done.get(s.id, NOTHING)) for s in unbounded]


def plan(
    splits: Sequence[Split], base: AssignmentBase | None, progress: Done, world_size: int, rank: int
) -> tuple[AssignmentBase, list[Assigned]]:
    """What a rank reads from here on, and the base to keep in the next checkpoints; the base is the same on all ranks.

    With the base's own number of ranks and splits: the assignment computed from it, less what was trained since; parts of which
    nothing is left stay in the list. Otherwise (new run, other number of ranks, files added): what is left is dealt anew.
    """
    ids = tuple(split.id for split in splits)
    if base is None or base.world_size != world_size or base.splits != ids:
        base = AssignmentBase(world_size, ids, {split: progress[split] for split in ids if progress.get(split)})
    assigned: list[Assigned] = []
    for part in assign(splits, base.done, world_size, rank):
        done = progress.get(part.split.id, NOTHING)
        remaining = None if part.remaining is None else part.remaining - done
        assigned.append(Assigned(part.split, remaining, done, part.remaining))
    return base, assigned


def _deal(splits: Sequence[Split], done: Done, world_size: int, rank: int) -> list[Assigned]:
    left = [IntervalSet.of([(0, split.num_rows or 0)]) - done.get(split.id, NOTHING) for split in splits]
    total = sum(rows.count() for rows in left)
    dealt: list[Assigned] = []
    before = 0
    for split, rows in zip(splits, left, strict=True):
        after = before + rows.count()
        # Rows are counted over all splits that are left. Read in turn, a split's own rows go to all ranks; what a rank got of the
        # splits up to one differs by at most 1 from what another did, so that all of them reach the next one at the same step.
        shares = [_share(after, world_size, of) - _share(before, world_size, of) for of in range(world_size)]
        first = sum(shares[:rank]) if split.in_turn else max(_first(total, world_size, rank) - before, 0)
        stop = first + shares[rank] if split.in_turn else max(_first(total, world_size, rank + 1) - before, 0)
        mine = rows.slice(first, stop)
        if mine:
            dealt.append(Assigned(split, mine, done.get(split.id, NOTHING)))
        before = after
    return dealt


def _share(rows: int, world_size: int, rank: int) -> int:
    """How many of so many rows a rank gets."""
    return rows // world_size + (rank < rows % world_size)


def _first(rows: int, world_size: int, rank: int) -> int:
    """Where a rank's share of so many rows begins."""
    return rank * (rows // world_size) + min(rank, rows % world_size)


def owner(split: SplitId, world_size: int) -> int:
    """The rank that reads an unbounded split. It depends on nothing else, so that splits added later move none of the others.

    The partitions of a topic ("clicks:3") go round the ranks, from a rank that the topic's name picks; other names are spread
    by their hash.
    """
    kind, stem, number = _place(split)
    return (zlib.crc32(f"{kind} {stem}".encode()) + number) % world_size


def _place(split: SplitId) -> tuple[str, str, int]:
    """(kind, topic, partition) of "clicks:10"; sorts it behind "clicks:2". Of other names (kind, name, 0)."""
    stem, colon, number = split.name.rpartition(":")
    return (split.kind, stem, int(number)) if colon and number.isdigit() else (split.kind, split.name, 0)
