"""Rows per second from the MaxCompute emulator: the bare pyodps client against our whole path, session to RawBatch.

Both read the same rows, by turns and in changing order, session and all; the emulator runs in a process of its own. CPU is that
of the reading process alone. Prints a table, then one line of JSON.

    python -m benchmarks.maxcompute [ROWS]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import pyarrow as pa
from odps import ODPS
from odps.apis.storage_api import Compression, ReadRowsRequest, SplitOptions, StorageApiArrowClient, TableBatchScanRequest

from tidemill.config.env import OdpsCredentials
from tidemill.data.assignment import assign
from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
from tidemill.testing.maxcompute import MaxComputeProcess

TURNS = 7
MAX_BATCH_ROWS = 4096
"""The client's own default."""
PATIENCE_S = 60.0


def table(rows: int) -> pa.Table:
    """23 columns: an id, a label, 8 doubles, 8 bigints and 5 strings of 8 characters."""
    random = np.random.default_rng(1)
    columns: dict[str, pa.Array] = {"id": pa.array(np.arange(rows)), "label": pa.array(random.random(rows) < 0.3)}
    for number in range(8):
        columns[f"double{number}"] = pa.array(random.random(rows))
        columns[f"bigint{number}"] = pa.array(random.zipf(1.2, rows) % 1_000_000)
    for number in range(5):
        columns[f"string{number}"] = pa.array([f"u{value:07d}" for value in random.integers(0, 100_000, rows)])
    return pa.table(columns)


def bare(client: StorageApiArrowClient, columns: list[str], compression: Compression) -> int:
    """Read a new session's rows in one request; how many they were."""
    options = SplitOptions.get_default_options(SplitOptions.SplitMode.ROW_OFFSET)
    session = client.create_read_session(TableBatchScanRequest(required_data_columns=columns, split_options=options))
    request = ReadRowsRequest(
        session.session_id, row_count=session.record_count, max_batch_rows=MAX_BATCH_ROWS, compression=compression
    )
    reader, rows = client.read_rows_arrow(request), 0
    while (batch := reader.read()) is not None:
        rows += batch.num_rows
    return rows


def ours(endpoint: str, columns: list[str], compression: Compression) -> int:
    """Read everything that a new source discovers; how many rows came."""
    config = MaxComputeSourceConfig(paths=("odps://prj/tables/rates",), compression=compression.name)
    source = MaxComputeSource(config, columns, credentials=OdpsCredentials(endpoint, "a benchmark", "id", "secret"))
    rows = 0
    with closing(source), closing(source.open_all(assign(source.discover(), {}, 1, 0))) as reader:
        while True:
            try:
                raw = reader.read(PATIENCE_S)
            except EOFError:
                return rows
            rows += raw.num_rows if raw is not None else 0


def pairs(rows: int, *reads: Callable[[], int]) -> np.ndarray:
    """(turns, ways to read, 2): rows per second, and per second of CPU; a first turn warms everything up."""
    found = np.zeros((TURNS + 1, len(reads), 2))
    for turn in range(TURNS + 1):
        for place in range(len(reads)) if turn % 2 else reversed(range(len(reads))):
            start, start_cpu = time.perf_counter(), time.process_time()
            assert reads[place]() == rows
            found[turn, place] = rows / (time.perf_counter() - start), rows / (time.process_time() - start_cpu)
    return found[1:]


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    data = table(rows)
    results = []
    with tempfile.TemporaryDirectory() as folder, MaxComputeProcess(folder) as emulator:
        emulator.add_table("prj", "rates", {"": data})
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        client = StorageApiArrowClient(odps, odps.get_table("rates"))
        print(f"{'columns':>7}  {'compression':12} {'bare rows/s':>12} {'ours':>12}  {'ratio (middle half)':19}"
              f" {'bare / CPU s':>13} {'ours':>12}  ratio (middle half)")  # fmt: skip
        for columns in (data.column_names[:5], data.column_names):
            for compression in Compression:
                reads = partial(bare, client, columns, compression), partial(ours, emulator.endpoint, columns, compression)
                found = pairs(rows, *reads)
                (first, first_cpu), (second, second_cpu) = np.median(found, axis=0)
                # Within a turn: what else the machine does is shared.
                quarters = np.quantile(found[:, 1] / found[:, 0], [0.25, 0.5, 0.75], axis=0)
                shares = [f"{middle:.2f} ({least:.2f} to {most:.2f})" for least, middle, most in quarters.T]
                print(f"{len(columns):7}  {compression.name:12} {first:12,.0f} {second:12,.0f}  {shares[0]:19}"
                      f" {first_cpu:13,.0f} {second_cpu:12,.0f}  {shares[1]}", flush=True)  # fmt: skip
                results.append({"columns": len(columns), "compression": compression.name, "bare_rows_per_s": round(first),
                                "rows_per_s": round(second), "share": round(quarters[1, 0], 3),
                                "bare_rows_per_cpu_s": round(first_cpu), "rows_per_cpu_s": round(second_cpu),
                                "share_cpu": round(quarters[1, 1], 3)})  # fmt: skip
    print(json.dumps({"rows": rows, "load": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()
