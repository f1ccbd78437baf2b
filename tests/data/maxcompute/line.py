"""A line of runs without a model: source, positions, feed and loader as the training job puts them together; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from tidemill.contracts.progress import DataloaderState, SplitState
from tidemill.data.assignment import Assigned, AssignmentBase
from tidemill.data.loader import Loader
from tidemill.data.progress import merge_states
from tidemill.data.source import Source
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.positions import Saved, find_positions, renew
from tidemill.testing.rank_threads import ThreadAgreement, ThreadGroup, run_threads

BATCH = 64


@dataclass
class Line:
    """What a model_dir holds: the newest checkpoint's positions, and the ids in the line that survives."""

    document: bytes | None = None
    base: AssignmentBase | None = None
    trained: list[int] = field(default_factory=list)

    @property
    def state(self) -> DataloaderState:
        assert self.document is not None
        return DataloaderState.parse(self.document, where="dataloader_state.json")

    def saved(self) -> Saved | None:
        return None if self.document is None else Saved(self.state, self.base)

    def child(self) -> Line:
        """A new model_dir that continues from this one's checkpoint (--fine_tune_checkpoint with --continue_train)."""
        return Line(self.document, None)

    def run(
        self,
        make: Callable[[], Source],
        *,
        ranks: int = 1,
        batches: int | None = None,
        lost: int = 0,
        num_passes: int = 1,
        threads: int = 1,
    ) -> list[int]:
        """A run of new processes; the ids that its last checkpoint holds.

        `batches`: killed after so many on each rank, and `lost` more behind the checkpoint; None: to the end.
        """
        saved = self.saved()
        one = partial(_rank, make, saved, batches=batches, lost=lost, num_passes=num_passes)
        results = run_threads(ranks, one)
        errors = [result.error for result in results if result.error is not None]
        if errors:
            assert len(errors) == ranks, "some ranks go on without the others"
            assert len({(type(error), str(error)) for error in errors}) == 1, errors
            raise errors[0]
        ids, states, bases, passes = zip(*(result.value for result in results if result.value is not None), strict=True)
        assert len(set(passes)) == 1
        self.base = bases[0]
        self.document = DataloaderState(passes_completed=passes[0], splits=merge_states(states), watermark=None).to_bytes()
        new = [number for rank_ids in ids for number in rank_ids]
        self.trained += new
        return new


def _rank(
    make: Callable[[], Source],
    saved: Saved | None,
    group: ThreadGroup,
    rank: int,
    *,
    batches: int | None,
    lost: int,
    num_passes: int,
) -> tuple[list[int], list[SplitState], AssignmentBase, int]:
    source, agreement = make(), ThreadAgreement(group, rank)
    positions = find_positions(source, agreement, rank, saved, num_passes=num_passes)  # type: ignore[arg-type]

    def open_loader(assigned: list[Assigned]) -> Loader[list[int]]:
        return Loader(source, assigned, batch_size=BATCH, transform=_ids)

    feed = DataFeed(
        positions.splits,
        open_loader,  # type: ignore[arg-type]
        rank=rank,
        world_size=group.world_size,
        progress=positions.progress,
        base=positions.base,
        num_passes=num_passes,
        renew=renew(source, agreement, rank),  # type: ignore[arg-type]
    )
    try:
        ids = _train(feed, batches)
        answer = ids, feed.states(), feed.base, feed.progress.passes
        _train(feed, lost)
        return answer
    finally:
        feed.close()
        source.close()


def _train(feed: DataFeed, batches: int | None) -> list[int]:
    ids: list[int] = []
    while batches is None or batches > 0:
        try:
            delivery = feed.take(10.0)
        except EOFError:
            if batches is not None or not feed.next_pass():
                break
            continue
        assert delivery is not None
        feed.trained(delivery.provenance)
        ids += delivery.payload  # type: ignore[arg-type]
        batches = None if batches is None else batches - 1
    return ids


def _ids(table: pa.Table, size: int) -> list[int]:
    return table.column("id").to_pylist()
