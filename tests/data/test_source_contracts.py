"""The shipped contract over sources that need no service."""

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.data.sources.synthetic import SyntheticSource
from tidemill.testing.scripted_source import Idle, Rows, ScriptedSource
from tidemill.testing.source_contract import SourceContract, numbered


def timed(start: int, stop: int) -> Rows:
    return Rows(numbered(start, stop), event_time=[float(number) for number in range(start, stop)])


class TestParquet(SourceContract):
    def make(self, directory: Path) -> ParquetSource:
        if not any(directory.iterdir()):
            for name, start, stop in (("b", 0, 31), ("a", 31, 60), ("empty", 0, 0)):
                pq.write_table(numbered(start, stop), directory / f"{name}.parquet", row_group_size=10)
        return ParquetSource(ParquetConfig(paths=f"{directory}/*.parquet", event_time_column="event_time"), ["event_id"])

    def num_rows(self) -> int:
        return 60

    def change(self, directory: Path) -> bool:
        pq.write_table(numbered(100, 129), directory / "a.parquet", row_group_size=10)
        return True


class TestCsv(SourceContract):
    """One file plain, one compressed."""

    def make(self, directory: Path) -> CsvSource:
        if not any(directory.iterdir()):
            write_csv(directory / "b.csv", 0, 31)
            write_csv(directory / "a.csv.gz", 31, 60)
            write_csv(directory / "empty.csv", 0, 0)
        config = CsvConfig(paths=f"{directory}/*", with_header=True, event_time_column="event_time")
        return CsvSource(config, {"event_id": pa.string(), "event_time": pa.float64()})

    def num_rows(self) -> int:
        return 60

    def change(self, directory: Path) -> bool:
        write_csv(directory / "a.csv.gz", 100, 129)
        return True


def write_csv(path: Path, start: int, stop: int) -> None:
    with pa.output_stream(path) as out:
        pyarrow.csv.write_csv(numbered(start, stop), out)


class TestScripted(SourceContract):
    def make(self, directory: Path) -> ScriptedSource:
        shift = 7 if (directory / "changed").exists() else 0
        scripts = {"b": [timed(0, 20 + shift), Idle(0.001), timed(30, 33)], "a": [timed(40, 61)]}
        return ScriptedSource(scripts)

    def num_rows(self) -> int:
        return 44

    def change(self, directory: Path) -> bool:
        (directory / "changed").touch()
        return True


class TestSynthetic(SourceContract):
    batch_size = 2500

    def make(self, directory: Path) -> SyntheticSource:
        return SyntheticSource(SyntheticSource.Config(num_rows=self.num_rows(), num_splits=2))

    def num_rows(self) -> int:
        return 20_000
