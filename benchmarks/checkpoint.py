"""What checkpoints cost: training held up, bytes and seconds of full and incremental ones, and the time to come back after a crash.

    python benchmarks/checkpoint.py [--pairs 5] [--seconds 40] [--quick]

Three parts. training: the demo's model on the click world, by turns with an incremental checkpoint every 10 s and without any;
how long the training thread was held up, and the ratio of the two rates. tables: one table, saved in full and then with some of
its rows touched. crash: the same training in a process of its own, killed and started again: how long from the start of the second
process to its first step, and how much of the first one's work was lost. Prints a table, then the figures as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train import Setting, Shape, light, write_config

from tidemill.checkpoint.capture import Capture, Staging
from tidemill.checkpoint.manager import CheckpointManager, Increments
from tidemill.contracts import layout
from tidemill.contracts.files import TableSpec
from tidemill.distributed.sharding import LocalShard
from tidemill.jobs.train import TrainRequest, train
from tidemill.lineage.terms import Writer
from tidemill.publish.tracker import TouchedRows
from tidemill.storage.backends.local import LocalStorage

DIM = 16
INTERVAL_S = 10.0
PATIENCE_S = 120.0
# A job's first seconds hold its warm-up, and its first checkpoint is full.
WARM_UP_S = 2.0
TARGETS = {"blocked_share": 0.03}


def training_edits(seconds: float | None) -> dict[str, Any]:
    """A run that ends when it is told to; `seconds` from one checkpoint to the next, None: only the last one, in full."""
    return {
        "train_config.num_epochs": None,
        "train_config.num_steps": 10**9,
        "train_config.save_checkpoints_secs": seconds,
        "train_config.incremental_checkpoints": seconds is not None,
        "train_config.keep_checkpoint_max": 2,
        "train_config.fold_checkpoints_after": 3,
        "train_config.log_step_count_steps": 1000,
    }


def train_for(shape: Shape, folder: Path, seconds: float, interval_s: float | None) -> dict[str, float]:
    """Train for so long in this process; steps per second, and the share of the time for which saves held training up."""
    folder.mkdir()
    config = write_config(Setting(shape, 1, folder))
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        train(TrainRequest(str(config), overrides={}, edits=json.dumps(training_edits(interval_s))))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    times = step_times(folder / "model")
    timed = [at for at in times if at - times[0] >= WARM_UP_S]
    blocked = [event["blocked_s"] for event in events(folder / "model", "checkpoint.saved") if timed[0] <= event["at"] <= timed[-1]]
    folds = events(folder / "model", "checkpoint.folded")
    shutil.rmtree(folder)
    return {
        "steps_per_s": (len(timed) - 1) / (timed[-1] - timed[0]),
        "blocked_share": sum(blocked) / (timed[-1] - timed[0]),
        "longest_block_s": max(blocked, default=0.0),
        "checkpoints": len(blocked),
        "folds": len(folds),
    }


def step_times(folder: Path) -> list[float]:
    """When each step of all runs began."""
    logs = sorted(folder.rglob(Path(layout.step_log(0)).name))
    return [json.loads(line)["at"] for log in logs for line in log.read_text().splitlines()]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for log in sorted(folder.rglob(layout.EVENTS)) for line in log.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def measure_training(shape: Shape, folder: Path, pairs: int, seconds: float, interval_s: float) -> dict[str, Any]:
    """With and without checkpoints by turns; medians."""
    turns = []
    for n in range(pairs):
        pair = {}
        # The order changes from turn to turn, so that neither way always comes first.
        for way in ("with", "without") if n % 2 else ("without", "with"):
            pair[way] = train_for(shape, folder / "run", seconds, interval_s if way == "with" else None)
        turns.append(pair)

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(turn) for turn in turns)

    return {
        "interval_s": interval_s,
        "blocked_share": round(median(lambda turn: turn["with"]["blocked_share"]), 5),
        "longest_block_ms": round(1000 * max(turn["with"]["longest_block_s"] for turn in turns), 2),
        "throughput_ratio": round(median(lambda turn: turn["with"]["steps_per_s"] / turn["without"]["steps_per_s"]), 4),
        "steps_per_s": {way: round(median(lambda turn, way=way: turn[way]["steps_per_s"]), 1) for way in ("with", "without")},
        "ratios": [round(turn["with"]["steps_per_s"] / turn["without"]["steps_per_s"], 4) for turn in turns],
        "checkpoints": sum(turn["with"]["checkpoints"] for turn in turns),
        "folds": sum(turn["with"]["folds"] for turn in turns),
    }


class Table:
    """One table with Adagrad's state, and what saves it."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.storage = LocalStorage(folder)
        weight = torch.randn(rows, DIM)
        self.shards = [LocalShard("pooled/ids", 0, rows, weight, {"momentum1": torch.rand(rows, DIM)})]
        self.touched, self.staging = TouchedRows(self.shards), Staging()
        spec = TableSpec(name="pooled/ids", num_embeddings=rows, embedding_dim=DIM)
        writer = Writer(1, "benchmark", 0, 1)
        self.manager = CheckpointManager(self.storage, writer, tables=[spec], increments=Increments(None, 10**6))
        self._step = 0

    def save(self, touched: np.ndarray | None) -> dict[str, float]:
        """Save all rows, or those touched; milliseconds of the copy, seconds until it is committed, bytes."""
        if touched is not None:
            self.touched.mark("pooled/ids", touched)
        self._step += 1
        began = time.perf_counter()
        rows = self.touched.take_unsaved()
        tables = self.staging.copy(self.shards) if touched is None else self.staging.copy_rows(self.shards, rows)
        copied = time.perf_counter()
        capture = Capture(self._step, 0, None, touched is None, tables, {"dense": {}}, [], {}, {})
        number = self.manager.save(capture)
        while not self.manager.ready:
            self.manager.check()
            time.sleep(0.001)
        assert self.manager.settled == (number, True)
        self.manager.on_settled(*self.manager.settled)
        size = sum(info.size for info in self.storage.list(f"{layout.checkpoint(self._step)}/"))
        return {"stall_ms": 1000 * (copied - began), "save_s": time.perf_counter() - copied, "bytes": size}


