from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.contracts.lineage import TermRecord
from tidemill.data.split import Run, SplitId
from tidemill.errors import CorruptError
from tidemill.jobs.ledger import (
    SurvivingSteps,
    TrainedRun,
    check_ledger,
    message_positions,
    read_steps,
    surviving_steps,
    trained_positions,
)
from tidemill.storage.backends.local import LocalStorage

CLICKS = SplitId("kafka", "clicks:0")


def entry(term: int, step: int, start: int, rows: int = 1, *, split: SplitId = CLICKS, stride: int = 1, gap: int = 0) -> TrainedRun:
    run = Run(split, start, start + gap + rows * stride, rows, stride, gap)
    return TrainedRun(f"run{term}", term, step, float(step), run)


def test_a_life_with_a_lost_checkpoint_trained_every_row_of_its_line_once(life) -> None:
    trained = read_steps(LocalStorage(life.lineage))
    assert [(part.term, part.first, part.stop, part.logged_stop) for part in surviving_steps(trained)] == [
        (1, 0, 4, 4),
        (2, 4, 4, 10),
        (3, 4, 14, 14),
    ]
    split = SplitId("kafka", "events:0")
    assert list(trained_positions(trained)) == [split]
    ledger = check_ledger(trained, {split: message_positions(0, 14 * 16)})
    assert ledger.is_clean
    assert (ledger.rows, ledger.trained_once, ledger.lost, ledger.doubled, ledger.unlisted) == (224, 224, 0, 0, 0)


def test_rows_that_the_producer_lists_and_nobody_trained_are_lost(life) -> None:
    ledger = check_ledger(read_steps(LocalStorage(life.lineage)), {SplitId("kafka", "events:0"): message_positions(0, 230)})
    assert (ledger.lost, ledger.first_lost) == (6, (SplitId("kafka", "events:0"), 224 << 20))
    assert not ledger.is_clean


def test_a_split_that_nobody_trained_is_lost_as_a_whole(life) -> None:
    ledger = check_ledger(read_steps(LocalStorage(life.lineage)), {SplitId("kafka", "events:1"): message_positions(0, 3)})
    assert (ledger.rows, ledger.lost) == (3, 3)


def test_a_run_keeps_its_steps_up_to_the_earliest_one_that_a_later_run_began_with() -> None:
    trained = [entry(1, step, step) for step in range(10)]
    trained += [entry(2, step, step) for step in range(8, 12)]
    trained += [entry(3, step, step) for step in range(4, 6)]
    trained += [entry(4, 6, 6)]
    assert surviving_steps(trained) == [
        SurvivingSteps("run1", 1, 0, 4, 10),
        SurvivingSteps("run2", 2, 8, 8, 12),
        SurvivingSteps("run3", 3, 4, 6, 6),
        SurvivingSteps("run4", 4, 6, 7, 7),
    ]
    assert check_ledger(trained, {CLICKS: np.arange(7)}).is_clean


def test_the_record_tells_which_run_the_line_went_on_from() -> None:
    """A frozen writer may commit a checkpoint after the next term has looked for the newest; a third run then goes on from it."""
    trained = [entry(1, step, step) for step in range(10)]
    trained += [replace(entry(2, step, step), resumed=(1, 6)) for step in (6, 7)]
    trained += [replace(entry(3, step, step), resumed=(1, 9)) for step in (9, 10)]
    assert [(part.first, part.stop) for part in surviving_steps(trained)] == [(0, 9), (6, 6), (9, 11)]
    assert check_ledger(trained, {CLICKS: np.arange(11)}).is_clean


def test_a_row_in_two_surviving_steps_is_doubled() -> None:
    ledger = check_ledger([entry(1, 0, 0, 4), entry(1, 1, 3, 2)], {CLICKS: np.arange(5)})
    assert (ledger.trained_once, ledger.doubled, ledger.first_doubled) == (4, 1, (CLICKS, 3))
    assert not ledger.is_clean


def test_positions_without_a_row_are_not_trained() -> None:
    """A run covers what was dropped before its rows; a producer that lists such a row has lost it."""
    ledger = check_ledger([entry(1, 0, 0, 2, gap=3)], {CLICKS: np.arange(5)})
    assert (ledger.trained_once, ledger.lost) == (2, 3)


def test_a_trained_row_that_the_producer_does_not_list_is_told() -> None:
    ledger = check_ledger([entry(1, 0, 0, 4)], {CLICKS: np.arange(3)})
    assert (ledger.trained_once, ledger.unlisted, ledger.is_clean) == (3, 1, False)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_whatever_the_crashes_a_replay_from_checkpoints_is_clean(sizes: list[int], data: st.DataObject) -> None:
    """Each run goes on at some step that was reached before, and trains the same rows from there, in other batches."""
    trained: list[TrainedRun] = []
    position = {0: 0}
    for term, size in enumerate(sizes, start=1):
        step = data.draw(st.sampled_from(sorted(position)))
        at = position[step]
        position = {known: where for known, where in position.items() if known <= step}
        for number in range(size):
            trained.append(entry(term, step + number, at, rows=number + 1))
            at += number + 1
            position[step + number + 1] = at
    assert check_ledger(data.draw(st.permutations(trained)), {CLICKS: np.arange(at)}).is_clean


@given(st.integers(0, 50), st.integers(0, 5), st.integers(1, 4), st.integers(0, 8), st.integers(0, 100))
def test_an_entry_holds_exactly_its_rows(start: int, gap: int, stride: int, rows: int, position: int) -> None:
    found = entry(1, 0, start, rows, stride=stride, gap=gap)
    assert found.holds(position) == (position in [start + gap + n * stride for n in range(rows)])


def test_messages_with_several_rows_have_a_position_each() -> None:
    assert message_positions(5, 7, rows=2).tolist() == [5 << 20, (5 << 20) + 1, 6 << 20, (6 << 20) + 1]


class TestReadSteps:
    def write(self, folder: Path, text: str, *, term: int | None = 1) -> LocalStorage:
        storage = LocalStorage(folder)
        storage.write("runs/a/steps-00000.jsonl", text.encode())
        if term:
            storage.write("terms/00000001.json", TermRecord(term=term, run_id="a", nonce="n", created_at=0.0).to_bytes())
        return storage

    LINE = '{"step": 0, "at": 1.5, "runs": [["kafka", "clicks:0", 0, 2097152, 2, 1048576, 0]]}\n'

    def test_a_line_that_its_process_did_not_live_to_finish_is_left_out(self, tmp_path: Path) -> None:
        (found,) = read_steps(self.write(tmp_path, self.LINE + self.LINE[:40]))
        assert found == TrainedRun("a", 1, 0, 1.5, Run(CLICKS, 0, 2 << 20, 2, 1 << 20, 0))

    def test_any_other_bad_line_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptError, match=r"steps-00000\.jsonl, line 2"):
            read_steps(self.write(tmp_path, self.LINE + '{"step": 1}\n' + self.LINE))

    def test_a_run_without_a_term_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptError, match="run a has no term"):
            read_steps(self.write(tmp_path, self.LINE, term=None))

    def test_a_lineage_inside_a_root_reads_the_same(self, life, tmp_path: Path) -> None:
        shutil.copytree(life.lineage, tmp_path / "lineages" / "20240102")
        assert read_steps(LocalStorage(tmp_path), prefix="lineages/20240102") == read_steps(LocalStorage(life.lineage))
