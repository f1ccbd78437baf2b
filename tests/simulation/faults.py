"""Faults that are put into the product on purpose: the simulation must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

from tidemill import cadence
from tidemill.checkpoint import discovery, manager, parts, retention
from tidemill.checkpoint.chain import Chain
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.data import assignment
from tidemill.data.loader import Loader
from tidemill.data.progress import Progress
from tidemill.data.rebatch import Rebatcher
from tidemill.data.watermark import Watermark
from tidemill.jobs.feed import DataFeed
from tidemill.training import loop
from tidemill.training.loop import TrainingLoop

Fault = Callable[[], AbstractContextManager]
FAULTS: dict[str, tuple[Fault, int]] = {}
"""Name -> (what puts it in, within how many stories it must be found)."""


def within(stories: int) -> Callable[[Fault], Fault]:
    def register(fault: Fault) -> Fault:
        FAULTS[fault.__name__] = (fault, stories)
        return fault

    return register


@within(60)
def last_run_of_a_batch_is_forgotten():
    advance = Progress.advance

    def forgetful(self, provenance):
        runs = provenance.runs
        advance(self, replace(provenance, runs=runs[:-1]) if len(runs) > 1 else provenance)

    return patch.object(Progress, "advance", forgetful)


@within(120)
def rows_count_before_they_are_trained():
    take = DataFeed.take

    def early(self, timeout_s):
        delivery = take(self, timeout_s)
        if delivery is not None:
            self.progress.advance(delivery.provenance)
        return delivery

    return patch.object(DataFeed, "take", early)


@within(150)
def part_is_written_before_its_files():
    def write_part(self, job):
        later = _Later()
        part = parts.write_capture(later, self._folder(job), self._writer.rank, job.capture)
        manager.write_part(self._storage, self._folder(job), self._writer.rank, part.to_bytes())
        for key, data in later.written:
            self._storage.write(key, data)

    return patch.object(CheckpointManager, "_write_part", write_part)


class _Later:
    url = "memory://later"

    def __init__(self):
        self.written = []

    def write(self, key, *chunks):
        self.written.append((key, b"".join(bytes(chunk) for chunk in chunks)))


@within(60)
def oldest_checkpoint_is_restored():
    def oldest(storage, manifests, found):
        whole = ((manifests[at], discovery.whole_checkpoint(storage, manifests[at], found)) for at in sorted(manifests))
        return next(((key, manifest) for key, manifest in whole if manifest is not None), None)

    return patch.object(discovery, "_newest_whole", oldest)


@within(60)
def shares_leave_a_gap():
    return patch.object(assignment, "_first", lambda rows, size, rank: rank * (rows // size) if rank < size else rows - 1)


@within(60)
def only_rank_zeros_positions_are_saved():
    return patch.object(manager, "merge_states", lambda states: list(next(iter(states))))


@within(60)
def passes_are_not_counted():
    return patch.object(DataFeed, "end_pass", lambda self: None)


@within(60)
def batches_lose_a_row():
    cut = Rebatcher.cut

    def lossy(self, size):
        table, provenance = cut(self, size)
        return (table.slice(1) if table.num_rows == 7 else table), provenance

    return patch.object(Rebatcher, "cut", lossy)


@within(60)
def more_is_taken_than_the_round_trains():
    limit = TrainingLoop._limit
    return patch.object(TrainingLoop, "_limit", lambda self, step: limit(self, step) + (not self._finish))


@within(120)
def streams_come_out_of_order():
    def any_ready(self):
        return next((slot for slot in self._slots if slot.ready), None)

    return patch.object(Loader, "_ready_slot", any_ready)


@within(120)
def new_partitions_are_not_known():
    return patch.object(Loader, "take_found", lambda self: [])


@within(60)
def watermark_is_of_the_fastest_partition():
    report = Watermark.report

    def fastest(self, pending, idle):
        value, abstains = report(self, pending, idle)
        return max((time for time in self._reached.values() if time == time), default=value), abstains

    return patch.object(Watermark, "report", fastest)


@within(60)
def one_rank_is_a_quorum():
    def first(values, abstains, share):
        return max((v for v, abstain in zip(values, abstains, strict=True) if not abstain and v is not None), default=None)

    return patch.object(cadence, "quorum", first)


@within(60)
def watermark_begins_anew_each_round():
    agree = loop.agree
    return patch.object(loop, "agree", lambda reports, **known: agree(reports, **{**known, "watermark": None}))


@within(120)
def fenced_runs_go_on():
    return patch.object(manager, "require_unfenced", lambda storage, term: None)


@within(60)
def one_part_too_few_is_enough():
    await_parts = manager.await_parts

    def hasty(storage, prefix, world_size, deadline_s, clock):
        return await_parts(storage, prefix, max(1, world_size - 1), deadline_s, clock)

    return patch.object(manager, "await_parts", hasty)


@within(60)
def files_that_increments_need_are_deleted():
    return patch.object(retention, "_needed", lambda kept, spare: lambda key: False)


@within(120)
def rows_of_a_failed_save_are_forgotten():
    wants_full = property(lambda self: self._increments is None or not (self._has_base or self._number > 0))
    return patch.object(CheckpointManager, "wants_full", wants_full)


@within(120)
def folding_drops_an_increment():
    below = CheckpointManager._below

    def lossy(self, capture_parts):
        fold, chain = below(self, capture_parts)
        return fold, Chain(chain.tables[:-1], chain.optimizer, chain.increments) if fold and chain.increments else chain

    return patch.object(CheckpointManager, "_below", lossy)
