"""How fast the training job trains, beside its own step on prebuilt batches and beside plain PyTorch on the same files.

    python benchmarks/train.py [--shapes heavy,light] [--threads 1,2] [--quick]

Two shapes. heavy: 13 numbers and 26 ids of 100,000 rows each, dimension 16, batch 4096; multi_tower with the numbers through
512-256-64, the embeddings as they are, and 256-128 over both. That is 1.86 MFLOP a row, forward and backward; a DLRM of these MLPs
with pairwise dot products between its vectors has 1.76. light: the demo's model (multi_tower_din) on the click world, batch 512.

Three ways, by turns, in one process: end_to_end is the job as `tidemill train` runs it, Parquet to steps, timed by its own step
log; prebuilt is the same step on batches that lie ready in memory; plain is `plain_torch.py`. Warm-up steps, and what comes before
the first and after the last step, aren't timed. Prints a table, then the figures as one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plain_torch
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from tidemill.contracts import layout
from tidemill.data.click_world import HISTORY_LENGTH, World, write_day
from tidemill.distributed.runtime import Runtime, start_runtime
from tidemill.distributed.sharding import shard
from tidemill.features.batch import Batch
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.jobs.train import TrainRequest, train
from tidemill.models.losses import build_losses
from tidemill.models.model import build_model
from tidemill.training.optimizers import Optimizers
from tidemill.training.step import Objective, TrainStep, padding_batch

NUM_DENSE, NUM_SPARSE, NUM_IDS, DIM = 13, 26, 100_000, 16
ZIPF = 1.05
LIGHT_SIZES, LIGHT_ITEMS = [20_000, 6, 24, 20_000, 100], 20_000
SPARSE_RATE, DENSE_RATE = 0.05, 0.001
WAYS = ("end_to_end", "prebuilt", "plain")
TARGETS = {"loss": 0.15, "vs_plain": 0.95}
# A job's first batches were read while it waited for its first step.
WARM_UP_STEPS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with its data, in our words and in plain PyTorch."""

    name: str
    batch_size: int
    paths: list[Path]
    config: dict[str, Any]
    """features, model and data of the pipeline config"""
    columns: list[str]
    prepare: Callable[[pa.RecordBatch], plain_torch.Inputs]
    plain_model: Callable[[bool], nn.Module]
    """whether the tables are fused -> the model"""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one measurement is made with."""

    shape: Shape
    threads: int
    folder: Path
    """for what a job writes"""
    fused: bool = True
    """plain PyTorch's tables"""


def heavy(folder: Path, num_rows: int) -> Shape:
    random = np.random.default_rng(0)
    shares = np.arange(1, NUM_IDS + 1) ** -ZIPF
    bounds = np.cumsum(shares / shares.sum())
    columns: dict[str, np.ndarray] = {}
    for k in range(NUM_DENSE):
        columns[f"f{k}"] = random.normal(size=num_rows).astype(np.float32)
    for k in range(NUM_SPARSE):
        ranks = np.searchsorted(bounds, random.random(num_rows)).clip(max=NUM_IDS - 1)
        columns[f"c{k}"] = random.permutation(NUM_IDS)[ranks]
    columns["label"] = (random.random(num_rows) < 0.2).astype(np.int64)
    path = folder / "heavy.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=65536)
    numbers, ids = [f"f{k}" for k in range(NUM_DENSE)], [f"c{k}" for k in range(NUM_SPARSE)]
    config = {
        "data_config": {"batch_size": 4096, "label_fields": ["label"]},
        "feature_configs": [
            *({"raw_feature": {"feature_name": name, "expression": f"user:{name}"}} for name in numbers),
            *({"id_feature": _id(name, f"user:{name}", num_buckets=NUM_IDS)} for name in ids),
        ],
        "model_config": {
            "feature_groups": [_group("numbers", numbers), _group("ids", ids)],
            "multi_tower": {
                "towers": [{"input": "numbers", "mlp": {"hidden_units": [512, 256, 64]}}, {"input": "ids"}],
                "final": {"hidden_units": [256, 128]},
            },
        },
    }
    return Shape(
        name="heavy",
        batch_size=4096,
        paths=[path],
        config=config,
        columns=[*columns],
        prepare=partial(plain_torch.heavy_inputs, num_dense=NUM_DENSE, num_sparse=NUM_SPARSE),
        plain_model=partial(plain_torch.Heavy, NUM_DENSE, [NUM_IDS] * NUM_SPARSE, DIM),
    )


