"""The ledger of a proof: which rows entered which step of the line that survived, against the producer's own list."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import orjson

from tidemill.contracts import layout
from tidemill.contracts.lineage import RunRecord, TermRecord
from tidemill.contracts.progress import ROW_BITS
from tidemill.data.split import Run, SplitId, positions
from tidemill.errors import CorruptError
from tidemill.lineage.records import run_records
from tidemill.storage.base import Storage

_STEP_LOG = re.compile(r"^runs/[^/]+/steps-\d+\.jsonl$")


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """Consecutive rows of one split that entered one step of one run. `at`: when, Unix seconds by the trainer's clock."""

    run_id: str
    term: int
    step: int
    at: float
    rows: Run
    resumed: tuple[int, int] | None = None
    """(term, step) of the checkpoint that its run went on from, by its record; the term's run has logged steps"""

    def holds(self, position: int) -> bool:
        """Whether the row at a position is one of them."""
        rows = self.rows
        number, rest = divmod(position - rows.start - rows.gap, rows.stride)
        return rest == 0 and 0 <= number < rows.rows


@dataclass(frozen=True, slots=True)
class SurvivingSteps:
    """The steps [first, stop) of a run that are part of the model as it is now. `logged_stop`: the end of all that it trained."""

    run_id: str
    term: int
    first: int
    stop: int
    logged_stop: int

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.stop


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of the rows that a producer lists, and how many trained rows it doesn't list."""

    rows: int
    trained_once: int
    lost: int
    doubled: int
    unlisted: int
    """Trained rows of a split that the producer lists, at positions that it doesn't."""
    first_lost: tuple[SplitId, int] | None = None
    first_doubled: tuple[SplitId, int] | None = None

    @property
    def is_clean(self) -> bool:
        """Whether every listed row was trained exactly once, and no other."""
        return self.trained_once == self.rows and not self.unlisted


def read_steps(storage: Storage, *, prefix: str = "") -> list[TrainedRun]:
    """What all runs of a lineage's or daily job's folder (`prefix` inside the store) have logged, by (term, step).

    A torn last line, of a process that was killed while it wrote, is left out. Raises CorruptError for any other line that can't be
    read, and for a run without a term.
    """
    base = f"{prefix}/" if prefix else ""
    terms = _terms(storage, base)
    logs: dict[str, list[TrainedRun]] = {}
    for info in storage.list(f"{base}runs/"):
        key = info.key.removeprefix(base)
        if not _STEP_LOG.match(key):
            continue
        run_id = key.split("/")[1]
        if run_id not in terms:
            raise CorruptError(
                f"{storage.url}/{info.key}: run {run_id} has no term (terms/*.json), so its place in the line is unknown"
            )
        logs.setdefault(run_id, []).extend(_read_log(storage, info.key, run_id, terms[run_id]))
    origins = {record.term: _origin(record) for record in run_records(storage, prefix=prefix) if record.term is not None}
    logged = {terms[run_id] for run_id, entries in logs.items() if entries}
    trained = [replace(entry, resumed=_resolve(origins, logged, entry.term)) for entries in logs.values() for entry in entries]
    return sorted(trained, key=lambda entry: (entry.term, entry.step))


def surviving_steps(trained: Iterable[TrainedRun]) -> list[SurvivingSteps]:
    """Which steps of each run count, by term: followed back from the newest run, each one's end where the next went on from it.

    A run whose record doesn't say which checkpoint that was went on at the very step that it logs first, from the run before it.
    A run that never came to a step changed nothing.
    """
    bounds: dict[tuple[int, str], tuple[int, int]] = {}
    resumed: dict[int, tuple[int, int] | None] = {}
    for entry in trained:
        first, last = bounds.get((entry.term, entry.run_id), (entry.step, entry.step))
        bounds[entry.term, entry.run_id] = min(first, entry.step), max(last, entry.step)
        resumed[entry.term] = entry.resumed
    survivors: list[SurvivingSteps] = []
    newest_term: float = np.inf
    limit: float = np.inf
    for (term, run_id), (first, last) in sorted(bounds.items(), reverse=True):
        # A run that the line has passed by: the next one went on from the checkpoint of an earlier term.
        stop = first if term > newest_term else int(max(first, min(last + 1, limit)))
        survivors.append(SurvivingSteps(run_id, term, first, stop, last + 1))
        if term > newest_term:
            continue
        newest_term, limit = resumed[term] or (np.inf, min(limit, first))
    return survivors[::-1]


