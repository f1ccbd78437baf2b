"""From an event's production to the first answer that reflects it, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.contracts import layout
from tidemill.contracts.progress import ROW_BITS
from tidemill.contracts.release import ReleaseManifest
from tidemill.demo.plan import TOPIC
from tidemill.jobs.ledger import TrainedRun, read_steps, surviving
from tidemill.storage.base import Storage

STAGES = ("queue", "batch", "train", "cut", "write", "gate", "poll", "swap")
"""queue: until the broker has acknowledged the event. batch: until its batch enters a step. train: that step. cut: until the next
release is cut. write: until its files are written. gate: until it has passed its gate and is committed. poll: until the server has
found it. swap: until it is loaded and the first answer names it, or a later one."""


@dataclass(frozen=True, slots=True)
class Releases:
    """One lineage's releases by sequence; one element a release, times in Unix seconds. `served_at`: inf if no answer came."""

    lineage: str
    offsets: dict[int, np.ndarray]
    """By partition: behind the last offset that this release or an earlier one covers."""
    cut_at: np.ndarray
    written_at: np.ndarray
    committed_at: np.ndarray
    found_at: np.ndarray
    served_at: np.ndarray


@dataclass(frozen=True, slots=True)
class Freshness:
    """One element an event that was served. `stages`: by name, seconds; they sum up to `total_s`."""

    event_times: np.ndarray
    total_s: np.ndarray
    stages: dict[str, np.ndarray]
    not_served: int
    """Events that no answer reflected: those of the last moments."""

    def to_json(self) -> dict[str, Any]:
        def quantiles(seconds: np.ndarray) -> dict[str, float | None]:
            return {f"p{q}": float(np.quantile(seconds, q / 100)) if len(seconds) else None for q in (50, 99)}

        return {
            **quantiles(self.total_s),
            "events": len(self.total_s),
            "not_served": self.not_served,
            "stages": {name: quantiles(seconds) for name, seconds in self.stages.items()},
        }


def next_offsets(release: ReleaseManifest, topic: str) -> dict[int, int]:
    """By partition of a topic: the first offset that the release doesn't reflect."""
    offsets: dict[int, int] = {}
    for split in release.splits:
        name, _, partition = split.split.rpartition(":")
        if split.kind == "kafka" and name == topic and split.intervals:
            offsets[int(partition)] = split.intervals[0][1] >> ROW_BITS
    return offsets


def read_releases(root: Storage, lineage: str, requests: pa.Table, swaps: list[dict[str, Any]]) -> Releases | None:
    """A lineage's releases, when the server found them (its own events), and when the first answer named them or later ones."""
    keys = [info.key for info in root.list(f"{lineage}/releases/")]
    keys = sorted(key for key in keys if layout.release_sequence(key.removeprefix(f"{lineage}/")) is not None)
    manifests = [ReleaseManifest.parse(root.read(key), where=key) for key in keys]
    if not manifests:
        return None
    covered = [next_offsets(manifest, TOPIC) for manifest in manifests]
    partitions = sorted({partition for offsets in covered for partition in offsets})
    sequences = np.array([manifest.sequence for manifest in manifests])
    mine = requests.filter(pc.and_(pc.equal(requests["lineage"], lineage), pc.equal(requests["status"], 200)))
    answered_at = mine["sent_at"].to_numpy() + mine["latency_s"].to_numpy()
    found = [swap for swap in swaps if swap["lineage"] == lineage]
    return Releases(
        lineage,
        # After a crash the next run may have come less far; what was served before stays served.
        {p: np.maximum.accumulate([offsets.get(p, 0) for offsets in covered]) for p in partitions},
        np.array([manifest.stages.cut_at for manifest in manifests]),
        np.array([manifest.stages.written_at for manifest in manifests]),
        np.array([manifest.stages.committed_at for manifest in manifests]),
        _first_at_least(sequences, np.array([swap["sequence"] for swap in found]), np.array([swap["found_at"] for swap in found])),
        _first_at_least(sequences, mine["sequence"].to_numpy(), answered_at),
    )


