"""Passes and steps of the feed behind the loop: equal on all ranks, counted at their last step, resumed (DCL 9.10, 9.17).

The step is a small collective, so that ranks that disagree hang or fail as they would in training.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from tidemill.cadence import EverySteps, SyncPoint
from tidemill.data.assignment import AssignmentBase
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.progress import Progress
from tidemill.data.rebatch import BatchRule
from tidemill.data.shuffle import Shuffle
from tidemill.distributed.agreement import Agreement
from tidemill.distributed.runtime import Runtime
from tidemill.errors import DataError
from tidemill.features.batch import Batch, IdColumns
from tidemill.jobs.duties import EveryPasses
from tidemill.jobs.feed import DataFeed
from tidemill.testing.rank_threads import ThreadAgreement, ThreadGroup, run_threads
from tidemill.testing.ranks import run_ranks
from tidemill.testing.scripted_source import Rows, ScriptedSource
from tidemill.training.loop import Duties, Duty, LoopSettings, LoopState, TrainingLoop

NONE = IdColumns((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


def batch_of(table: pa.Table, size: int) -> Batch:
    rows = torch.tensor(table.column("row").to_pylist(), dtype=torch.float32)
    weights = torch.zeros(size)
    weights[: len(rows)] = 1
    return Batch(len(rows), size, torch.zeros(size, 0), NONE, NONE, {"row": rows}, weights, {})


def source_of(*sizes: int) -> ScriptedSource:
    bounds = list(itertools.accumulate(sizes, initial=0))
    return ScriptedSource(
        {
            f"file-{i}": [Rows(pa.table({"row": range(start, stop), "cost": [row % 5 for row in range(start, stop)]}))]
            for i, (start, stop) in enumerate(itertools.pairwise(bounds))
            if stop > start
        }
    )


@dataclass
class Saved:
    """What a checkpoint holds of the data: all ranks' progress, the assignment, the step, and the passes of the schedules."""

    step: int = 0
    states: list[list[Any]] = field(default_factory=list)
    base: dict[str, Any] | None = None
    passes: int = 0
    scheduled: int = 0

    def progress(self) -> Progress:
        return Progress.merge([Progress.from_states(states, passes=self.passes) for states in self.states] or [Progress()])


@dataclass
class Life:
    """What one rank saw. `rows`: (pass, row)."""

    steps: int = 0
    rows: list[tuple[int, int]] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)
    reason: str = ""


class Step:
    """Sums over all ranks, and refuses a weight other than what was agreed (`training.loop.Step`)."""

    def __init__(self, life: Life, all_reduce: Any, size: int) -> None:
        self._life, self._all_reduce, self._size = life, all_reduce, size
        self.feed: DataFeed

    def __call__(self, batch: Batch, global_weight: float) -> dict[str, np.ndarray]:
        assert batch.size == self._size, "every rank feeds exactly so many rows"
        assert self._all_reduce(float(batch.weights.sum())) == global_weight > 0
        self._life.steps += 1
        if batch.num_rows:
            rows = [int(row) for row in batch.labels["row"]]
            self._life.sizes.append(batch.num_rows)
            self._life.batches.append(rows)
            self._life.rows += [(self.feed.progress.passes, row) for row in rows]
        return {}

    def padding(self) -> Batch:
        return batch_of(pa.table({"row": pa.array([], pa.int64())}), self._size)


