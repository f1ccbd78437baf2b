"""How soon a running lineage notices a poisoned hour, and how soon publication goes on, on the click world.

    python benchmarks/quality.py [ROWS_A_DAY]

A small model (a logistic regression over hashed columns, by Adagrad) learns day 1 and then streams day 2, whose thirteenth hour is
poisoned in one of three ways, or not at all. Notice: from the first poisoned event to the pause. Restore: from the last one until
publication goes on. In seconds of event time, and of wall time at the speed of this replay. Prints a table, then one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from tidemill.data.click_world import World
from tidemill.data.split import Delivery, Provenance, Run, SplitId
from tidemill.features.batch import Batch, IdColumns
from tidemill.jobs.quality import observe_windows
from tidemill.lineage.quality import QualityBounds, QualityWatch
from tidemill.models.metrics import progressive_metrics
from tidemill.training.frozen import FrozenSample
from tidemill.training.progressive import ProgressiveMetrics, ProgressiveSettings

BATCH, BUCKETS, WINDOW_S, HOUR_S = 500, 1 << 16, 900.0, 3600.0
BOUNDS = QualityBounds(min_events=2000, auc=0.05, normalized_entropy=0.1, calibration=0.3, hold_s=HOUR_S)
POISONED_HOUR = 12
NO_IDS = IdColumns((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
Columns = dict[str, np.ndarray]
Poison = Callable[[Columns], Columns]


def flipped(columns: Columns) -> Columns:
    return {**columns, "click": 1 - columns["click"]}


def constant(columns: Columns) -> Columns:
    return {**columns, "item_id": np.full_like(columns["item_id"], columns["item_id"][0])}


def swapped(columns: Columns) -> Columns:
    return {**columns, "item_id": columns["user_id"], "user_id": columns["item_id"]}


POISONS: dict[str, Poison] = {"labels flipped": flipped, "column constant": constant, "columns swapped": swapped}


class Model:
    """Logistic regression over hashed columns."""

    def __init__(self) -> None:
        self.weights = np.zeros(BUCKETS)
        self.squares = np.full(BUCKETS, 0.1)

    def copy(self) -> Model:
        other = Model()
        other.weights, other.squares = self.weights.copy(), self.squares.copy()
        return other

    def scores(self, buckets: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-self.weights[buckets].sum(axis=1)))

    def step(self, buckets: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The scores from before the step."""
        scores = self.scores(buckets)
        errors = np.repeat(scores - labels, buckets.shape[1])
        gradient = np.bincount(buckets.ravel(), errors, minlength=BUCKETS)
        self.squares += gradient**2
        self.weights -= 0.1 * gradient / np.sqrt(self.squares)
        return scores


@dataclass
class Played:
    """What a day came to: when it paused and went on, as (event time, wall time); how often it paused."""

    paused: tuple[float, float] | None = None
    resumed: tuple[float, float] | None = None
    pauses: int = 0


def columns_of(table: pa.Table) -> Columns:
    return {name: table.column(name).to_numpy() for name in ("event_time", "age_level", "price", "click")} | {
        name: np.array([int(value[1:]) for value in table.column(name).to_pylist()])
        for name in ("user_id", "item_id", "category_id")
    }


def buckets_of(rows: Columns) -> np.ndarray:
    price = np.log1p(rows["price"]).astype(np.int64)
    named = [rows["user_id"], rows["item_id"], rows["category_id"], rows["category_id"] * 16 + rows["age_level"], price, 0 * price]
    return np.stack([(value * 2654435761 + at * 40503 * 65537) % 4294967291 % BUCKETS for at, value in enumerate(named)], axis=1)


def batch_of(rows: Columns) -> Delivery[Batch]:
    count = len(rows["click"])
    labels = {"click": torch.tensor(rows["click"], dtype=torch.float32)}
    batch = Batch(
        num_rows=count,
        size=count,
        dense=torch.zeros(count, 0),
        ids=NO_IDS,
        sequences=NO_IDS,
        labels=labels,
        weights=torch.ones(count),
        extras={"buckets": buckets_of(rows)},  # type: ignore[dict-item]
    )
    run = Run(SplitId("kafka", "impressions:0"), 0, count, count, event_time=float(rows["event_time"][-1]))
    return Delivery(Provenance((run,), count, event_time=rows["event_time"]), batch)


