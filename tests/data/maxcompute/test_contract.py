"""The shipped contract of sources, over tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tidemill.config.env import OdpsCredentials
from tidemill.config.maxcompute import MaxComputeConfig
from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
from tidemill.testing.maxcompute import MaxComputeEmulator
from tidemill.testing.source_contract import SourceContract, numbered


class TestMaxCompute(SourceContract):
    is_ordered = True

    @pytest.fixture(autouse=True)
    def _emulator(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with MaxComputeEmulator(tmp_path_factory.mktemp("tables")) as self.emulator, ExitStack() as self.made:
            self.emulator.add_table("prj", "clicks", {"ds=3": numbered(0, 31), "ds=1": numbered(0, 0), "ds=2": numbered(31, 60)})
            self.emulator.add_table("prj", "more", {"": numbered(60, 66)})
            yield

    def make(self, directory: Path) -> MaxComputeSource:
        config = MaxComputeSourceConfig(
            paths=("odps://prj/tables/clicks/ds=3&ds=1&ds=2,odps://prj/tables/more",),
            is_orderby_partition=self.is_ordered,
            event_time_column="event_time",
            reading=MaxComputeConfig(readers=3, rows_per_request=7),
        )
        source = MaxComputeSource(config, ["event_id"], credentials=OdpsCredentials(self.emulator.endpoint, "a test", "id", "key"))
        self.made.callback(source.close)
        return source

    def num_rows(self) -> int:
        return 66


class TestMaxComputeAcrossPartitions(TestMaxCompute):
    is_ordered = False
