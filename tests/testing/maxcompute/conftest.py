"""An emulator with the clicks of three days, and the real client before it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from odps import ODPS
from odps.apis.storage_api import StorageApiArrowClient

from tidemill.clock import ManualClock
from tidemill.testing.maxcompute import MaxComputeEmulator


def clicks(start: int, rows: int) -> pa.Table:
    numbers = range(start, start + rows)
    return pa.table({"user": pa.array(numbers, pa.int64()), "page": [f"page{number % 7}" for number in numbers]})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def emulator(tmp_path: Path, clock: ManualClock) -> Iterator[MaxComputeEmulator]:
    with MaxComputeEmulator(tmp_path / "maxcompute", clock=clock, page=2) as emulator:
        days = {"dt=20240319": clicks(0, 100), "dt=20240318": clicks(0, 0), "dt=20240320": clicks(100, 50)}
        emulator.add_table("prj", "clicks", days)
        yield emulator


@pytest.fixture
def odps(emulator: MaxComputeEmulator) -> ODPS:
    return ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)


@pytest.fixture
def client_of(odps: ODPS) -> Callable[[str], StorageApiArrowClient]:
    return lambda table: StorageApiArrowClient(odps, odps.get_table(table))


@pytest.fixture
def client(client_of: Callable[[str], StorageApiArrowClient]) -> StorageApiArrowClient:
    return client_of("clicks")
