"""Rows per second that the bare pyodps client reads from the MaxCompute emulator, which runs in a process of its own.

    python benchmarks/maxcompute.py [ROWS]

What a source can reach at most: nothing is done with the rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
from odps import ODPS
from odps.apis.storage_api import Compression, ReadRowsRequest, SplitOptions, StorageApiArrowClient, TableBatchScanRequest

from tidemill.testing.maxcompute import MaxComputeProcess

TURNS = 5
MAX_BATCH_ROWS = 4096


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


def read_all(client: StorageApiArrowClient, columns: list[str], compression: Compression) -> int:
    """Read a session's rows in one request; how many they were."""
    options = SplitOptions.get_default_options(SplitOptions.SplitMode.ROW_OFFSET)
    session = client.create_read_session(TableBatchScanRequest(required_data_columns=columns, split_options=options))
    request = ReadRowsRequest(
        session.session_id, row_count=session.record_count, max_batch_rows=MAX_BATCH_ROWS, compression=compression
    )
    reader, rows = client.read_rows_arrow(request), 0
    while (batch := reader.read()) is not None:
        rows += batch.num_rows
    return rows


def rates(client: StorageApiArrowClient, columns: list[str], compression: Compression, rows: int) -> list[float]:
    """Rows per second of each turn; one more before them warms the emulator up."""
    found = []
    for _ in range(TURNS + 1):
        start = time.perf_counter()
        assert read_all(client, columns, compression) == rows
        found.append(rows / (time.perf_counter() - start))
    return sorted(found[1:])


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    data = table(rows)
    results = []
    with tempfile.TemporaryDirectory() as folder, MaxComputeProcess(folder) as emulator:
        emulator.add_table("prj", "rates", {"": data})
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        client = StorageApiArrowClient(odps, odps.get_table("rates"))
        for columns in (data.column_names[:5], data.column_names):
            for compression in Compression:
                found = rates(client, columns, compression, rows)
                results.append({"columns": len(columns), "compression": compression.name, "rows_per_s": round(found[TURNS // 2])})
                print(f"{len(columns):3} columns  {compression.name:12}  {found[TURNS // 2]:12,.0f} rows/s  "
                      f"({found[0]:,.0f} to {found[-1]:,.0f})")  # fmt: skip
    print(json.dumps({"rows": rows, "load": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()
