"""What must be true of a story: which ids the checkpoints hold, how often, and how far the watermark may be."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import orjson

from tidemill.cadence import SyncPoint
from tidemill.checkpoint.discovery import checkpoint_keys, latest_checkpoint, list_checkpoints
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.jobs.ledger import SurvivingSteps, read_steps, surviving_steps
from tidemill.lineage.records import run_records
from tidemill.storage.base import Storage
from tidemill.testing.simulation.model import read_counts
from tidemill.testing.simulation.store import MemoryStorage
from tidemill.testing.simulation.trainer import SimulatedRun
from tidemill.testing.simulation.world import World


def check_newest_checkpoint(store: Storage) -> CheckpointManifest | None:
    """The newest checkpoint, if there is one: its table must have counted just what its line has trained."""
    newest = latest_checkpoint(store)
    if newest is None:
        return None
    manifest = newest[1]
    ids, last_step = line_of(store, manifest.term, manifest.step)
    counts, steps = read_counts(store, manifest)
    where = f"checkpoint of step {manifest.step}, term {manifest.term}"
    wrong = {one: (int(count), ids[one]) for one, count in enumerate(counts.tolist()) if count != ids[one]}
    assert not wrong, f"{where}: id -> (counted, trained): {wrong}"
    late = {one: (int(steps[one]), step) for one, step in last_step.items() if steps[one] != step}
    assert not late, f"{where}: id -> (newest step by the table, by the logs): {late}"
    return manifest


def check_ids(ids: Counter[int], world: World, *, passes: int, may_lose: int = 0) -> None:
    """Each id that was to be trained was, `passes` times; `may_lose`: how many trainings may be missing, in all."""
    expected = set(world.expected)
    lost = {one: ids[one] for one in expected if ids[one] < passes}
    doubled = {one: count for one, count in ids.items() if count > passes}
    assert not doubled, f"ids trained more than {passes} times: {doubled}"
    assert not ids.keys() - expected, f"ids that weren't to be trained: {sorted(ids.keys() - expected)}"
    missing = sum(passes - count for count in lost.values())
    assert missing <= may_lose, f"ids trained less than {passes} times: {lost}"


def line_of(store: Storage, term: int, step: int) -> tuple[Counter[int], dict[int, int]]:
    """The ids of the line that a checkpoint ends: how often each was trained, and at which step last."""
    survivors = _survivors(store, term, step)
    counts: Counter[int] = Counter()
    last: dict[int, int] = {}
    for info in store.list("runs/"):
        run_id, _, name = info.key.removeprefix("runs/").partition("/")
        if not name.startswith("ids-") or run_id not in survivors:
            continue
        for line in map(orjson.loads, store.read(info.key).splitlines()):
            if line["step"] in survivors[run_id]:
                counts.update(line["ids"])
                last |= {one: max(line["step"], last.get(one, -1)) for one in line["ids"]}
    return counts, last


def _survivors(store: Storage, term: int, step: int) -> dict[str, SurvivingSteps]:
    entries = read_steps(store)
    resumed = {record.term: (record.resumed_term, record.resumed_step) for record in run_records(store)}
    # A checkpoint of a run without a step of its own holds what the one before it held.
    while not any(entry.term == term and entry.step < step for entry in entries):
        origin = resumed.get(term, (None, None))
        if origin[0] is None or origin[1] is None:
            return {}
        term, step = origin[0], min(step, origin[1])
    kept = [entry for entry in entries if entry.term < term or (entry.term == term and entry.step < step)]
    return {part.run_id: part for part in surviving_steps(kept)}


def manifests(store: Storage) -> set[str]:
    """Keys of all checkpoints."""
    return set(checkpoint_keys(list_checkpoints(store)).values())


def check_fencing(store: MemoryStorage) -> None:
    """A run commits nothing once a newer one has opened its term; but what it was about to commit at that moment it may."""
    opened = {number: at for at, key in store.history if (number := layout.term_number(key)) is not None}
    after: Counter[int] = Counter()
    for at, key in store.history:
        name = layout.checkpoint_of_manifest(key)
        if name is not None and at > opened.get(name.term + 1, math.inf):
            after[name.term] += 1
    assert max(after.values(), default=0) <= 1, f"term -> checkpoints committed after the next one was opened: {dict(after)}"


def check_origin(run: SimulatedRun, store: MemoryStorage) -> None:
    """What was committed stays: a run goes on from no older term than the newest that had committed a checkpoint before."""
    names = [name for at, key in store.history if at < run.began_at and (name := layout.checkpoint_of_manifest(key)) is not None]
    newest = max((name.term for name in names), default=0)
    assert run.restored is None or run.restored[0] >= newest, f"{run.name} went on from {run.restored}, behind term {newest}"


def check_watermark(run: SimulatedRun, world: World, *, quorum: float, idle_timeout_s: float) -> None:
    """It never goes back, and where it rises a quorum of the ranks has trained that far in all of their partitions.

    What idle partitions hold back can't be seen from outside; with them, and in files, it is never ahead of all that was trained.
    """
    reached: dict[str, float] = {}
    for one in run.known:
        _reach(reached, world, one)
    strict = not world.bounded and math.isinf(idle_timeout_s)
    value, at = run.watermark, 0
    for number, point in enumerate(run.points):
        while at < len(run.trained) and run.trained[at][0] < point.last_step:
            _reach(reached, world, run.trained[at][1])
            at += 1
        if point.watermark == value or len(run.parts[number]) < run.settings.world_size:
            continue
        assert point.watermark is not None, f"{run.name}: the watermark {value} is gone at {point}"
        assert value is None or point.watermark > value, f"{run.name}: the watermark goes back from {value} at {point}"
        value = point.watermark
        assert value <= max(reached.values(), default=-math.inf), f"{run.name}: nothing was trained up to the watermark of {point}"
        if strict:
            _check_quorum(point, [[reached.get(name) for name in parts] for parts in run.parts[number].values() if parts], quorum)


def _check_quorum(point: SyncPoint, ranks: list[list[float | None]], quorum: float) -> None:
    assert point.watermark is not None
    there = sum(all(time is not None and time >= point.watermark for time in times) for times in ranks)
    wanted = min(max(math.ceil(quorum * len(ranks) - 1e-9), 1), len(ranks))
    assert there >= wanted, f"{there} of {len(ranks)} ranks have reached the watermark of {point}: {ranks}"


def _reach(reached: dict[str, float], world: World, one: int) -> None:
    name = world.part_of[one].name
    reached[name] = float(np.fmax(reached.get(name, -math.inf), world.time_of[one]))
