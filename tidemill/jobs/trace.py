"""Tracing one event: position -> step and run -> first release that holds it -> server generation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from tidemill.contracts import layout
from tidemill.contracts.progress import ROW_BITS
from tidemill.contracts.release import ReleaseManifest
from tidemill.contracts.serving import ServingStatus
from tidemill.data.intervals import IntervalSet
from tidemill.data.split import SplitId
from tidemill.errors import ConfigError, CorruptError, NotFoundError
from tidemill.jobs.ledger import TrainedRun, read_steps, surviving_steps
from tidemill.jobs.place import place_of
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

_EVENT = re.compile(r"^(?P<topic>[^:]+):(?P<partition>\d+):(?P<offset>\d+)(?::(?P<row>\d+))?$")


@dataclass(frozen=True, slots=True)
class Event:
    """One row of a Kafka partition."""

    topic: str
    partition: int
    offset: int
    row: int = 0

    @classmethod
    def parse(cls, text: str) -> Event:
        """ "topic:partition:offset" or "topic:partition:offset:row". Raises ConfigError."""
        match = _EVENT.match(text)
        if match is None:
            raise ConfigError(f"{text!r} doesn't name an event: write topic:partition:offset, or topic:partition:offset:row")
        row = int(match["row"] or 0)
        if row >> ROW_BITS:
            raise ConfigError(f"{text!r}: a message has fewer than {1 << ROW_BITS} rows")
        return cls(match["topic"], int(match["partition"]), int(match["offset"]), row)

    @property
    def split(self) -> SplitId:
        return SplitId("kafka", f"{self.topic}:{self.partition}")

    @property
    def position(self) -> int:
        return self.offset << ROW_BITS | self.row


@dataclass(frozen=True, slots=True)
class Training:
    """A step that the event entered. `survives`: False if a later run went on from a checkpoint before it."""

    run_id: str
    term: int
    step: int
    at: float
    survives: bool


@dataclass(frozen=True, slots=True)
class FirstRelease:
    """The first release, by (term, sequence), whose progress holds the event."""

    term: int
    sequence: int
    step: int
    run_id: str
    cut_at: float
    committed_at: float


@dataclass(frozen=True, slots=True)
class Served:
    """A server's generation. `reflected` False: it serves something older than the event's release, or another lineage.

    `since`: when it swapped to the first generation that reflects the event (`exact`), or to its present one.
    """

    server: str
    lineage: str | None
    term: int | None
    sequence: int | None
    since: float | None
    reflected: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """An event's way through one lineage; `trained` empty: the lineage hasn't trained it (yet)."""

    lineage: str
    trained: tuple[Training, ...]
    release: FirstRelease | None
    served: tuple[Served, ...]


def trace(event: Event, path: str, *, server_events: Sequence[Path] = ()) -> list[Trace]:
    """The event's way through a lineage, or through every lineage of a root.

    `server_events`: event logs of servers (`tidemill serve --events`), which tell when exactly they swapped; without them only
    the present generation of a root's servers is known. Raises NotFoundError if the path holds no lineage, CorruptError.
    """
    root, lineages = _lineages(path)
    swaps = [swap for file in server_events for swap in _swaps(file)]
    return [_trace(event, root, storage, prefix, swaps) for storage, prefix in lineages]


def _lineages(path: str) -> tuple[Storage | None, list[tuple[Storage, str]]]:
    """The root, if there is one, and its lineages' folders, oldest first."""
    storage = open_storage(path)
    dates = sorted({info.key.split("/")[1] for info in storage.list("lineages/") if info.key.count("/") > 1})
    if dates:
        return storage, [(storage, layout.lineage(date)) for date in dates]
    if not storage.list("runs/"):
        raise NotFoundError(f"{storage.url}: holds neither runs nor lineages: name a lineage's folder, or a root")
    place = place_of(storage.url)
    return (open_storage(place.root) if place else None), [(storage, "")]


def _trace(event: Event, root: Storage | None, storage: Storage, prefix: str, swaps: list[Served]) -> Trace:
    name = prefix or _name(storage)
    release = _first_release(event, storage, prefix)
    served: list[Served] = []
    if release is not None:
        served = _first_swaps(swaps, name, release)
        known = {entry.server for entry in served}
        served += [_present(status, name, release) for status in _statuses(root) if status.server not in known]
    return Trace(name, tuple(_trainings(event, read_steps(storage, prefix=prefix))), release, tuple(served))


def _name(storage: Storage) -> str:
    """A lineage's key in its root, or the folder's own name."""
    place = place_of(storage.url)
    return place.key if place else storage.url.rstrip("/").rpartition("/")[2]


def _trainings(event: Event, steps: list[TrainedRun]) -> Iterator[Training]:
    survivors = {part.run_id: part for part in surviving_steps(steps)}
    for entry in steps:
        if entry.rows.split == event.split and entry.holds(event.position):
            yield Training(entry.run_id, entry.term, entry.step, entry.at, entry.step in survivors[entry.run_id])


def _first_release(event: Event, storage: Storage, prefix: str) -> FirstRelease | None:
    base = f"{prefix}/" if prefix else ""
    keys = [info.key for info in storage.list(f"{base}releases/") if layout.release_sequence(info.key.removeprefix(base))]
    for key in sorted(keys):
        release = ReleaseManifest.parse(storage.read(key), where=f"{storage.url}/{key}")
        done = [state.intervals for state in release.splits if SplitId(state.kind, state.split) == event.split]
        if any(event.position in IntervalSet.of(intervals) for intervals in done):
            stages = release.stages
            return FirstRelease(release.term, release.sequence, release.step, release.run_id, stages.cut_at, stages.committed_at)
    return None


def _statuses(root: Storage | None) -> Iterator[ServingStatus]:
    for info in root.list("serving/") if root else ():
        if info.key.endswith(".json"):
            yield ServingStatus.parse(root.read(info.key), where=f"{root.url}/{info.key}")  # type: ignore[union-attr]


def _present(status: ServingStatus, lineage: str, release: FirstRelease) -> Served:
    position = (status.term or 0, status.sequence or 0)
    reflected = status.ready and status.lineage == lineage and position >= (release.term, release.sequence)
    return Served(status.server, status.lineage, status.term, status.sequence, status.swapped_at, reflected, exact=False)


def _swaps(file: Path) -> Iterator[Served]:
    """Swaps that a server's event log tells of, in order."""
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            fields = orjson.loads(line)
            if fields["event"] == "serving.swapped":
                yield Served(
                    file.stem,
                    fields["lineage"],
                    fields["term"],
                    fields["sequence"],
                    fields["swapped_at"],
                    reflected=True,
                    exact=True,
                )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{file}, line {number}: isn't a line of an event log ({error})") from None


def _first_swaps(swaps: list[Served], lineage: str, release: FirstRelease) -> list[Served]:
    """The first swap of each server to the release or a later one. A server of a single folder names only its last part."""
    first: dict[str, Served] = {}
    for swap in swaps:
        same = swap.lineage in (lineage, lineage.rpartition("/")[2])
        if same and (swap.term or 0, swap.sequence or 0) >= (release.term, release.sequence):
            first.setdefault(swap.server, swap)
    return list(first.values())