def live(
    source: ScriptedSource,
    rule: BatchRule,
    agreement: Any,
    all_reduce: Any,
    place: tuple[int, int],
    *,
    saved: Saved | None = None,
    num_passes: int | None = 1,
    settings: LoopSettings | None = None,
    seed: int | None = None,
    save_passes: int = 0,
) -> Life:
    rank, world_size = place
    saved, life = saved or Saved(), Life()
    progress, scheduled = saved.progress(), [saved.scheduled]

    def shuffle(passes: int) -> Shuffle | None:
        return None if seed is None else Shuffle(seed, passes, 2 * rule.size)

    def open_loader(assigned: Any) -> Loader[Batch]:
        reading = ReadPlan(readers=2, shuffle=shuffle(progress.passes))
        return Loader(source, assigned, batch_size=rule.size, transform=batch_of, rule=rule, reading=reading)

    feed = DataFeed(
        source.discover(),
        open_loader,
        rank=rank,
        world_size=world_size,
        progress=progress,
        base=AssignmentBase.from_json(saved.base) if saved.base else None,
        num_passes=num_passes,
        on_pass=lambda: scheduled.append(scheduled[-1] + 1),
        order=lambda splits, passes: splits if seed is None else shuffle(passes).splits(splits),
    )

    def save(point: SyncPoint) -> int:
        life.saves.append(Saved(point.last_step, [feed.states()], feed.base.to_json(), feed.progress.passes, scheduled[-1]))
        return 0

    step = Step(life, all_reduce, rule.size)
    step.feed = feed
    trigger = EveryPasses(save_passes, lambda: feed.progress.passes) if save_passes else EverySteps(1, saved.step)
    duty = Duty(save, [trigger], committed_step=saved.step if saved.states else -1)
    loop = TrainingLoop(
        agreement=agreement,
        feed=feed,
        step=step,
        duties=Duties(checkpoint=duty),
        settings=settings or LoopSettings(refuse_empty=True),
        state=LoopState(step=saved.step),
    )
    try:
        life.reason = loop.run().reason.name
    finally:
        feed.close()
    return life


def on_threads(source: ScriptedSource, rule: BatchRule, world_size: int, **options: Any) -> list[Life]:
    """One life a rank. Raises what the first rank raised."""

    def run(group: ThreadGroup, rank: int) -> Life:
        return live(
            source, rule, ThreadAgreement(group, rank), lambda w: sum(group.gather("step", rank, w)), (rank, world_size), **options
        )

    results = run_threads(world_size, run)
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.value for result in results]


def merged(lives: list[Life], number: int) -> Saved:
    """The ranks' n-th save as one checkpoint."""
    saves = [life.saves[number] for life in lives]
    assert len({(save.step, save.passes, save.scheduled) for save in saves}) == 1
    return Saved(saves[0].step, [s for save in saves for s in save.states], saves[0].base, saves[0].passes, saves[0].scheduled)


def _sample(runtime: Runtime) -> list[tuple[Any, ...]]:
    """What this rank saw of each combination, one after the other over the same group."""

    def all_reduce(weight: float) -> float:
        total = torch.tensor([weight], dtype=torch.float64)
        dist.all_reduce(total, group=runtime.side)
        return float(total)

    seen = []
    for rows, size, by_cost, drop in itertools.product((1, 7, 8, 9, 19), (1, 3, 4), (False, True), (False, True)):
        rule = BatchRule(size, "cost" if by_cost else "", 5.0 if by_cost else math.inf, drop)
        try:
            life = live(
                source_of(rows), rule, Agreement(runtime), all_reduce, (runtime.rank, 2), num_passes=2, settings=LoopSettings(4)
            )
        except DataError:
            life = Life()
        seen.append((rows, size, by_cost, drop, life.steps, life.sizes, life.rows))
    return seen