def learn(columns: Columns) -> Model:
    model = Model()
    for at in range(0, len(columns["click"]), BATCH):
        rows = {name: values[at : at + BATCH] for name, values in columns.items()}
        model.step(buckets_of(rows), rows["click"])
    return model


class Lineage:
    """A stream that learns from its daily model on, and judges its windows."""

    def __init__(self, daily: Model, watermark: float) -> None:
        settings = ProgressiveSettings(lambda: progressive_metrics([]), label="click", window_s=WINDOW_S)
        self.model = daily.copy()
        self.progressive = ProgressiveMetrics(settings, watermark=watermark)
        self.watch = QualityWatch(BOUNDS, reference_windows=24)
        score = lambda batch: {"probs": daily.scores(batch.extras["buckets"])}  # noqa: E731
        self.frozen = FrozenSample(settings, lambda: score, share=1.0)

    def train(self, rows: Columns) -> None:
        delivery = batch_of(rows)
        outputs = {"probs": self.model.step(delivery.payload.extras["buckets"], rows["click"])}  # type: ignore[call-overload]
        self.progressive.trained(0, delivery, outputs)
        self.frozen.trained(0, delivery, outputs)
        # Every batch is scored, at any speed of the replay, so that the figures are the same each time.
        self.frozen.drain(deadline_s=60.0)
        windows = self.progressive.close_windows(float(rows["event_time"][-1]), lambda arrays: [dict(arrays)])
        observe_windows(self.watch, windows, self.frozen, lambda arrays: [dict(arrays)])


def play(daily: Model, columns: Columns, poison: Poison | None) -> Played:
    """A day, one hour of it poisoned."""
    start = float(np.floor(columns["event_time"][0] / HOUR_S) * HOUR_S)
    begin, end = start + POISONED_HOUR * HOUR_S, start + (POISONED_HOUR + 1) * HOUR_S
    lineage, played = Lineage(daily, start), Played()
    walls = {"begin": 0.0, "end": 0.0}
    try:
        for at in range(0, len(columns["click"]), BATCH):
            rows = {name: values[at : at + BATCH] for name, values in columns.items()}
            now = float(rows["event_time"][-1])
            if begin <= now < end:
                walls["begin"] = walls["begin"] or time.perf_counter()
                rows = poison(rows) if poison else rows
            elif now >= end:
                walls["end"] = walls["end"] or time.perf_counter()
            was_paused = lineage.watch.paused
            lineage.train(rows)
            if lineage.watch.paused and not was_paused:
                played.pauses += 1
                played.paused = played.paused or (now - begin, time.perf_counter() - walls["begin"])
            elif was_paused and not lineage.watch.paused:
                played.resumed = (now - end, time.perf_counter() - walls["end"])
    finally:
        lineage.frozen.close()
    return played


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    worlds, cases, false_alarms = 4, [], 0
    print(f"{'poison':<16} {'seed':>4} {'notice s':>9} {'wall s':>7} {'restore s':>10} {'wall s':>7} {'pauses':>6}")
    for seed in range(worlds):
        world = World(seed=seed)
        daily, day = learn(columns_of(world.day_table(1, num_rows))), columns_of(world.day_table(2, num_rows))
        for name, poison in {"none": None, **POISONS}.items():
            played = play(daily, day, poison)
            false_alarms += played.pauses if poison is None else played.pauses - (played.paused is not None)
            notice, restore = played.paused or (float("nan"),) * 2, played.resumed or (float("nan"),) * 2
            print(
                f"{name:<16} {seed:>4} {notice[0]:>9.0f} {notice[1]:>7.2f} "
                f"{restore[0]:>10.0f} {restore[1]:>7.2f} {played.pauses:>6}",
                flush=True,
            )
            if poison is not None:
                cases.append({"poison": name, "seed": seed, "noticed": played.paused, "restored": played.resumed})
    print(json.dumps({"benchmark": "quality", "rows_a_day": num_rows, "false_alarms": false_alarms, "cases": cases}))


if __name__ == "__main__":
    main()