def light(folder: Path, num_rows: int) -> Shape:
    paths = write_day(World(seed=0), 0, folder / "light", num_rows)
    price = {"feature_name": "price", "expression": "item:price", "normalizer": "method=log10"}
    clicks = _id("click_seq", "user:click_seq", hash_bucket_size=LIGHT_ITEMS)
    deep = ["user_id", "age_level", "hour", "item_id", "category_id", "price"]
    config = {
        "data_config": {
            "batch_size": 512,
            "label_fields": ["click"],
            "event_time": {"column": "event_time"},
            "input_fields": [{"input_name": "event_time", "input_type": "DOUBLE"}],
        },
        "feature_configs": [
            {"id_feature": _id("user_id", "user:user_id", hash_bucket_size=LIGHT_SIZES[0])},
            {"id_feature": _id("age_level", "user:age_level", num_buckets=LIGHT_SIZES[1])},
            {"id_feature": _id("hour", "user:hour", num_buckets=LIGHT_SIZES[2])},
            {"id_feature": _id("item_id", "item:item_id", hash_bucket_size=LIGHT_SIZES[3])},
            {"id_feature": _id("category_id", "item:category_id", hash_bucket_size=LIGHT_SIZES[4])},
            {"raw_feature": price},
            {"sequence_id_feature": {**clicks, "sequence_length": HISTORY_LENGTH, "embedding_name": "item_id_emb"}},
        ],
        "model_config": {
            "feature_groups": [_group("deep", deep), _group("clicks", ["item_id", "click_seq"], "SEQUENCE")],
            "multi_tower_din": {
                "towers": [{"input": "deep", "mlp": {"hidden_units": [64]}}],
                "din_towers": [{"input": "clicks", "attn_mlp": {"hidden_units": [32]}}],
                "final": {"hidden_units": [64, 32]},
            },
        },
    }
    return Shape(
        name="light",
        batch_size=512,
        paths=paths,
        config=config,
        columns=["user_id", "age_level", "hour", "item_id", "category_id", "price", "click_seq", "click"],
        prepare=partial(plain_torch.light_inputs, sizes=LIGHT_SIZES, items=LIGHT_ITEMS, max_steps=HISTORY_LENGTH),
        plain_model=partial(plain_torch.Light, LIGHT_SIZES, LIGHT_ITEMS, DIM),
    )


def _id(name: str, expression: str, **size: int) -> dict[str, Any]:
    return {"feature_name": name, "expression": expression, "embedding_dim": DIM, **size}


def _group(name: str, features: list[str], group_type: str = "DEEP") -> dict[str, Any]:
    return {"group_name": name, "feature_names": features, "group_type": group_type}


def write_config(setting: Setting) -> Path:
    """The pipeline config of a run; its model_dir is beside it."""
    shape, folder = setting.shape, setting.folder
    config = {
        "train_input_path": ",".join(str(path) for path in shape.paths),
        "eval_input_path": "",
        "model_dir": str(folder / "model"),
        "train_config": {
            "sparse_optimizer": {"adagrad_optimizer": {"lr": SPARSE_RATE}, "constant_learning_rate": {}},
            "dense_optimizer": {"adam_optimizer": {"lr": DENSE_RATE}, "constant_learning_rate": {}},
            "num_epochs": 1,
            "save_checkpoints_steps": 0,
            "runtime": {"threads": setting.threads},
        },
        **shape.config,
        "data_config": {"dataset_type": "ParquetDataset", "fg_mode": "FG_DAG", **shape.config["data_config"]},
        "model_config": {**shape.config["model_config"], "losses": [{"binary_cross_entropy": {}}]},
    }
    path = folder / "pipeline.json"
    path.write_text(json.dumps(config))
    return path


def end_to_end(setting: Setting) -> list[float]:
    """When each step of the job began."""
    train(TrainRequest(str(write_config(setting)), overrides={}))
    (log,) = (setting.folder / "model").rglob(Path(layout.step_log(0)).name)
    return [json.loads(line)["at"] for line in log.read_text().splitlines()]


def prebuilt(setting: Setting) -> list[float]:
    """When each step began, and the last one ended."""
    config = pipeline.load(write_config(setting)).config
    features = pipeline.feature_set(config)
    batches = list(_batches(setting.shape, features))
    runtime = start_runtime(60, num_threads=setting.threads)
    try:
        step = _make_step(config, features, runtime)
        began = []
        for batch in batches:
            began.append(time.time())
            step(batch, float(batch.weights.sum()))
        return [*began, time.time()]
    finally:
        runtime.close()