def test_two_processes_take_the_same_steps_over_gloo() -> None:
    """DCL 9.10: uneven shares, short batches, remainders, cost; two passes each, rounds of 4 steps."""
    one, other = run_ranks(2, _sample)
    for mine, others in zip(one, other, strict=True):
        rows, size, _, drop, steps, sizes, seen = mine
        *same, other_steps, other_sizes, other_seen = others
        assert [*mine[:4]] == same
        assert steps == other_steps
        assert all(0 < count <= size for count in (*sizes, *other_sizes))
        trained = sorted(seen + other_seen)
        assert len(set(trained)) == len(trained)
        if not drop:
            assert trained == [(number, row) for number in range(2) for row in range(rows)]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_at_any_step_of_three_passes_trains_each_pass_once(world_size: int, seed: int | None) -> None:
    """DCL 9.17: also exactly on the last batch of a pass, whose checkpoint counts the pass, and of the last one."""
    source, rule = source_of(7, 6), BatchRule(3)
    whole = on_threads(source, rule, world_size, num_passes=3, seed=seed)
    steps = whole[0].steps
    rows = [row for life in whole for row in life.rows]
    assert sorted(rows) == [(number, row) for number in range(3) for row in range(13)]
    saves = [merged(whole, number) for number in range(steps)]
    per_pass = steps // 3
    assert [save.passes for save in saves] == [step // per_pass for step in range(1, steps + 1)]
    assert [save.scheduled for save in saves] == [save.passes for save in saves], "schedules by epoch stand where the data stands"
    for save in saves[:-1]:
        rest = on_threads(source, rule, world_size, num_passes=3, seed=seed, saved=save)
        expected = [life.batches for life in whole]
        for life, batches in zip(rest, expected, strict=True):
            assert life.batches == batches[len(batches) - len(life.batches) :], "the same batches as the uninterrupted run"
        assert rest[0].steps == steps - save.step
        assert merged(rest, -1).scheduled == 3


def test_a_finished_job_that_goes_on_writes_nothing() -> None:
    """DCL 9.17."""
    source, rule = source_of(6), BatchRule(3)
    done = merged(on_threads(source, rule, 1, num_passes=2), -1)
    assert (done.passes, done.step) == (2, 4)
    again = on_threads(source, rule, 1, num_passes=2, saved=done)
    assert (again[0].steps, again[0].saves, again[0].reason) == (0, [], "EXHAUSTED")


def test_one_batch_a_pass_is_trained_once_a_pass() -> None:
    """DCL 9.17: a data set of one batch for 3 passes, killed after each."""
    source, rule = source_of(2), BatchRule(4)
    whole = on_threads(source, rule, 1, num_passes=3)[0]
    assert whole.batches == [[0, 1]] * 3
    for number in range(3):
        rest = on_threads(source, rule, 1, num_passes=3, saved=merged([whole], number))[0]
        assert rest.batches == [[0, 1]] * (2 - number)


def test_steps_go_on_across_passes_until_the_limit() -> None:
    """DCL 9.17: num_steps passes over the data as often as it takes, and is met within a pass."""
    source, rule = source_of(7), BatchRule(3)
    life = on_threads(source, rule, 1, num_passes=None, settings=LoopSettings(num_steps=8))[0]
    assert (life.steps, life.reason) == (8, "STEP_LIMIT")
    assert [row for _, row in life.rows] == [*range(7), *range(7), *range(6)]
    half = on_threads(source, rule, 1, num_passes=None, settings=LoopSettings(num_steps=4))[0]
    rest = on_threads(source, rule, 1, num_passes=None, settings=LoopSettings(num_steps=8), saved=merged([half], -1))[0]
    assert half.rows + rest.rows == life.rows


def test_passes_are_counted_for_checkpoints_when_steps_bound_the_run() -> None:
    """DCL 9.17: save_checkpoints_epochs works with num_steps, too."""
    life = on_threads(source_of(7), BatchRule(3), 1, num_passes=None, settings=LoopSettings(num_steps=14), save_passes=2)[0]
    assert [(save.step, save.passes) for save in life.saves] == [(6, 2), (12, 4), (14, 4)], "the last one is the ending's"


@pytest.mark.parametrize(("sizes", "rule"), [((), BatchRule(3)), ((2,), BatchRule(3, drop_remainder=True))])
def test_empty_input_is_an_error_on_every_rank(sizes: tuple[int, ...], rule: BatchRule) -> None:
    """DCL 9.17: no checkpoint, and an exit code that isn't 0."""
    with pytest.raises(DataError, match="holds no row to train on") as raised:
        on_threads(source_of(*sizes), rule, 2)
    assert raised.value.exit_code != 0


def test_another_number_of_ranks_goes_on_with_each_row_once() -> None:
    source, rule = source_of(9, 5), BatchRule(2)
    first = on_threads(source, rule, 2, num_passes=2, seed=5)
    cut = merged(first, 1)
    before = [row for life in first for row in [row for batch in life.batches[: cut.step] for row in batch]]
    rest = on_threads(source, rule, 3, num_passes=2, seed=5, saved=cut)
    rows = [(0, row) for row in before] + [row for life in rest for row in life.rows]
    assert sorted(rows) == [(number, row) for number in range(2) for row in range(14)]
