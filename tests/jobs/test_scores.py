"""Scoring on several ranks, with ranks as threads: the output is all ranks' rows or nothing, whichever rank fails, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.contracts.output import OutputManifest
from tidemill.data.split import Delivery, Provenance
from tidemill.data.writers.output import OutputConfig
from tidemill.data.writers.parquet import ParquetOutput
from tidemill.errors import ConfigError, DataError, PeerLostError, SchemaError, StorageError
from tidemill.jobs import ranks as module
from tidemill.jobs import scores as loop
from tidemill.jobs.ranks import Ranks
from tidemill.jobs.scores import Rows, score_all
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage
from tidemill.testing.rank_threads import Result, ThreadAgreement, run_threads

Step = pa.Table | None | Exception


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    monkeypatch.setattr(loop, "_WAIT_S", 0.0)


class Doubling:
    """Scores by doubling; notes how often it was asked, since a part of a model may be elsewhere."""

    def __init__(self) -> None:
        self.asked = 0

    def score(self, batch: pa.Table | None) -> Mapping[str, np.ndarray]:
        self.asked += 1
        return {} if batch is None else {"twice": 2 * batch["n"].to_numpy()}


def take(steps: Sequence[Step]) -> Callable[[float], Delivery[Rows[pa.Table]] | None]:
    """A loader's `take`: tables, nothing for now (None), errors, then the end."""
    left: Iterator[Step] = iter(steps)

    def next_step(_: float) -> Delivery[Rows[pa.Table]] | None:
        try:
            step = next(left)
        except StopIteration:
            raise EOFError from None
        if isinstance(step, Exception):
            raise step
        return None if step is None else Delivery(Provenance((), step.num_rows), Rows(step, step))

    return next_step


def n(*values: int, kind: Any = None) -> pa.Table:
    return pa.table({"n": pa.array(values, kind or pa.int64())})


def run(
    folder: Path, *ranks: Sequence[Step], storages: Mapping[int, FaultyStorage] | None = None, overwrite: bool = False
) -> tuple[list[Result[OutputManifest]], list[Doubling], list[int]]:
    """Each rank's end, its scorer, and what rank 0 was told of its progress."""
    scorers, told = [Doubling() for _ in ranks], []

    def one(group: Any, rank: int) -> OutputManifest:
        storage = (storages or {}).get(rank) or LocalStorage(folder)
        output = ParquetOutput(OutputConfig(path="unused", overwrite=overwrite), storage)
        try:
            return score_all(
                Ranks(rank, len(ranks), ThreadAgreement(group, rank)),
                take(ranks[rank]),
                scorers[rank],
                lambda rows, scores: rows.append_column("twice", pa.array(scores["twice"])),
                output,
                told.append if rank == 0 else lambda rows: None,
            )
        finally:
            output.abort()

    return run_threads(len(ranks), one), scorers, told


def numbers(folder: Path) -> list[int]:
    return pq.read_table(folder)["n"].to_pylist()


def test_rows_of_all_ranks_in_rank_order_whoever_waits(tmp_path: Path) -> None:
    results, scorers, told = run(tmp_path, [None, n(0, 1), None, n(2)], [n(3), n(4), n(5)], [])
    assert [result.error for result in results] == [None] * 3
    assert {result.value.rows for result in results if result.value} == {6}
    assert numbers(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert pq.read_table(tmp_path)["twice"].to_pylist() == [0, 2, 4, 6, 8, 10]
    assert len({scorer.asked for scorer in scorers}) == 1, "the model was asked by all ranks together"
    assert told == sorted(told)
    assert told[-1] == 6


def test_no_rows_at_all_are_an_output_too(tmp_path: Path) -> None:
    results, scorers, _ = run(tmp_path, [], [None])
    assert [result.value.rows for result in results if result.value] == [0, 0]
    assert (tmp_path / "_SUCCESS").exists()
    assert [scorer.asked for scorer in scorers] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whichever_rank_fails_whenever_the_old_output_stays(tmp_path: Path, rank: int, place: int) -> None:
    run(tmp_path, [n(7)])
    steps: list[list[Step]] = [[n(0), n(1)], [n(2), n(3)]]
    steps[rank].insert(place, DataError("a bad row"))
    results, _, _ = run(tmp_path, *steps, overwrite=True)
    for other, result in enumerate(results):
        assert isinstance(result.error, DataError)
        assert str(result.error) == ("a bad row" if other == rank else f"rank {rank}: a bad row")
    assert numbers(tmp_path) == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_SUCCESS", "part-00000.parquet"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_one_rank_fails_all(tmp_path: Path, rank: int) -> None:
    run(tmp_path, [n(7)])
    faulty = FaultyStorage(LocalStorage(tmp_path))
    faulty.fail_at(1)
    results, _, _ = run(tmp_path, [n(0)], [n(1)], storages={rank: faulty}, overwrite=True)
    assert all(isinstance(result.error, StorageError) for result in results)
    assert numbers(tmp_path) == [7]


def test_ranks_whose_columns_differ_are_refused_by_name(tmp_path: Path) -> None:
    results, _, _ = run(tmp_path, [n(0)], [n(1, kind=pa.int32())])
    for result in results:
        assert isinstance(result.error, SchemaError)
        assert "'n' is int32 on rank 1" in str(result.error)
    assert not (tmp_path / "_SUCCESS").exists()


def test_columns_that_come_to_differ_later_are_refused_too(tmp_path: Path) -> None:
    results, _, _ = run(tmp_path, [n(0), n(1)], [None, None, None, n(1, kind=pa.int32())])
    assert all(isinstance(result.error, SchemaError) for result in results)
    assert not (tmp_path / "_SUCCESS").exists()


def test_an_output_that_is_there_is_refused_on_all_ranks_before_the_rest_is_scored(tmp_path: Path) -> None:
    run(tmp_path, [n(7)])
    results, scorers, _ = run(tmp_path, [n(0)] * 50, [n(1)] * 50)
    assert all(isinstance(result.error, ConfigError) for result in results)
    assert [scorer.asked for scorer in scorers] == [1, 1]
    assert numbers(tmp_path) == [7]


def test_a_rank_that_dies_ends_the_others_and_the_old_output_stays(tmp_path: Path) -> None:
    run(tmp_path, [n(7)])
    results, _, _ = run(tmp_path, [n(0), n(1)], [n(2), ZeroDivisionError("a defect")], overwrite=True)
    assert isinstance(results[0].error, PeerLostError)
    assert isinstance(results[1].error, ZeroDivisionError)
    assert numbers(tmp_path) == [7]