def measure_tables(folder: Path, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Full, and with several shares of the rows touched; medians, the first full save apart, since it touches fresh memory."""
    table, random = Table(folder, rows), np.random.default_rng(0)
    table.save(None)
    results = []
    for share in (None, 0.01, 0.05, 0.25, 1.0):
        saves = []
        for _ in range(repeats + 1):
            touched = None if share is None else random.choice(rows, int(rows * share), replace=False)
            saves.append(table.save(touched))
        medians = {key: statistics.median(save[key] for save in saves[1:]) for key in saves[0]}
        results.append(
            {
                "touched_rows": rows if share is None else int(rows * share),
                "kind": "full" if share is None else "incremental",
                "stall_ms": round(medians["stall_ms"], 2),
                "save_s": round(medians["save_s"], 3),
                "bytes": int(medians["bytes"]),
            }
        )
    table.manager.abort()
    return results


def measure_crash(shape: Shape, folder: Path, interval_s: float) -> dict[str, Any]:
    """Kill a training process between two checkpoints, and start it again."""
    folder.mkdir()
    config, model = write_config(Setting(shape, 1, folder)), folder / "model"
    command = [sys.executable, "-m", "tidemill", "train", str(config), "--edit_config_json", json.dumps(training_edits(interval_s))]
    with running(command):
        wait_for(lambda: len(events(model, "checkpoint.saved")) >= 3)
        time.sleep(interval_s / 2)
    newest = events(model, "checkpoint.saved")[-1]
    lost_s = step_times(model)[-1] - newest["at"]
    before, began = len(step_times(model)), time.time()
    with running([*command, "--continue_train"]):
        wait_for(lambda: len(step_times(model)) > before)
    back_s = step_times(model)[before] - began
    return {"interval_s": interval_s, "lost_s": round(lost_s, 2), "back_s": round(back_s, 2), "cost_s": round(lost_s + back_s, 2)}


class running:  # noqa: N801 - reads as a sentence
    """A command while the block runs; then it is killed."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __enter__(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, start_new_session=True)

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing after {PATIENCE_S:.0f} s")
        time.sleep(0.02)


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The table for people."""
    found, crash = figures["training"], figures["crash"]
    yield f"training, a checkpoint every {found['interval_s']:g} s ({found['checkpoints']} of them, {found['folds']} folds)"
    yield f"  held up         {found['blocked_share']:9.3%}  (longest {found['longest_block_ms']:.1f} ms)"
    yield f"  rate with/without {found['throughput_ratio']:7.3f}"
    yield "table                touched rows   held up   written in      bytes"
    for row in figures["tables"]:
        held_up, written = f"{row['stall_ms']:.1f} ms", f"{row['save_s']:.2f} s"
        yield f"  {row['kind']:<18} {row['touched_rows']:>12,} {held_up:>9} {written:>12} {row['bytes']:>10,}"
    yield f"crash, a checkpoint every {crash['interval_s']:g} s: {crash['lost_s']} s of work lost, back after {crash['back_s']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="turns with and without checkpoints")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each run")
    parser.add_argument("--rows", type=int, default=1_200_000, help="of the table")
    parser.add_argument("--quick", action="store_true", help="one short turn, a small table: that it runs, not how fast")
    arguments = parser.parse_args()
    interval_s, repeats = INTERVAL_S, 5
    if arguments.quick:
        arguments.pairs, arguments.seconds, arguments.rows, interval_s, repeats = 1, 15.0, 20_000, 1.0, 1
    logging.getLogger("tidemill").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = light(folder, 20_000 if arguments.quick else 300_000)
        figures = {
            "tables": measure_tables(folder / "tables", arguments.rows, repeats),
            "training": measure_training(shape, folder, arguments.pairs, arguments.seconds, interval_s),
            "crash": measure_crash(shape, folder / "crash", interval_s),
        }
    for line in lines(figures):
        print(line)
    load = [round(value, 2) for value in os.getloadavg()]
    print(json.dumps({"benchmark": "checkpoint", "rows": arguments.rows, "targets": TARGETS, "load": load, **figures}))


if __name__ == "__main__":
    main()
