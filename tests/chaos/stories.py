"""Random stories of a lineage: trainers that come and go as a seed says, and the figures that must be zero at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from tests.e2e.stream import BOUNDARY, LINEAGE, ReleaseReader, Stream, StreamSettings, copy_base, is_alive, rank_pid, stop_process
from tests.e2e.topic import Topic
from tests.e2e.workshop import Workshop, eventually, kill
from tidemill.config.env import SUCCESSOR_DIR, TOLERANCE_SECS
from tidemill.errors import FencedError, RetiredError
from tidemill.jobs.verify import Verification
from tidemill.testing.broker import DevelopmentBroker

_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one story came to. `kills`: SIGKILLs of trainers; `torn`: faults that a reader of the releases met."""

    story: str
    seed: int
    wall_s: float
    runs: int
    kills: int
    rows: int
    lost: int
    doubled: int
    unlisted: int
    releases: int
    torn: int
    keys_compared: int
    keys_different: int

    @property
    def is_clean(self) -> bool:
        return not any((self.lost, self.doubled, self.unlisted, self.torn, self.keys_different)) and self.keys_compared > 0


@dataclass(slots=True)
class Scene:
    """One story under way: its lineage, and everything random about it."""

    stream: Stream
    rng: np.random.Generator
    told: list[str] = field(default_factory=list)
    kills: int = 0

    def kill(self, process: subprocess.Popen) -> None:
        """SIGKILL of a trainer with all its ranks."""
        self.kills += process.poll() is None
        kill(process)

    def moment(self, process: subprocess.Popen) -> None:
        """Let a trainer come to a random point of its life."""
        if self.rng.random() < 0.25:
            time.sleep(self.rng.uniform(0.0, 6.0))  # perhaps before its first step
            return
        self.stream.await_steps(process, number=int(self.rng.integers(1, 60)))
        time.sleep(self.rng.uniform(0.0, 0.6))


def killed(scene: Scene) -> None:
    """SIGKILL of all ranks."""
    with scene.stream.trainer(ranks=int(scene.rng.integers(1, 3))) as process:
        scene.moment(process)
        scene.kill(process)


def preempted(scene: Scene) -> None:
    """SIGTERM; torchrun passes it on, and has an exit code of its own."""
    stream, ranks = scene.stream, int(scene.rng.integers(1, 3))
    with stream.trainer(ranks=ranks) as process:
        stream.await_steps(process, number=int(scene.rng.integers(1, 40)))
        if ranks == 1:
            stream.end(process)
            return
        process.send_signal(signal.SIGTERM)
        process.wait(_WAIT_S)
    assert stream.records()[-1].status == "interrupted", stream.log()


def bereaved(scene: Scene) -> None:
    """SIGKILL of one of two ranks; the other has to find out by itself."""
    with scene.stream.trainer(ranks=2) as process:
        scene.stream.await_steps(process, number=int(scene.rng.integers(1, 40)))
        ranks = [rank_pid(process, rank) for rank in (0, 1)]
        stop_process(process.pid)
        victim = int(scene.rng.integers(2))
        os.kill(ranks[victim], signal.SIGKILL)
        scene.kills += 1
        eventually(lambda: not is_alive(ranks[1 - victim]), timeout_s=_WAIT_S, what="the end of the other rank")


def frozen(scene: Scene) -> None:
    """A trainer hangs, another takes over, the first wakes."""
    stream = scene.stream
    with stream.trainer() as zombie:
        stream.await_steps(zombie, number=int(scene.rng.integers(1, 40)))
        stop_process(zombie.pid)
        with stream.trainer() as process:
            scene.moment(process)
            os.kill(zombie.pid, signal.SIGCONT)
            # It may find the door closed before the other one has opened its term's releases, or after.
            assert zombie.wait(_WAIT_S) == FencedError.exit_code, stream.log()
            scene.kill(process)


def without_broker(scene: Scene) -> None:
    """The broker is killed and comes back, and the trainer with it or not."""
    with scene.stream.trainer() as process:
        scene.stream.await_steps(process, number=int(scene.rng.integers(1, 40)))
        broker = scene.stream.topic.broker
        broker.kill()
        time.sleep(scene.rng.uniform(0.1, 3.0))
        broker.restart()
        time.sleep(scene.rng.uniform(0.0, 3.0))
        assert process.poll() is None, scene.stream.log()
        scene.kill(process)


ACTS: tuple[Callable[[Scene], None], ...] = (killed, killed, preempted, bereaved, frozen, without_broker)


