"""Rank 0 finds the splits, and shares them or its error, however long it takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tidemill.data.split import Split, SplitId
from tidemill.errors import DeadlineError, SourceChangedError
from tidemill.jobs.discovery import share_splits
from tidemill.testing.rank_threads import ThreadAgreement, ThreadGroup, run_threads

SPLITS = [Split(SplitId("maxcompute", "t/ds=1"), 5, {"session": "S"}, in_turn=True), Split(SplitId("kafka", "c:0"), None)]


class Watched(ThreadAgreement):
    """Says when rank 0 had nothing to tell yet."""

    def __init__(self, group: ThreadGroup, rank: int, empty: threading.Event) -> None:
        super().__init__(group, rank)
        self._empty = empty

    def share(self, value: object) -> object:
        answer = super().share(value)
        if answer == {"value": {}}:
            self._empty.set()
        return answer


def test_other_ranks_do_not_wait_in_one_collective_for_a_slow_source():
    """A session may take minutes; a collective times out after one."""
    empty = threading.Event()

    def find() -> Sequence[Split]:
        assert empty.wait(20), "the other ranks hear nothing until all is found"
        return SPLITS

    results = run_threads(2, lambda group, rank: share_splits(Watched(group, rank, empty), rank, find))  # type: ignore[arg-type]
    assert [result.value for result in results] == [SPLITS, SPLITS]


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_is_every_ranks(ranks: int):
    def find() -> Sequence[Split]:
        raise SourceChangedError("t/ds=1: gone")

    results = run_threads(ranks, lambda group, rank: share_splits(ThreadAgreement(group, rank), rank, find))  # type: ignore[arg-type]
    assert [(type(result.error), str(result.error)) for result in results] == ranks * [(SourceChangedError, "t/ds=1: gone")]


def test_a_source_that_never_answers_ends_every_rank():
    ends = threading.Event()

    def find() -> Sequence[Split]:
        ends.wait(60)
        return SPLITS

    def share(group: ThreadGroup, rank: int) -> list[Split]:
        return share_splits(ThreadAgreement(group, rank), rank, find, deadline_s=0.2)  # type: ignore[arg-type]

    try:
        results = run_threads(2, share)
    finally:
        ends.set()
    assert [type(result.error) for result in results] == [DeadlineError, DeadlineError]
    assert "within 0.2 s" in str(results[1].error)
