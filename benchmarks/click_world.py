"""How fast the click world writes a day's table into Parquet: rows per second of one core's time.

    python benchmarks/click_world.py [ROWS]

Prints a table, then the figures as one JSON line. CPU seconds count all threads of the process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tidemill.data.click_world import World, write_day


def measure(num_rows: int) -> dict[str, float]:
    world = World(seed=0)
    world.day_table(1, 1000)
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_day(world, 1, Path(folder), num_rows)
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        size = sum(path.stat().st_size for path in paths)
    return {
        "rows": num_rows,
        "wall_s": round(wall_s, 3),
        "rows_per_s": round(num_rows / wall_s),
        "rows_per_core_s": round(num_rows / cpu_s),
        "bytes_per_row": round(size / num_rows, 1),
    }


def main() -> None:
    figures = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
    for name, value in figures.items():
        print(f"{name:<16} {value:>12,}")
    print(json.dumps({"benchmark": "click_world", **figures}))


if __name__ == "__main__":
    main()