def _batches(shape: Shape, features: FeatureSet) -> Iterator[Batch]:
    """All full batches."""
    columns = [column.name for column in features.input_columns]
    table = pa.concat_tables([pq.read_table(path, columns=columns) for path in shape.paths])
    for start in range(0, table.num_rows - shape.batch_size + 1, shape.batch_size):
        yield features.transform(table.slice(start, shape.batch_size), size=shape.batch_size)


def _make_step(config: Any, features: FeatureSet, runtime: Runtime) -> TrainStep:
    settings = config.train_config
    model = shard(build_model(config.model, features, seed=0), runtime, settings.sparse_optimizer, settings.runtime.sharding, 0)
    optimizers = Optimizers(model, settings.dense_optimizer, settings.sparse_optimizer)
    label = pipeline.label_of(config)
    padding = padding_batch(features, [label], config.data_config.batch_size)
    return TrainStep(model, optimizers, Objective(build_losses(config.model.losses), label), padding)


def plain(setting: Setting) -> list[float]:
    """When each step began, and the last one ended."""
    shape = setting.shape
    torch.set_num_threads(setting.threads)
    began: list[float] = []
    batches = plain_torch.read_batches(shape.paths, shape.columns, shape.batch_size, shape.prepare)
    plain_torch.train(shape.plain_model(setting.fused), batches, lambda: began.append(time.time()), (SPARSE_RATE, DENSE_RATE))
    return began


def examples_per_s(way: str, setting: Setting) -> float:
    """The rate behind the warm-up."""
    setting.folder.mkdir()
    try:
        times = {"end_to_end": end_to_end, "prebuilt": prebuilt, "plain": plain}[way](setting)
    finally:
        shutil.rmtree(setting.folder)
        gc.collect()
    timed = times[min(WARM_UP_STEPS, len(times) // 2) :]
    # From the beginning of one full step to that of a later one, or to the end of the last.
    return (len(timed) - 1) * setting.shape.batch_size / (timed[-1] - timed[0])


def measure(shape: Shape, threads: int, repeats: int, folder: Path) -> dict[str, Any]:
    """All ways by turns, `repeats` times; medians, and medians of the ratios within a turn."""
    by_tables = {fused: examples_per_s("plain", Setting(shape, threads, folder / "run", fused)) for fused in (True, False)}
    setting = Setting(shape, threads, folder / "run", fused=by_tables[True] >= by_tables[False])
    turns = [{way: examples_per_s(way, setting) for way in WAYS} for _ in range(repeats)]

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(value(turn) for turn in turns)

    return {
        "shape": shape.name,
        "threads": threads,
        "examples_per_s": {way: round(median(lambda turn, way=way: turn[way])) for way in WAYS},
        "loss": round(median(lambda turn: 1 - turn["end_to_end"] / turn["prebuilt"]), 3),
        "vs_plain": round(median(lambda turn: turn["end_to_end"] / turn["plain"]), 3),
        "plain_tables": "fused" if setting.fused else "one a feature",
        "turns": [{way: round(rate) for way, rate in turn.items()} for turn in turns],
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="heavy,light")
    parser.add_argument("--threads", type=_numbers, default=[1, 2], help="of torch; readers have their own")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeats", type=_numbers, default=[5, 3], help="turns, for each entry of --threads")
    parser.add_argument("--quick", action="store_true", help="few rows, one turn, one thread: that it runs, not how fast")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.threads, arguments.repeats = 17_000, [1], [1]
    logging.getLogger("tidemill").setLevel(logging.WARNING)
    results = []
    print(f"{'shape':6} {'threads':>7} {'end to end':>11} {'prebuilt':>9} {'plain':>9} {'loss':>7} {'vs plain':>9}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for make in [{"heavy": heavy, "light": light}[shape] for shape in arguments.shapes.split(",")]:
            shape = make(folder, arguments.rows)
            for threads, repeats in zip(arguments.threads, arguments.repeats, strict=True):
                found = measure(shape, threads, repeats, folder)
                rates = found["examples_per_s"]
                ways = f"{rates['end_to_end']:11,} {rates['prebuilt']:9,} {rates['plain']:9,}"
                print(f"{shape.name:6} {threads:7} {ways} {found['loss']:7.1%} {found['vs_plain']:9.2f}", flush=True)
                results.append(found)
    print(json.dumps({"benchmark": "train", "rows": arguments.rows, "targets_heavy": TARGETS, "results": results}))


if __name__ == "__main__":
    main()
