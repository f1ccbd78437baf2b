"""One story: runs that come, are killed, frozen, asked to end or fail, on other numbers of ranks; then one that ends well."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tidemill.cadence import ENDINGS
from tidemill.errors import TidemillError
from tidemill.testing.rank_threads import ThreadGroup
from tidemill.testing.simulation.check import (
    check_fencing,
    check_ids,
    check_newest_checkpoint,
    check_origin,
    check_watermark,
    line_of,
    manifests,
)
from tidemill.testing.simulation.scheduler import Process, Scheduler, Task
from tidemill.testing.simulation.store import Fate, MemoryStorage, ProcessStorage, StoreFaults
from tidemill.testing.simulation.threads import simulated
from tidemill.testing.simulation.trainer import TIMEOUT_S, LineSettings, RunSettings, SimulatedRun, SimulatedTrainer
from tidemill.testing.simulation.world import World, WorldSource, make_world

_LONGEST_RUN_S = 300.0
_LONGEST_ACT_S = 30.0
_COMPLETED, _INTERRUPTED = 0, 75


@dataclass(frozen=True, slots=True)
class SimulationFigures:
    """What one story came to. `trace`: a checksum of all that happened in it; `simulated_s`: by its own clock."""

    seed: int
    kind: str
    runs: int
    kills: int
    freezes: int
    faults: int
    ids: int
    turns: int
    simulated_s: float
    trace: str


class StoryError(AssertionError):
    """Something happened in a story that never may."""


@dataclass(slots=True, eq=False)
class Ranks:
    """A run under way."""

    run: SimulatedRun
    processes: list[Process]
    tasks: list[Task]
    fates: dict[int, Fate]
    is_faultless: bool


@dataclass(slots=True, eq=False)
class Chances:
    """What goes wrong in a run. `fates`: of some ranks."""

    store: StoreFaults = field(default_factory=StoreFaults)
    source: float = 0.0
    fates: dict[int, Fate] = field(default_factory=dict)


class Story:
    """Everything about it is drawn from its seed as it goes on."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = random.Random(f"story {seed}")
        self.scheduler = Scheduler(seed, switch=rng.choice([0.05, 0.2, 0.5]), turn_s=rng.choice([1e-5, 1e-4, 1e-3]))
        self.rng = rng
        self.world: World = make_world(rng)
        self.line = _make_line(rng, self.world)
        self.store = MemoryStorage(self.scheduler)
        self.runs: list[Ranks] = []
        self.kills = self.freezes = self.faults = 0
        self.largest_batch = 0

    def play(self, tell: Callable[[], None] | None = None) -> SimulationFigures:
        """Tell it to its end; `tell`: another story, in the same world.

        Raises StoryError with the seed, and the last of what happened, if something did that never may.
        """
        try:
            with simulated(self.scheduler), _quiet():
                self.scheduler.run(tell or self._tell)
        except Exception as error:
            recent = "\n".join(self.scheduler.recent)
            told = f"{type(error).__name__}: {error}\n{self.line}\n" + "\n".join(str(ranks.run.settings) for ranks in self.runs)
            raise StoryError(f"story {self.seed}: {told}\n{recent}") from error
        return SimulationFigures(
            seed=self.seed,
            kind="files" if self.world.bounded else "stream",
            runs=len(self.runs),
            kills=self.kills,
            freezes=self.freezes,
            faults=self.faults,
            ids=self.world.num_ids,
            turns=self.scheduler.turns,
            simulated_s=round(self.scheduler.now, 1),
            trace=f"{self.scheduler.trace:08x}",
        )

    def _tell(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            self._act()
            check_newest_checkpoint(self.store)
        self._finish()
        self._settle_zombies()
        self._judge()
        # A job that never comes to a step is refused, not over.
        if self.world.bounded and self.rng.random() < 0.2 and self.runs[-1].run.points[-1].last_step:
            self._resume_what_is_over()
        check_fencing(self.store)
        for ranks in self.runs:
            check_origin(ranks.run, self.store)
            check_watermark(ranks.run, self.world, quorum=self.line.quorum, idle_timeout_s=self.line.idle_timeout_s)

    def _act(self) -> None:
        """One run that doesn't end well, or by itself."""
        rng, kind = (
            self.rng,
            self.rng.choice(["kill all", "kill all", "kill one", "in a save", "in a save", "preempt", "freeze", "alone"]),
        )
        settings = self._settings()
        ends_within = self.world.bounded and rng.random() < 0.8
        if ends_within and not settings.checkpoint_steps:
            settings = replace(settings, checkpoint_steps=rng.choice([1, 2]))
        ranks = self.start(settings, self._chances(settings, kind))
        if ends_within:
            self._await_rows(ranks)
        else:
            self.scheduler.sleep(rng.choice([rng.uniform(0.0, 0.2), rng.uniform(0.0, 2.0), rng.uniform(0.0, 5.0)]))
        if kind == "kill all":
            self._kill(ranks, range(settings.world_size))
        elif kind == "kill one":
            self._kill(ranks, [rng.randrange(settings.world_size)])
        elif kind == "preempt":
            self._preempt(ranks)
        elif kind == "freeze":
            self._freeze(ranks)
            return
        elif kind == "alone" and self.world.bounded:
            self.await_end(ranks)
        else:
            self._kill(ranks, range(settings.world_size))
        self.await_end(ranks)

    def _await_rows(self, ranks: Ranks) -> None:
        """Let it train some of the rows that files hold: of what is over, or has not begun, nothing is left to be taken up."""
        wanted = self.rng.randint(1, max(self.world.num_ids * self.line.num_passes, 1))
        until = self.scheduler.now + _LONGEST_ACT_S
        while len(ranks.run.trained) < wanted and self.scheduler.now < until and not all(task.over for task in ranks.tasks):
            self.scheduler.sleep(self.rng.uniform(0.0, 0.1))

    def _finish(self) -> None:
        """Train what is left, while others may wake; but no run whose term would then be the newer one."""
        for earlier in self.runs:
            if len(earlier.run.loops) < earlier.run.settings.world_size:
                self._kill(earlier, range(earlier.run.settings.world_size))
        ranks = self.start(self._settings(), Chances())
        run, expected = ranks.run, set(self.world.expected)
        if not self.world.bounded:
            until = self.scheduler.now + _LONGEST_RUN_S
            while not expected <= run.known | {one for _, one in run.trained} or len(run.loops) < run.settings.world_size:
                self.scheduler.sleep(0.1)
                assert not run.errors, f"{run.name} failed: {run.errors}"
                left = expected - run.known - {one for _, one in run.trained}
                assert self.scheduler.now < until, f"{run.name} never comes to train {sorted(left)}"
            self.ask_to_end(ranks)
        self.await_end(ranks)
        wanted = _COMPLETED if self.world.bounded else _INTERRUPTED
        codes = {rank: ENDINGS[outcome.reason].exit_code for rank, outcome in run.outcomes.items()}
        assert codes == dict.fromkeys(range(run.settings.world_size), wanted), f"{run.name} ended with {codes}, {run.errors}"

    def _judge(self) -> None:
        manifest = check_newest_checkpoint(self.store)
        assert manifest is not None, "no checkpoint at the end"
        ids, _ = line_of(self.store, manifest.term, manifest.step)
        most = self.largest_batch * 3 * self.line.num_passes if self.line.drop_remainder else 0
        check_ids(ids, self.world, passes=self.line.num_passes, may_lose=most)
        assert manifest.examples == ids.total(), f"{manifest.examples} examples counted, {ids.total()} trained"

    def _resume_what_is_over(self) -> None:
        """A job that has made all its passes trains nothing more, and writes no checkpoint.

        What was left out as too few for a batch stays so, whatever the number of ranks and their batches.
        """
        before = manifests(self.store)
        ranks = self.start(self._settings(), Chances())
        self.await_end(ranks)
        assert not ranks.run.trained, f"a job that was over has trained {ranks.run.trained}"
        assert manifests(self.store) == before, "a job that was over has saved"

    def start(self, settings: RunSettings, chances: Chances) -> Ranks:
        """Start a run."""
        run = SimulatedRun(
            f"run{len(self.runs)}", settings, ThreadGroup(settings.world_size, timeout_s=TIMEOUT_S), self.scheduler.now
        )
        ranks = Ranks(run, [], [], chances.fates, is_faultless=not (chances.source or chances.store.failing or chances.fates))
        self.largest_batch = max(self.largest_batch, settings.batch_size)
        self.runs.append(ranks)
        self.scheduler.note(f"{run.name}: {settings}")
        for rank in range(settings.world_size):
            process = Process(f"{run.name}.{rank}", skew_s=self.rng.uniform(-5.0, 5.0))
            storage = ProcessStorage(self.store, self.scheduler, chances.store, chances.fates.get(rank))
            source = WorldSource(self.world, self.scheduler, failing=chances.source)
            trainer = SimulatedTrainer(self.line, run, rank, source, storage, self.store)
            ranks.processes.append(process)
            ranks.tasks.append(self.scheduler.spawn(process, "main", _main(run, rank, process, trainer)))
        return ranks

    def _kill(self, ranks: Ranks, which: range | list[int]) -> None:
        for rank in which:
            if not ranks.tasks[rank].over:
                self.kills += 1
                self.scheduler.kill(ranks.processes[rank])

    def ask_to_end(self, ranks: Ranks) -> None:
        """SIGTERM of the ranks that train already."""
        for loop in ranks.run.loops.values():
            loop.preempt()

    def _preempt(self, ranks: Ranks) -> None:
        """SIGTERM. One that comes before the loop is there ends the process at once."""
        self.ask_to_end(ranks)
        for rank, process in enumerate(ranks.processes):
            if rank not in ranks.run.loops and not ranks.tasks[rank].over:
                self.scheduler.kill(process)

    def _freeze(self, ranks: Ranks) -> None:
        """All ranks hang, and will wake when others have taken over; or one of them does, for a moment."""
        self.freezes += 1
        if any(fate.freeze_s for fate in ranks.fates.values()):
            return  # as it comes to that operation; until then it works on beside the next one
        for process in ranks.processes:
            self.scheduler.freeze(process, self.rng.choice([self.rng.uniform(0.0, 2.0), self.rng.uniform(0.0, 12.0)]))

    def _settle_zombies(self) -> None:
        """Those that woke must have found out that others took over; who still sleeps, or waits for rows, is killed."""
        if self.freezes:
            self.scheduler.sleep(self.rng.uniform(0.0, 6.0))
        for ranks in self.runs:
            self._kill(ranks, range(ranks.run.settings.world_size))
            self.await_end(ranks)

    def await_end(self, ranks: Ranks) -> None:
        """Wait until all ranks are gone; what is left of a run finds out by itself that others are."""
        until = self.scheduler.now + _LONGEST_RUN_S
        for rank, task in enumerate(ranks.tasks):
            while not task.over:
                for other, process in enumerate(ranks.processes):
                    if process.dead:
                        ranks.run.group.leave(other)
                self.scheduler.sleep(0.5)
                assert self.scheduler.now < until, f"{ranks.run.name}, rank {rank} never ends"
        self.faults += len(ranks.run.errors)
        killed = any(rank not in ranks.run.outcomes and rank not in ranks.run.errors for rank in range(len(ranks.tasks)))
        if ranks.is_faultless and not killed and not self.freezes:
            assert not ranks.run.errors, f"{ranks.run.name} failed, though nothing went wrong: {ranks.run.errors}"

    def _settings(self) -> RunSettings:
        rng = self.rng
        cadence = rng.choice(["steps", "seconds", "times", "steps", "none"])
        return RunSettings(
            world_size=rng.randint(1, 3),
            batch_size=rng.choice([1, 3, 4, 7, 16]),
            threads=rng.randint(1, 2),
            readers=rng.randint(1, 3),
            in_order=rng.random() < 0.7,
            steps_per_round=rng.randint(1, 4),
            checkpoint_steps=rng.choice([1, 2, 5]) if cadence == "steps" else 0,
            checkpoint_s=rng.choice([0.3, 2.0]) if cadence == "seconds" else 0.0,
            checkpoint_times=rng.choice([2.0, 7.0]) if cadence == "times" else 0.0,
            keep=rng.choice([0, 1, 2, 3]),
            fold_after=rng.randint(1, 3),
            max_wait_s=rng.choice([0.0, 0.1, 1.0]),
        )

    def _chances(self, settings: RunSettings, kind: str) -> Chances:
        rng = self.rng
        store = StoreFaults(rng.choice([0.0, 0.0, 0.03]), rng.choice([0.0, 0.1, 2.0]))
        fates = {}
        saving = rng.random() < 0.7
        operation, before = rng.randint(1, 25 if saving else 80), rng.random() < 0.5
        if kind == "in a save":
            fates = {rng.randrange(settings.world_size): Fate(operation, before, saving)}
        elif kind == "freeze" and rng.random() < 0.5:
            fates = {0: Fate(operation, before, saving, rng.uniform(1.0, 12.0))}
        return Chances(store, rng.choice([0.0, 0.0, 0.02]), fates)


def play(seed: int) -> SimulationFigures:
    """One story from its seed. Raises StoryError."""
    return Story(seed).play()


def _make_line(rng: random.Random, world: World) -> LineSettings:
    return LineSettings(
        num_passes=rng.choice([1, 1, 2, 3]) if world.bounded else 1,
        shuffle_rows=rng.choice([0, 5, 16]) if world.bounded else 0,
        quorum=rng.choice([1.0, 0.5, 0.2]),
        idle_timeout_s=rng.choice([float("inf"), 0.3, 2.0]),
        cost=rng.random() < 0.3,
        drop_remainder=world.bounded and rng.random() < 0.15,
        incremental=rng.random() < 0.6,
    )


def _main(run: SimulatedRun, rank: int, process: Process, trainer: SimulatedTrainer) -> Callable[[], None]:
    def main() -> None:
        try:
            run.outcomes[rank] = trainer.train()
        except TidemillError as error:
            run.errors[rank] = error
        run.group.leave(rank)
        # As a process ends, so do its threads, whatever they were at.
        process.dead = True

    return main


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the runs log: they fail by the thousand, on purpose."""
    logger = logging.getLogger("tidemill")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
