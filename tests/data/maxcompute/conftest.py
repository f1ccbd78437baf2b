"""Tables on an emulator, whose clock is the source's too: waiting costs no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemill.clock import ManualClock
from tidemill.config.env import OdpsCredentials
from tidemill.config.maxcompute import MaxComputeConfig
from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
from tidemill.testing.maxcompute import MaxComputeEmulator

MakeSource = Callable[..., MaxComputeSource]


def numbers(first: int, count: int) -> pa.Table:
    """`count` rows with ids of their own."""
    ids = pa.array(range(first, first + count), pa.int64())
    return pa.table({"id": ids, "name": pa.array([f"n{i}" for i in range(first, first + count)], pa.string())})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def emulator(tmp_path: Path, clock: ManualClock) -> Iterator[MaxComputeEmulator]:
    with closing(MaxComputeEmulator(tmp_path / "tables", clock=clock)) as emulator:
        yield emulator


@pytest.fixture
def make(emulator: MaxComputeEmulator, clock: ManualClock) -> Iterator[MakeSource]:
    """A source as a new process would make it; all are closed in the end."""
    made: list[MaxComputeSource] = []

    def build(
        *paths: str, columns: list[str] | None = None, reading: dict[str, Any] | None = None, **options: Any
    ) -> MaxComputeSource:
        settings = MaxComputeConfig(**{"rows_per_request": 1000, "rows_per_batch": 300, "readers": 2, **(reading or {})})
        config = MaxComputeSourceConfig(paths=paths, reading=settings, **options)
        credentials = OdpsCredentials(emulator.endpoint, "a test", "id", "SECRET-KEY")
        made.append(MaxComputeSource(config, columns, credentials=credentials, clock=clock))
        return made[-1]

    yield build
    for source in made:
        source.close()
