"""Random lines of runs: any partitions, kills, resumes on other numbers of ranks, faults, expiries, lists that grow, shrink and
reorder. Every row exactly once in the line that survives, or the documented error and nothing trained (B2 to B6)."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from tests.data.maxcompute.conftest import numbers
from tests.data.maxcompute.line import Line
from tidemill.clock import ManualClock
from tidemill.config.env import OdpsCredentials
from tidemill.config.maxcompute import MaxComputeConfig
from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
from tidemill.errors import SourceChangedError
from tidemill.testing.maxcompute import MaxComputeEmulator

SIZES = [0, 0, 1, 2, 63, 64, 65, 500, 1999, 2000, 4001]


class Story:
    """One line under a seed, and what a reader that follows the rules must have trained."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.emulator = MaxComputeEmulator(folder, clock=self.clock)
        self.ordered = self.random.random() < 0.7
        self.sizes = {day: self.random.choice(SIZES) for day in range(self.random.randint(1, 6))}
        self.emulator.add_table("prj", "t", {f"ds={day}": self.rows(day) for day in self.sizes})
        self.listed = self.random.sample(sorted(self.sizes), self.random.randint(1, len(self.sizes)))
        self.read_to_end: set[int] = set()
        self.line = Line()

    def rows(self, day: int):
        return numbers(day * 10_000, self.sizes[day]).select(["id"])

    def ids(self, days: set[int]) -> list[int]:
        return sorted(day * 10_000 + row for day in days for row in range(self.sizes[day]))

    def source(self) -> MaxComputeSource:
        reading = MaxComputeConfig(
            readers=self.random.randint(1, 4),
            rows_per_request=self.random.choice([50, 700, 100_000]),
            rows_per_batch=self.random.choice([10, 200, 20_000]),
        )
        path = "odps://prj/tables/t/" + "&".join(f"ds={day}" for day in self.listed)
        config = MaxComputeSourceConfig(paths=(path,), is_orderby_partition=self.ordered, reading=reading)
        credentials = OdpsCredentials(self.emulator.endpoint, "a test", "id", "key")
        return MaxComputeSource(config, ["id"], credentials=credentials, clock=self.clock)

    def break_things(self) -> None:
        faults = self.emulator.faults
        faults.clear()
        for _ in range(self.random.randint(0, 4)):
            skip = self.random.randint(0, 6)
            self.random.choice(
                [
                    partial(faults.end_early, self.random.randint(0, 2), skip=skip),
                    partial(faults.cut, self.random.choice([0, 200, 3000]), skip=skip),
                    partial(faults.refuse, "read_rows", status=500, code="InternalServerError", skip=skip),
                    partial(faults.drop, "read_rows", skip=skip),
                    partial(faults.slow_init, self.random.choice([1.0, 40.0])),
                    partial(faults.refuse, "create_read_session", status=503),
                ]
            )()

    def change_list(self) -> None:
        """Yesterday's list grows, shrinks, is reordered, or is another."""
        days = sorted(self.sizes)
        roll = self.random.random()
        if roll < 0.3:
            self.random.shuffle(self.listed)
        elif roll < 0.5:
            self.listed = self.listed + [day for day in days if day not in self.listed][:1]
        elif roll < 0.65 and len(self.listed) > 1:
            self.listed.remove(self.random.choice(self.listed))
        elif roll < 0.75:
            self.listed = self.random.sample(days, self.random.randint(1, len(days)))

    def unfinished(self) -> set[int]:
        """Days whose session has been read in part."""
        trained = {number // 10_000 for number in self.line.trained}
        return {day for day in trained if len([1 for number in self.line.trained if number // 10_000 == day]) < self.sizes[day]}

    def open_sessions(self) -> list[str]:
        if self.line.document is None:
            return []
        return [
            state.fingerprint["session"]
            for state in self.line.state.splits
            if state.intervals and sum(stop - start for start, stop in state.intervals) < (state.num_rows or 0)
        ]

    def run(self, batches: int | None) -> None:
        self.break_things()
        self.line.run(self.source, ranks=self.random.randint(1, 3), batches=batches, lost=self.random.randint(0, 2))

    def check(self) -> None:
        assert len(set(self.line.trained)) == len(self.line.trained), "a row was trained twice"
        assert set(self.line.trained) <= set(self.ids(set(self.sizes)))


def play(story: Story) -> None:
    for _ in range(story.random.randint(1, 6)):
        before, document, listed = list(story.line.trained), story.line.document, list(story.listed)
        story.change_list()
        expired = story.random.random() < 0.1 and story.open_sessions()
        if expired:
            story.emulator.end_session(story.random.choice(story.open_sessions()))
        gone = story.unfinished() - set(story.listed)
        try:
            story.run(story.random.randint(0, 30))
        except SourceChangedError:
            assert expired or gone or (not story.ordered and set(listed) != set(story.listed)), "an error without its reason"
            assert story.line.trained == before
            story.line.document = document
            story.listed = listed
            if expired:
                return
            continue
        assert not gone or not story.ordered, "a half-read partition has gone, and nobody minds"
        story.check()
    story.emulator.faults.clear()
    before_end = story.line.trained[:]
    story.run(None)
    story.check()
    assert set(story.ids(set(story.listed))) <= set(story.line.trained), "rows were left out"
    days_before = {number // 10_000 for number in before_end}
    assert sorted(story.line.trained) == story.ids(days_before | set(story.listed))


@pytest.mark.parametrize("seed", range(40))
def test_every_row_once_or_a_documented_error(tmp_path: Path, seed: int):
    story = Story(tmp_path, seed)
    try:
        play(story)
    finally:
        story.emulator.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_more(tmp_path: Path, seed: int):
    story = Story(tmp_path, seed)
    try:
        play(story)
    finally:
        story.emulator.close()