def play(seed: int, folder: Path, base: Workshop, broker: DevelopmentBroker, *, max_acts: int = 4) -> Figures:
    """One story from its seed. Raises AssertionError if something happens that never may; the folder then shows what."""
    rng = np.random.default_rng([seed, 23])
    stream = _stream(rng, folder, base, broker, f"story-{seed}")
    scene = Scene(stream, rng)
    began = time.monotonic()
    with ReleaseReader(stream.folder) as reader:
        with stream.topic.feeding(float(rng.uniform(60, 250)), BOUNDARY, speed=20.0):
            for index in rng.integers(len(ACTS), size=int(rng.integers(1, max_acts + 1))):
                scene.told.append(ACTS[index].__name__)
                ACTS[index](scene)
        if rng.random() < 0.3:
            scene.told.append("handed_over")
            stream = _hand_over(scene)
        verification = _finish(stream)
    reader.assert_sound(scene.stream.releases())
    ledger = stream.ledger()
    return Figures(
        story=" ".join(scene.told),
        seed=seed,
        wall_s=round(time.monotonic() - began, 1),
        runs=len(scene.stream.records()),
        kills=scene.kills,
        rows=ledger.rows,
        lost=ledger.lost,
        doubled=ledger.doubled,
        unlisted=ledger.unlisted,
        releases=len(scene.stream.releases()),
        torn=len(reader.faults),
        keys_compared=verification.keys_compared,
        keys_different=verification.keys_different + verification.dense_different,
    )


def row(figures: Figures) -> str:
    """One line of the table."""
    return "  ".join(f"{value!s:>{width}}" for width, value in zip(_WIDTHS, asdict(figures).values(), strict=True))


def head() -> str:
    """The table's first line."""
    return "  ".join(f"{name:>{width}}" for width, name in zip(_WIDTHS, Figures.__dataclass_fields__, strict=True))


_WIDTHS = (48, 6, 6, 4, 5, 6, 4, 7, 8, 8, 4, 13, 14)


def _stream(rng: np.random.Generator, folder: Path, base: Workshop, broker: DevelopmentBroker, name: str) -> Stream:
    settings = StreamSettings(
        batch_size=int(rng.choice([8, 32, 100])),
        publish_s=float(rng.choice([0.2, 0.5, 1.0])),
        checkpoint_steps=int(rng.choice([3, 10, 25])),
        max_wait_s=float(rng.choice([0.05, 0.3])),
        timeout_s=15.0,
    )
    folder.mkdir(parents=True)
    return Stream(copy_base(base, folder), Topic(broker, partitions=int(rng.integers(1, 5)), name=name), settings, LINEAGE)


def _hand_over(scene: Scene) -> Stream:
    """A successor with a later boundary takes over; both may be killed on the way. Returns the successor."""
    old = scene.stream
    new = Stream(old.workshop, old.topic, replace(old.settings, boundary=BOUNDARY + 60.0), "lineages/20260304")
    _copy_snapshot(old.folder, new.folder)
    environment = {SUCCESSOR_DIR: str(new.folder), TOLERANCE_SECS: "100"}
    with ExitStack() as stack:
        with old.topic.feeding(float(scene.rng.uniform(60, 250)), BOUNDARY + 7200.0, speed=20.0):
            if scene.rng.random() < 0.5:
                with old.trainer(environment=environment) as process:
                    scene.moment(process)
            predecessor = stack.enter_context(old.trainer(environment=environment))
            if scene.rng.random() < 0.5:
                with new.trainer() as process:
                    new.await_steps(process, number=int(scene.rng.integers(1, 40)))
            successor = stack.enter_context(new.trainer())
            assert predecessor.wait(_WAIT_S) == 0, old.log()
        new.await_trained(successor)
        new.end(successor)
    assert old.retired_ledger().is_clean, old.retired_ledger()
    with old.trainer(environment=environment) as process:
        assert process.wait(_WAIT_S) == RetiredError.exit_code, old.log()
    return new


def _copy_snapshot(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    shutil.copy(source / "snapshot.json", target)
    shutil.copytree(source / "snapshot", target / "snapshot")


def _finish(stream: Stream) -> Verification:
    """Train what is left, stop, and compare what is served with what was trained."""
    with stream.trainer() as process:
        stream.await_steps(process, number=0)
        # At least one step, so that checkpoint and release are this run's own.
        stream.topic.send(BOUNDARY + 14400.0 + np.arange(50.0))
        stream.await_trained(process)
        stream.end(process)
    return stream.verify_head()
