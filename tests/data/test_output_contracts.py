"""The shipped contract over outputs that are folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tidemill import registry
from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.csv import CsvOutput, CsvOutputConfig
from tidemill.data.writers.output import Output, OutputConfig
from tidemill.data.writers.parquet import ParquetOutput
from tidemill.errors import NotFoundError
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.testing.faulty_storage import FaultyStorage
from tidemill.testing.output_contract import OutputContract, rows


def age(folder: Path, seconds: float) -> None:
    """Let hidden parts be as old as if the run that wrote them had been killed then."""
    for path in (folder / "_temporary").rglob("*"):
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


class FolderContract(OutputContract):
    atomic = False
    counts_operations = True

    def setup_method(self) -> None:
        self._faulty: FaultyStorage | None = None

    def storage(self, directory: Path) -> Storage:
        age(directory / "out", 30 * 86400.0)
        return self._faulty or LocalStorage(directory / "out")

    def encoded(self, data: pa.Buffer, key: str) -> pa.Table:
        raise NotImplementedError

    def read(self, directory: Path) -> pa.Table | None:
        storage = LocalStorage(directory / "out")
        try:
            manifest = OutputManifest.parse(storage.read(layout.SUCCESS), where="_SUCCESS")
        except NotFoundError:
            return None
        parts = [info.key for info in storage.list("part-")]
        assert parts == sorted(entry.key for entry in manifest.files)
        tables = [self.encoded(pa.py_buffer(storage.read(entry.key)), entry.key) for entry in manifest.files]
        found = pa.concat_tables(tables) if tables else rows(0, 0)
        assert found.num_rows == manifest.rows
        return found

    def leftovers(self, directory: Path) -> list[str]:
        return [path.name for path in (directory / "out").rglob("*") if not path.name.startswith(("part-", "_SUCCESS"))]

    @contextmanager
    def dying(self, directory: Path, number: int) -> Iterator[None]:
        self._faulty = FaultyStorage(LocalStorage(directory / "out"))
        self._faulty.crash_at(number)
        try:
            yield
        finally:
            self._faulty = None


class TestParquet(FolderContract):
    def make(self, directory: Path, *, overwrite: bool = False) -> Output:
        return ParquetOutput(
            OutputConfig(path="unused", overwrite=overwrite), self.storage(directory), part_bytes=200, clock=ManualClock()
        )

    def encoded(self, data: pa.Buffer, key: str) -> pa.Table:
        return pq.read_table(pa.BufferReader(data))


class TestCsv(FolderContract):
    suffix = "csv"

    def make(self, directory: Path, *, overwrite: bool = False) -> Output:
        config = CsvOutputConfig(path=f"unused/*.{self.suffix}", overwrite=overwrite)
        return CsvOutput(config, self.storage(directory), part_bytes=200, clock=ManualClock())

    def encoded(self, data: pa.Buffer, key: str) -> pa.Table:
        assert key.endswith(f".{self.suffix}")
        convert = pa.csv.ConvertOptions(
            column_types=rows(0, 1).schema, strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""]
        )
        stream = pa.input_stream(data, compression={"csv": None, "csv.gz": "gzip", "csv.zst": "zstd"}[self.suffix])
        return pa.csv.read_csv(stream, convert_options=convert)


class TestCsvGzip(TestCsv):
    suffix = "csv.gz"


class TestCsvZstd(TestCsv):
    suffix = "csv.zst"


def test_every_registered_output_has_a_contract() -> None:
    """Those that need a service have theirs in test_kafka_output and test_maxcompute_output."""
    assert registry.kinds("output") == ["csv", "kafka", "maxcompute", "parquet"]
    for kind in registry.kinds("output"):
        output: type[Output] = registry.resolve("output", kind)
        assert output.kind == kind
        assert {"path", "overwrite"} <= output.Config.model_fields.keys()


def test_parts_of_another_format_and_of_a_larger_run_are_gone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("part-00007.parquet", b"of an earlier run")
    storage.write("part-00000.csv.zst", b"of an earlier run")
    storage.write("mine.txt", b"not a part")
    output = CsvOutput(CsvOutputConfig(path=str(tmp_path), overwrite=True))
    output.write(rows(0, 3))
    output.commit({}, [output.deliver({}, 0)])
    assert [info.key for info in storage.list()] == ["_SUCCESS", "mine.txt", "part-00000.csv"]


def test_csv_names_its_folder_by_the_pattern(tmp_path: Path) -> None:
    output = CsvOutput(CsvOutputConfig(path=f"{tmp_path}/x/*.csv", header=False, delimiter="\t"))
    output.write(rows(1, 3))
    output.commit({}, [output.deliver({}, 0)])
    lines = (tmp_path / "x" / "part-00000.csv").read_text().splitlines()
    assert lines == ['1\t"row 1, ""ü"""\t0.14285714285714285', '2\t"row 2, ""ü"""\t0.2857142857142857']


@pytest.mark.parametrize("path", ["a/scores.csv", "a/*/b.csv", "a/part-*.csv.gz"])
def test_csv_refuses_a_single_file(path: str) -> None:
    with pytest.raises(Exception, match="in parts"):
        CsvOutput(CsvOutputConfig(path=path))


def test_csv_refuses_lists_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"'ids' is list"):
        CsvOutput(CsvOutputConfig(path=str(tmp_path))).check(pa.schema([("ids", pa.list_(pa.int64()))]))
