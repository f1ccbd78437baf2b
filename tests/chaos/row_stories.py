"""Stories of the validating trainer: ranks that come, go and die over any kind of source, and ids to be trained once each."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.chaos.row_scenes import CsvScene, FolderScene, KafkaScene, MaxComputeScene, ParquetScene, Scene
from tests.e2e.workshop import eventually
from tidemill.errors import CheckpointError
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.validating.ids import Verdict, judge
from tidemill.testing.validating.processes import TrainerRun
from tidemill.testing.validating.trainer import TrainerSpec

KINDS = ("parquet", "csv", "maxcompute", "kafka", "folder")
_WAIT_S = 120.0
_INTERRUPTED = 75


@dataclass(frozen=True, slots=True)
class RowFigures:
    """What one story came to. `kills`: SIGKILLs of runs at work; `saves`: those of them at an operation of the store."""

    kind: str
    seed: int
    wall_s: float
    runs: int
    kills: int
    saves: int
    disturbances: int
    ids: int
    lost: int
    doubled: int
    unlisted: int
    model_is_equal: bool

    @property
    def is_clean(self) -> bool:
        return not any((self.lost, self.doubled, self.unlisted)) and self.model_is_equal


class _Story:
    def __init__(self, seed: int, folder: Path, kind: str, broker: DevelopmentBroker | None) -> None:
        self.rng = np.random.default_rng([seed, KINDS.index(kind)])
        self.scene = _make_scene(kind, self.rng.spawn(1)[0], folder / "data", broker)
        self.folder = folder / "trainer"
        self.kills = self.saves = self.disturbances = self.runs = 0
        self._fixed = {"batch_size": int(self.rng.choice([5, 16, 64])), "checkpoint_steps": int(self.rng.choice([2, 5, 11]))}
        self.passes = 1
        if self.scene.bounded:
            self.passes = int(self.rng.choice([1, 1, 2]))
            self._fixed |= {"num_passes": self.passes, "shuffle_rows": int(self.rng.choice([0, 0, 100, 1000]))}

    def spec(self) -> TrainerSpec:
        """What may differ from run to run does."""
        return TrainerSpec(
            folder=str(self.folder),
            source=self.scene.source,
            threads=int(self.rng.integers(1, 4)),
            reader_threads=int(self.rng.integers(1, 4)) if self.scene.bounded else 1,
            in_order=bool(self.rng.random() < 0.7) if self.scene.bounded else True,
            steps_per_round=int(self.rng.choice([1, 1, 3])),
            # Slow enough that a bounded source outlasts a few runs.
            step_s=self._fixed["batch_size"] * float(self.rng.choice([0.0004, 0.0008] if self.scene.bounded else [0.0, 0.0001])),
            **self._fixed,
        )

    def act(self) -> bool:
        """One run that ends before its time; False if it was done before."""
        ranks = int(self.rng.integers(1, 4))
        dies_at = {}
        if inside := bool(self.rng.random() < 0.35):
            dies_at = {int(self.rng.integers(ranks)): int(self.rng.integers(1, 90))}
        self.runs += 1
        with TrainerRun(self.spec(), ranks, dies_at=dies_at) as run:
            if self.rng.random() < 0.3 and self.scene.disturb():
                self.disturbances += 1
            until = time.monotonic() + float(self.rng.uniform(0.8, 3.5)) + 0.4 * ranks
            while time.monotonic() < until and not run.is_over:
                time.sleep(0.02)
            if inside and any(process.returncode == -signal.SIGKILL for process in run.processes):
                self.kills, self.saves = self.kills + 1, self.saves + 1
            elif not run.is_over:
                self._end(run)
            else:
                codes = run.wait(_WAIT_S)
                assert self.scene.bounded, run.log.read_text()[-3000:]
                assert set(codes) == {0}, (codes, run.log.read_text()[-3000:])
                return False
            return True

    def _end(self, run: TrainerRun) -> None:
        choice = self.rng.random()
        if choice < 0.15:
            run.ask_to_end()
            codes = run.wait(_WAIT_S)
            # Asked before it could listen, a process ends at once.
            assert set(codes) <= {0, _INTERRUPTED, -signal.SIGTERM}, (codes, run.log.read_text()[-3000:])
            return
        self.kills += 1
        if choice < 0.4:
            run.kill(int(self.rng.integers(len(run.processes))))
            # The others have to find out by themselves.
            run.wait(_WAIT_S)
        else:
            run.kill()

    def finish(self) -> Verdict:
        """Train what is left."""
        storage = LocalStorage(self.folder)
        self.runs += 1
        before = self.scene.num_ids
        with TrainerRun(self.spec(), int(self.rng.integers(1, 4))) as run:
            if not self.scene.bounded:
                with self.scene.going_on():
                    # Rows that no earlier run can have trained: once they are, this run listens when it is asked to end.
                    eventually(lambda: self.scene.num_ids > before, timeout_s=_WAIT_S, what="one row more")
                eventually(
                    lambda: run.is_over or not _judged(storage, self.scene).lost, timeout_s=_WAIT_S, what="all rows", pause_s=0.3
                )
                run.ask_to_end()
            codes = run.wait(_WAIT_S)
        expected = 0 if self.scene.bounded else _INTERRUPTED
        assert set(codes) == {expected}, (codes, run.log.read_text()[-3000:])
        return judge(storage, range(self.scene.num_ids), passes=self.passes)


def play(seed: int, folder: Path, kind: str, broker: DevelopmentBroker | None, *, max_acts: int = 8) -> RowFigures:
    """One story from its seed. Raises AssertionError if something happens that never may; the folder then shows what."""
    began = time.monotonic()
    story = _Story(seed, folder, kind, broker)
    try:
        os.environ.update(story.scene.environment)
        with story.scene.going_on():
            acts = range(int(story.rng.integers(3, max_acts + 1)))
            all(story.act() for _ in acts)
        verdict = story.finish()
    finally:
        story.scene.close()
    return RowFigures(
        kind=kind,
        seed=seed,
        wall_s=round(time.monotonic() - began, 1),
        runs=story.runs,
        kills=story.kills,
        saves=story.saves,
        disturbances=story.disturbances,
        ids=verdict.ids,
        lost=len(verdict.lost),
        doubled=len(verdict.doubled),
        unlisted=len(verdict.unlisted),
        model_is_equal=verdict.model_is_equal,
    )


def _make_scene(kind: str, rng: np.random.Generator, folder: Path, broker: DevelopmentBroker | None) -> Scene:
    if kind == "kafka":
        assert broker is not None
        return KafkaScene(rng, folder, broker)
    scenes: dict[str, type[Scene]] = {
        "parquet": ParquetScene,
        "csv": CsvScene,
        "maxcompute": MaxComputeScene,
        "folder": FolderScene,
    }
    return scenes[kind](rng, folder)


def _judged(storage: LocalStorage, scene: Scene) -> Verdict:
    try:
        return judge(storage, range(scene.num_ids))
    except CheckpointError:
        return Verdict(scene.num_ids, 0, tuple(range(scene.num_ids)), (), (), False)


def row(figures: RowFigures) -> str:
    """One line of the table."""
    return "  ".join(f"{value!s:>{width}}" for width, value in zip(_WIDTHS, asdict(figures).values(), strict=True))


def head() -> str:
    """The table's first line."""
    return "  ".join(f"{name:>{width}}" for width, name in zip(_WIDTHS, RowFigures.__dataclass_fields__, strict=True))


_WIDTHS = (10, 6, 6, 4, 5, 5, 12, 6, 4, 7, 8, 14)