def surviving(trained: Iterable[TrainedRun]) -> list[TrainedRun]:
    """The entries of the surviving line."""
    trained = list(trained)
    steps = {part.run_id: part for part in surviving_steps(trained)}
    return [entry for entry in trained if entry.step in steps[entry.run_id]]


def trained_positions(trained: Iterable[TrainedRun]) -> dict[SplitId, list[TrainedRun]]:
    """The surviving line's entries by split, in the order of their positions."""
    by_split: dict[SplitId, list[TrainedRun]] = {}
    for entry in surviving(trained):
        by_split.setdefault(entry.rows.split, []).append(entry)
    return {split: sorted(entries, key=lambda entry: entry.rows.start) for split, entries in by_split.items()}


def check_ledger(trained: Iterable[TrainedRun], expected: Mapping[SplitId, np.ndarray]) -> Ledger:
    """Compare what was trained in the surviving line of `trained` (one folder's `read_steps`) with the producer's own list.

    `expected`: by split, the position of every row (int64; of a file: row numbers; of a Kafka partition: see `message_positions`).
    """
    by_split = trained_positions(trained)
    total = Ledger(0, 0, 0, 0, 0)
    for split, listed in sorted(expected.items()):
        total = _add(total, split, np.unique(listed), by_split.get(split, []))
    return total


def message_positions(first_offset: int, stop_offset: int, *, rows: int = 1) -> np.ndarray:
    """Positions of the rows of a Kafka partition's messages [first_offset, stop_offset) with `rows` rows each."""
    offsets = np.arange(first_offset, stop_offset, dtype=np.int64) << ROW_BITS
    return (offsets[:, None] + np.arange(rows, dtype=np.int64)).reshape(-1)


def _add(total: Ledger, split: SplitId, listed: np.ndarray, entries: list[TrainedRun]) -> Ledger:
    found = [positions(entry.rows) for entry in entries]
    seen, counts = np.unique(np.concatenate(found) if found else np.empty(0, np.int64), return_counts=True)
    known = np.isin(seen, listed, assume_unique=True)
    lost = listed[~np.isin(listed, seen, assume_unique=True)]
    doubled = seen[known & (counts > 1)]
    return Ledger(
        rows=total.rows + len(listed),
        trained_once=total.trained_once + int(np.count_nonzero(known & (counts == 1))),
        lost=total.lost + len(lost),
        doubled=total.doubled + len(doubled),
        unlisted=total.unlisted + int(np.count_nonzero(~known)),
        first_lost=total.first_lost or ((split, int(lost[0])) if len(lost) else None),
        first_doubled=total.first_doubled or ((split, int(doubled[0])) if len(doubled) else None),
    )


def _origin(record: RunRecord) -> tuple[int, int] | None:
    if record.resumed_term is None or record.resumed_step is None:
        return None
    return record.resumed_term, record.resumed_step


def _resolve(origins: Mapping[int, tuple[int, int] | None], logged: Collection[int], term: int) -> tuple[int, int] | None:
    """Where a term's run went on from, through runs that saved a checkpoint without a step of their own."""
    origin = origins.get(term)
    while origin is not None and origin[0] not in logged:
        before = origins.get(origin[0])
        origin = (before[0], min(before[1], origin[1])) if before else None
    return origin


def _terms(storage: Storage, base: str) -> dict[str, int]:
    keys = [info.key for info in storage.list(f"{base}terms/") if layout.term_number(info.key.removeprefix(base)) is not None]
    records = [TermRecord.parse(storage.read(key), where=f"{storage.url}/{key}") for key in keys]
    return {record.run_id: record.term for record in records}


def _read_log(storage: Storage, key: str, run_id: str, term: int) -> list[TrainedRun]:
    entries: list[TrainedRun] = []
    # What follows the last line end is a line that its process didn't live to finish: its step was never trained.
    *lines, _ = storage.read(key).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            fields = orjson.loads(line)
            entries += [
                TrainedRun(run_id, term, fields["step"], fields["at"], Run(SplitId(kind, name), start, stop, rows, stride, gap))
                for kind, name, start, stop, rows, stride, gap in fields["runs"]
                if rows
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{storage.url}/{key}, line {number}: isn't a line of a step log ({error})") from None
    return entries
