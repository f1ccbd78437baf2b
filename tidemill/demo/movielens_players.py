"""Replays recorded interactions, in a process of its own: each is scored by the server, then its outcome goes to the topic.

`python -m tidemill.demo.movielens_players FOLDER` reads FOLDER/options.json, plays all rows that it names, and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import uvloop

from tidemill import logs
from tidemill.demo.movielens import FEATURES, SCHEMA, read
from tidemill.demo.players import INPUT_TYPES, LoadOptions, Play
from tidemill.demo.playlog import OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(LoadOptions):
    """What to replay: rows [first_row, end_row) of the files in a folder, so many in each request."""

    data: str
    first_row: int
    end_row: int
    rows_per_request: int


class Replay:
    """The recorded users. A request holds consecutive interactions, whoever's they are; what they are shown is what they rated."""

    schema = SCHEMA

    def __init__(self, rows: pa.Table, rows_per_request: int) -> None:
        self._rows = rows
        self._size = rows_per_request
        self._times = rows["event_time"].to_numpy()

    def event_time(self, number: int) -> float | None:
        """That of the request's first interaction."""
        place = number * self._size
        return float(self._times[place]) if place < len(self._times) else None

    def ask(self, number: int) -> pa.RecordBatch:
        """The request's interactions."""
        return self._rows.slice(number * self._size, self._size).combine_chunks().to_batches()[0]

    def body(self, ask: pa.RecordBatch) -> bytes:
        """Their features."""
        columns = [(name, ask.column(name)) for name in FEATURES]
        inputs = [
            {"name": name, "shape": [len(column)], "datatype": INPUT_TYPES[column.type], "data": column.to_pylist()}
            for name, column in columns
        ]
        return orjson.dumps({"inputs": inputs})

    def see(self, ask: pa.RecordBatch, scores: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray]:
        """The outcomes are known: the score changes nothing."""
        return ask, scores


def main() -> None:
    """Play what the folder's options say."""
    logs.set_up()
    folder = Path(sys.argv[1])
    options = ReplayOptions(**json.loads((folder / OPTIONS).read_text(encoding="utf-8")))
    rows = read(Path(options.data)).rows.slice(options.first_row, options.end_row - options.first_row)

    async def play() -> None:
        await Play(folder, options, Replay(rows, options.rows_per_request)).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


if __name__ == "__main__":
    main()
