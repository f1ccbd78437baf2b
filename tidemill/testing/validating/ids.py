"""What a validating trainer's runs came to: how often each id was trained in the line that survived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from tidemill.checkpoint.discovery import read_checkpoint, read_rank_states
from tidemill.jobs.ledger import read_steps, surviving_steps
from tidemill.storage.base import Storage
from tidemill.testing.validating.trainer import MODEL


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the ids that should have been trained once in each pass.

    `model_rows`, `model_sum`: what the newest checkpoint's model has counted; they must be those of the ids trained.
    """

    ids: int
    trained_once: int
    lost: tuple[int, ...]
    doubled: tuple[int, ...]
    unlisted: tuple[int, ...]
    model_is_equal: bool

    @property
    def is_clean(self) -> bool:
        return self.trained_once == self.ids and not self.unlisted and self.model_is_equal


def judge(storage: Storage, expected: Iterable[int], *, passes: int = 1) -> Verdict:
    """Compare the surviving line of a folder, up to its newest checkpoint, with the ids that must have been trained.

    `passes`: how often each.
    """
    counts = Counter(trained_ids(storage))
    wanted = set(expected)
    _, manifest = read_checkpoint(storage)
    states = [state[MODEL] for state in read_rank_states(storage, manifest)]
    rows = sum(state["rows"] for state in states)
    total = sum(int(state["sum"]) for state in states) % 2**64
    return Verdict(
        ids=len(wanted),
        trained_once=sum(counts[one] == passes for one in wanted),
        lost=tuple(sorted(one for one in wanted if counts[one] < passes)),
        doubled=tuple(sorted(one for one in wanted if counts[one] > passes)),
        unlisted=tuple(sorted(set(counts) - wanted)),
        model_is_equal=rows == counts.total() and total == sum(one * n for one, n in counts.items()) % 2**64,
    )


def trained_ids(storage: Storage) -> list[int]:
    """The ids that entered the steps of the surviving line, in no order."""
    survivors = {part.run_id: part for part in surviving_steps(read_steps(storage))}
    found: list[int] = []
    for info in storage.list("runs/"):
        run_id, _, name = info.key.removeprefix("runs/").partition("/")
        if not name.startswith("ids-") or run_id not in survivors:
            continue
        *lines, _ = storage.read(info.key).split(b"\n")
        for line in map(orjson.loads, lines):
            if line["step"] in survivors[run_id]:
                found += line["ids"]
    return found
