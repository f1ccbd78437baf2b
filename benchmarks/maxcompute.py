"""Rows per second from the MaxCompute emulator: the bare pyodps client against our whole path, session to RawBatch.

Both read the same rows, by turns; the emulator runs in a process of its own. Prints a table, then one line of JSON.

    python -m benchmarks.maxcompute [ROWS]
"""

from __future__ import annotations

import json
import os
import statistics
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

TURNS = 5
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


def pairs(rows: int, *reads: Callable[[], int]) -> list[list[float]]:
    """Rows per second of each way to read, turn by turn; a first turn warms everything up."""
    found: list[list[float]] = [[] for _ in reads]
    for turn in range(TURNS + 1):
        for rates, read in zip(found, reads, strict=True):
            start = time.perf_counter()
            assert read() == rows
            if turn:
                rates.append(rows / (time.perf_counter() - start))
    return found


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    data = table(rows)
    results = []
    with tempfile.TemporaryDirectory() as folder, MaxComputeProcess(folder) as emulator:
        emulator.add_table("prj", "rates", {"": data})
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        client = StorageApiArrowClient(odps, odps.get_table("rates"))
        print("columns  compression   bare rows/s    ours rows/s   ours/bare (median of pairs, least to most)")
        for columns in (data.column_names[:5], data.column_names):
            for compression in Compression:
                reads = partial(bare, client, columns, compression), partial(ours, emulator.endpoint, columns, compression)
                first, second = pairs(rows, *reads)
                shares = sorted(b / a for a, b in zip(first, second, strict=True))
                rates = statistics.median(first), statistics.median(second)
                print(f"{len(columns):7}  {compression.name:12} {rates[0]:12,.0f}   {rates[1]:12,.0f}   "
                      f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})")  # fmt: skip
                results.append({"columns": len(columns), "compression": compression.name, "bare_rows_per_s": round(rates[0]),
                                "rows_per_s": round(rates[1]), "share": round(statistics.median(shares), 3)})  # fmt: skip
    print(json.dumps({"rows": rows, "load": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()