def read_swaps(path: str) -> list[dict[str, Any]]:
    """The swaps among a server's events."""
    try:
        with open(path, "rb") as file:
            events = [orjson.loads(line) for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return []
    return [event for event in events if event["event"] == "serving.swapped"]


def measure(
    root: Storage, lineages: list[str], impressions: pa.Table, requests: pa.Table, swaps: list[dict[str, Any]]
) -> Freshness:
    """How long each impression took to be reflected in an answer, by whichever lineage came first."""
    produced = impressions["produced_at"].to_numpy()
    ends = np.full((len(STAGES), len(produced)), np.inf)
    for lineage in lineages:
        releases = read_releases(root, lineage, requests, swaps)
        if releases is None:
            continue
        mine = _stage_ends(releases, surviving(read_steps(root, prefix=lineage)), impressions)
        ends = np.where(mine[-1] < ends[-1], mine, ends)
    served = np.isfinite(ends[-1])
    times = np.vstack([produced, ends])[:, served]
    # A stage ends no earlier than the one before it: clocks of processes differ by what a system call takes.
    times = np.maximum.accumulate(times, axis=0)
    seconds = np.diff(times, axis=0)
    return Freshness(
        impressions["event_time"].to_numpy()[served],
        times[-1] - times[0],
        dict(zip(STAGES, seconds, strict=True)),
        int(np.count_nonzero(~served)),
    )


def _stage_ends(releases: Releases, trained: list[TrainedRun], impressions: pa.Table) -> np.ndarray:
    """(stages, rows): when each stage of each impression ended in this lineage; inf where it didn't come to an answer."""
    partitions, offsets = impressions["partition"].to_numpy(), impressions["offset"].to_numpy()
    ends = np.full((len(STAGES), len(offsets)), np.inf)
    delivered = impressions["delivered_at"].to_numpy()
    for partition, covered in releases.offsets.items():
        rows = np.flatnonzero(partitions == partition)
        release = np.searchsorted(covered, offsets[rows], side="right")
        entered, left = _step_times(trained, f"{TOPIC}:{partition}", offsets[rows] << ROW_BITS)
        known = (release < len(covered)) & np.isfinite(entered)
        rows, release, entered, left = rows[known], release[known], entered[known], left[known]
        cut_at, served_at = releases.cut_at[release], releases.served_at[release]
        # Of a run that was killed, a step may have entered anew after the release that held it first.
        entered = np.minimum(entered, cut_at)
        found_at = np.minimum(releases.found_at[release], served_at)
        ends[:, rows] = (
            delivered[rows],
            entered,
            np.minimum(left, cut_at),
            cut_at,
            releases.written_at[release],
            releases.committed_at[release],
            found_at,
            served_at,
        )
    return ends


def _step_times(trained: list[TrainedRun], split: str, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the step of each position was entered, and when the next one was; inf for positions that weren't trained."""
    next_at: dict[tuple[str, int], float] = {(entry.run_id, entry.step): entry.at for entry in trained}
    mine = sorted((entry for entry in trained if entry.rows.split.name == split), key=lambda entry: entry.rows.start)
    if not mine:
        return np.full(len(positions), np.inf), np.full(len(positions), np.inf)
    place = np.searchsorted(np.array([entry.rows.start for entry in mine]), positions, side="right") - 1
    inside = (place >= 0) & (positions < np.array([entry.rows.stop for entry in mine])[place])
    entered = np.array([entry.at for entry in mine])[place]
    left = np.array([next_at.get((entry.run_id, entry.step + 1), np.inf) for entry in mine])[place]
    return np.where(inside, entered, np.inf), np.where(inside, left, np.inf)


def _first_at_least(sequences: np.ndarray, named: np.ndarray, at: np.ndarray) -> np.ndarray:
    """For each sequence, the first time at which it or a later one was named; inf if never."""
    if not len(named):
        return np.full(len(sequences), np.inf)
    order = np.argsort(named, kind="stable")
    earliest = np.minimum.accumulate(at[order][::-1])[::-1]
    place = np.searchsorted(named[order], sequences, side="left")
    return np.where(place < len(earliest), np.append(earliest, np.inf)[place], np.inf)
