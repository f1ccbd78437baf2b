from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.demo.conftest import RootWriter, impressions, kafka_run
from tidemill.demo.rows import RowCounts, RowsProof, prove_rows
from tidemill.demo.table import write_table

DATES = "20260302", "20260303"
BOUNDARIES = 100.0, 200.0


def produced() -> pa.Table:
    """Offsets 0 to 5 of one partition: four rows of day T, then two of the next day."""
    times = (110.0, 150.0, 130.0, 199.9, 200.0, 250.0)
    return impressions(
        *({"event_id": f"e{n}", "event_time": time, "partition": 0, "offset": n, "click": 0} for n, time in enumerate(times))
    )


class Life:
    """A life in which nothing went wrong, unless a test changes it."""

    def __init__(self, root: RootWriter, folder: Path) -> None:
        self.root = root
        self.tables = folder / DATES[0], folder / DATES[1]
        write_table(impressions(*({"event_id": f"t{n}", "event_time": 50.0 + n} for n in range(4))), (0.0, 100.0), self.tables[0])
        assert write_table(produced(), BOUNDARIES, self.tables[1]) == 4

    def play(self, *, left_out: int = 0, stream: tuple[tuple[int, int], ...] = ((4, 2),)) -> RowsProof:
        """`left_out`: rows at the end of day T's table that its job doesn't train."""
        for table in self.tables:
            runs = []
            for path in sorted(table.glob("*.parquet")):
                rows = pq.read_metadata(path).num_rows - (left_out if path == self.tables[1] / "part-1.parquet" else 0)
                runs.append(["parquet", str(path), 0, rows, rows, 1, 0])
            self.root.steps(f"daily/{table.name}", f"daily-{table.name}", 1, [(0, 1.0, runs)])
        self.root.steps(f"lineages/{DATES[0]}", "stream-0", 1, [(0, 1.0, [kafka_run(0, 0, 3)]), (1, 2.0, [kafka_run(0, 3, 2)])])
        steps = [(n, 1.0, [kafka_run(0, first, rows)]) for n, (first, rows) in enumerate(stream)]
        self.root.steps(f"lineages/{DATES[1]}", "stream-1", 1, steps)
        return prove_rows(self.root.storage, self.tables, BOUNDARIES, produced())


@pytest.fixture
def life(root: RootWriter, tmp_path: Path) -> Life:
    return Life(root, tmp_path / "data")


def test_a_life_without_a_fault_is_clean(life: Life) -> None:
    proof = life.play()
    assert proof.is_clean
    assert proof.first_table == RowCounts(4, 4, 0, 0)
    assert proof.second_table == RowCounts(4, 4, 0, 0)
    assert proof.stream == RowCounts(2, 2, 0, 0)
    assert proof.played == RowCounts(6, 6, 0, 0)
    # It stopped after offset 4: what came later is its successor's.
    assert proof.retired == RowCounts(5, 5, 0, 0)
    assert proof.to_json()["lost"] == 0


def test_a_row_of_the_table_that_its_job_left_out_is_lost(life: Life) -> None:
    proof = life.play(left_out=1)
    assert not proof.is_clean
    assert proof.played.lost == 1


def test_a_row_that_the_stream_left_out_is_lost(life: Life) -> None:
    assert life.play(stream=((4, 1),)).played.lost == 1


def test_a_row_in_two_steps_is_doubled(life: Life) -> None:
    assert life.play(stream=((4, 2), (5, 1))).played == RowCounts(6, 5, 0, 1)


def test_a_row_of_the_day_that_the_stream_trained_too_is_doubled(life: Life) -> None:
    proof = life.play(stream=((3, 3),))
    assert not proof.is_clean
    assert proof.played.doubled == 1


def test_a_row_that_the_table_lacks_is_lost(life: Life) -> None:
    less = produced().slice(1)
    for path in life.tables[1].glob("*"):
        path.unlink()
    life.tables[1].rmdir()
    write_table(less, BOUNDARIES, life.tables[1])
    assert life.play().played.lost == 1
