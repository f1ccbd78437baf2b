"""Feature generation on one core: rows per second at 4,096 rows, and the time of small batches as a server sees them.

The plan: 20 text ids (5 % null), 8 text columns of 0 to 5 values, 2 sequences of 50 ids, 10 float32 with log10.
Prints a table, then one line of JSON.

    python -m benchmarks.features [--rows 4096] [--seconds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from tidemill import registry
from tidemill.config.base import Config
from tidemill.features import feature_set, vectorized
from tidemill.features.feature_set import FeatureSet

VARIANTS = {"compiled": feature_set.encode, "numpy": vectorized.encode}


def make_features() -> list[tuple[str, Config]]:
    def feature(kind: str, name: str, **fields: object) -> tuple[str, Config]:
        return kind, registry.resolve("feature", kind).Config(feature_name=name, expression=f"user:{name}", **fields)

    ids = [feature("id_feature", f"id{k}", embedding_dim=16, hash_bucket_size=1_000_000) for k in range(20)]
    bags = [feature("id_feature", f"bag{k}", embedding_dim=16, hash_bucket_size=100_000) for k in range(8)]
    sequences = [
        feature("sequence_id_feature", f"seq{k}", embedding_dim=16, hash_bucket_size=1_000_000, sequence_length=50)
        for k in range(2)
    ]
    raws = [feature("raw_feature", f"raw{k}", normalizer="method=log10,threshold=0.001,default=-3") for k in range(10)]
    return [*ids, *bags, *sequences, *raws]


def make_rows(num_rows: int, seed: int = 0) -> pa.RecordBatch:
    random = np.random.default_rng(seed)

    def texts(count: int) -> list[str]:
        return [f"i{value}" for value in random.integers(0, 10**8, count)]

    def joined(counts: np.ndarray, separator: str) -> list[str]:
        pool = iter(texts(int(counts.sum())))
        return [separator.join(next(pool) for _ in range(count)) for count in counts.tolist()]

    columns: dict[str, pa.Array] = {}
    for k in range(20):
        columns[f"id{k}"] = pa.array(texts(num_rows), mask=random.random(num_rows) < 0.05)
    for k in range(8):
        columns[f"bag{k}"] = pa.array(joined(random.integers(0, 6, num_rows), "\x1d"))
    for k in range(2):
        columns[f"seq{k}"] = pa.array(joined(np.full(num_rows, 50), ";"))
    for k in range(10):
        columns[f"raw{k}"] = pa.array(random.random(num_rows).astype(np.float32) * 100)
    return pa.RecordBatch.from_pydict(columns)


def median_s(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call, over `seconds` and at least five calls."""
    call()
    times, until = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    features = FeatureSet.compile(make_features())
    results: dict[str, dict[str, float]] = {}
    for variant, encode in VARIANTS.items():
        feature_set.encode = encode
        rows = make_rows(arguments.rows)
        large = median_s(lambda rows=rows: features.transform(rows), arguments.seconds)
        results[variant] = {"rows_per_s": arguments.rows / large}
        for count in (1, 50, 200):
            small = make_rows(count)
            results[variant][f"ms_{count}"] = 1e3 * median_s(lambda rows=small: features.transform(rows), 0.5)
    print(f"{'kernel':10} {'rows/s':>10} {'1 row ms':>9} {'50 ms':>7} {'200 ms':>7}")
    for variant, row in results.items():
        print(f"{variant:10} {row['rows_per_s']:10,.0f} {row['ms_1']:9.2f} {row['ms_50']:7.2f} {row['ms_200']:7.2f}")
    print(json.dumps({"benchmark": "features", "rows": arguments.rows, "results": results}))


if __name__ == "__main__":
    main()
