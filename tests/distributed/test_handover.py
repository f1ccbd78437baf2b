"""Hand-over between real ranks whose event times differ: what is written, by whom, and that all leave together (A23)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from tests.training.loop_ranks import T0, EveryRound, Rows, ScriptedFeed, batch
from tidemill.cadence import StopReason, SyncPoint
from tidemill.clock import ManualClock
from tidemill.config.train import HandoverConfig
from tidemill.distributed.agreement import Agreement
from tidemill.jobs.report import open_handover
from tidemill.jobs.run import Run
from tidemill.lineage.reporter import HandoverThread, Point
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.ranks import run_ranks
from tidemill.training.loop import Duties, Duty, LoopSettings, TrainingLoop

MAX_ROUNDS = 2000
"""More than any of these runs needs; one that hasn't ended by then never will."""


@dataclass(frozen=True)
class Story:
    """The event time of each rank's rows (None: they have none), and what follows from the quorum."""

    folder: str
    times: tuple[float, float | None]
    quorum: float
    data_ts: float
    """What the predecessor is to report."""


STORIES = [
    Story("all", (1000.0, 900.0), 1.0, 900.0),
    Story("half", (1000.0, None), 0.5, 1000.0),
]


@dataclass
class Seen:
    """What one rank did."""

    before_successor: dict[str, Any] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    """The paths below the root that the process opened, listed, made, moved or removed."""
    reason: StopReason | None = None
    step: int = -1


class LockstepStep:
    """A collective over the main group: every rank must be in the same step."""

    def __call__(self, payload: Any, global_weight: float) -> dict[str, np.ndarray]:
        total = payload.weights.sum()
        dist.all_reduce(total)
        assert total.item() == global_weight
        time.sleep(0.002)
        return {"probs": np.zeros(payload.num_rows, np.float32)}

    def padding(self) -> Any:
        return batch(None)


def play(runtime: Any, root: str, stories: list[Story]) -> list[Seen]:
    touched: list[str] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" or name.startswith("os."):
            touched.extend(str(path) for path in arguments[:2] if isinstance(path, str) and path.startswith(root))

    # For the rest of this process; there is no way to take it back.
    sys.addaudithook(note)
    torch.set_num_threads(1)
    agreement = Agreement(runtime)
    played = []
    for story in stories:
        touched.clear()
        seen = play_one(runtime, agreement, Path(root) / story.folder, story)
        seen.touched = list(touched)
        played.append(seen)
    return played


def play_one(runtime: Any, agreement: Agreement, root: Path, story: Story) -> Seen:
    seen, rank = Seen(), runtime.rank
    with ExitStack() as resources:
        handover = open_handover(predecessor(root, rank, resources))
        assert (handover is not None) == (rank == 0)
        own_time = story.times[rank]
        row = Rows(at=None if own_time is None else own_time - T0)
        feed = ScriptedFeed(rank, [row] * MAX_ROUNDS, ManualClock(T0))

        def report(point: SyncPoint) -> int:
            if handover is not None:
                handover.report(Point(point.watermark, point.last_step))
            return 0

        checks = [bounded()]
        if handover is not None:
            checks += [successor_follows(root, story, handover, seen), lambda: loop.hand_over() if handover.verdict else None]
        loop = TrainingLoop(
            agreement=agreement,
            feed=feed,
            step=LockstepStep(),
            duties=duties(seen, report),
            settings=LoopSettings(quorum=story.quorum),
            checks=checks,
            clock=ManualClock(T0),
        )
        feed.loop = loop
        outcome = loop.run()
        seen.reason, seen.step = outcome.reason, outcome.step
    return seen


def predecessor(root: Path, rank: int, resources: ExitStack) -> Run:
    """What the hand-over looks at of a run."""
    handover = HandoverConfig(policy="caught_up", tolerance_s=60.0, successor_dir=str(root / "next"))
    own = str(root / "own")
    config = SimpleNamespace(model_dir=own, train_config=SimpleNamespace(handover=handover))
    writer = SimpleNamespace(run_id="old", term=1, rank=rank)
    start = SimpleNamespace(writer=writer)
    run = SimpleNamespace(config=config, is_stream=True, storage=LocalStorage(own), start=start, rank=rank, resources=resources)
    return cast("Run", run)


def duties(seen: Seen, report: Callable[[SyncPoint], int]) -> Duties:
    def noting(name: str) -> Duty:
        def act(point: SyncPoint) -> int:
            seen.actions.append(name)
            return 0

        return Duty(act)

    return Duties(noting("checkpoint"), noting("cut"), Duty(report, [EveryRound()]), noting("evaluate"))


def bounded() -> Callable[[], None]:
    """A check that fails a loop that has no end."""
    rounds = 0

    def check() -> None:
        nonlocal rounds
        rounds += 1
        assert rounds < MAX_ROUNDS, "the loop goes on after the verdict"

    return check


def successor_follows(root: Path, story: Story, handover: HandoverThread, seen: Seen) -> Callable[[], None]:
    """The successor's file is absent until the predecessor has looked for it with an event time of its own."""
    progress = root / "own/progress.json"

    def check() -> None:
        if seen.before_successor or not progress.exists() or "no progress.json yet" not in handover.decision.reason:
            return
        seen.before_successor = {"verdict": handover.verdict, **json.loads(progress.read_bytes())}
        successor = root / "next/progress.json"
        successor.parent.mkdir()
        LocalStorage(successor.parent).write(successor.name, json.dumps({"data_ts": story.data_ts - 50.0}).encode())

    return check


def test_two_ranks_report_the_quorums_time_and_leave_together_once_the_successor_has_caught_up(tmp_path: Path) -> None:
    """A23: [1000, 900] at quorum 1.0 is 900, [1000, absent] at 0.5 is 1000; only rank 0 touches files; no hand-over while the
    successor is absent, both leave at one step once it trails by 50 s at a tolerance of 60 s, and only the final release follows.

    It fails if the loop's exit is removed: `bounded`.
    """
    first, second = run_ranks(2, play, str(tmp_path), STORIES, timeout_s=60.0)
    for story, zero, one in zip(STORIES, first, second, strict=True):
        assert (zero.before_successor["data_ts"], zero.before_successor["verdict"]) == (story.data_ts, False)
        assert any(path.endswith("own/progress.json") for path in zero.touched)
        assert one.touched == []
        assert zero.reason is one.reason is StopReason.HANDED_OVER
        assert zero.step == one.step > 0
        assert zero.actions == one.actions == ["cut"]
