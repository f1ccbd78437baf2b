"""Whether a day's table is complete: files and MaxCompute partitions, with a marker and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.errors import ConfigError
from tidemill.lineage.completeness import table_lacks
from tidemill.lineage.cycle import CompleteConfig, DailyConfig
from tidemill.lineage.tables import missing
from tidemill.testing.maxcompute import MaxComputeEmulator

DATE = "20240102"
ROWS = pa.table({"user": [1, 2, 3]})


def daily(tmp_path: Path, pattern: str = "${bizdate}/*.parquet", marker: str = "") -> DailyConfig:
    complete = CompleteConfig(marker=f"{tmp_path}/{marker}" if marker else "")
    return DailyConfig(input_path=f"{tmp_path}/{pattern}", complete=complete)


def test_files_come_with_rows(tmp_path: Path) -> None:
    table = daily(tmp_path)
    assert table_lacks(table, DATE) == f"no file matches '{tmp_path}/{DATE}/*.parquet'"
    (tmp_path / DATE).mkdir()
    pq.write_table(ROWS.slice(0, 0), tmp_path / DATE / "a.parquet")
    assert "1 files, but no row in them" in table_lacks(table, DATE), "Spark writes an empty part for an empty day"
    (tmp_path / DATE / "b.parquet").write_bytes(b"PAR1 half a file")
    assert "b.parquet: not a whole Parquet file (yet)" in table_lacks(table, DATE)
    pq.write_table(ROWS, tmp_path / DATE / "b.parquet")
    assert table_lacks(table, DATE) == ""
    assert "20240103" in table_lacks(table, "20240103"), "each date has its own"


def test_every_pattern_must_match(tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "a.parquet")
    assert missing(f"{tmp_path}/a.parquet") == ""
    assert f"no file matches '{tmp_path}/b.parquet'" in missing(f"{tmp_path}/a.parquet,{tmp_path}/b.parquet")


def test_a_csv_file_isnt_empty(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    assert "no row" in missing(f"{tmp_path}/*.csv")
    (tmp_path / "a.csv").write_text("user\n1\n")
    assert missing(f"{tmp_path}/*.csv") == ""


def test_a_marker_decides_alone(tmp_path: Path) -> None:
    """As jobs leave one when all their files are written; before, the files that are there may be half of them."""
    table = daily(tmp_path, marker="${bizdate}/_SUCCESS")
    (tmp_path / DATE).mkdir()
    pq.write_table(ROWS, tmp_path / DATE / "a.parquet")
    assert table_lacks(table, DATE) == f"no file matches '{tmp_path}/{DATE}/_SUCCESS'"
    (tmp_path / DATE / "_SUCCESS").touch()
    assert table_lacks(table, DATE) == ""


def test_sources_without_an_end_lack_nothing() -> None:
    assert missing("kafka://127.0.0.1:1/clicks?group.id=g") == ""


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MaxComputeEmulator]:
    with MaxComputeEmulator(tmp_path / "maxcompute") as running:
        credentials = tmp_path / "odps.ini"
        credentials.write_text(f"access_id=id\naccess_key=secret\nend_point={running.endpoint}\n")
        monkeypatch.setenv("ODPS_CONFIG_FILE_PATH", str(credentials))
        yield running


CLICKS = "odps://prj/tables/clicks/dt=${bizdate}"


def test_a_partition_is_there_and_holds_rows(emulator: MaxComputeEmulator) -> None:
    """`${bizdate}` in cycle.yaml names the day's partition."""
    table = DailyConfig(input_path=CLICKS)
    assert table_lacks(table, DATE) == f"odps://prj.clicks, partition dt={DATE} isn't there"
    emulator.add_table("prj", "clicks", {"dt=20240101": ROWS})
    assert "isn't there" in table_lacks(table, DATE)
    emulator.add_table("prj", "clicks", {f"dt={DATE}": ROWS.slice(0, 0)})
    assert "nothing is in it" in table_lacks(table, DATE)
    emulator.add_table("prj", "clicks", {f"dt={DATE}": ROWS})
    assert table_lacks(table, DATE) == ""
    assert not emulator.requests("create_read_session"), "looking costs no read session"


def test_each_partition_of_several_is_there(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "hours", {f"dt={DATE}/hr=00": ROWS})
    address = "odps://prj/tables/hours/dt=${bizdate}/hr=00&dt=${bizdate}/hr=01"
    assert table_lacks(DailyConfig(input_path=address), DATE) == f"odps://prj.hours, partition dt={DATE}/hr=01 isn't there"
    emulator.add_table("prj", "hours", {f"dt={DATE}/hr=01": ROWS.slice(0, 0)})
    assert table_lacks(DailyConfig(input_path=address), DATE) == "", "an hour may be empty"


def test_a_partition_can_be_the_marker(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "clicks", {f"dt={DATE}": ROWS})
    table = DailyConfig(input_path=CLICKS, complete=CompleteConfig(marker="odps://prj/tables/done/dt=${bizdate}"))
    assert "prj.done" in table_lacks(table, DATE)
    emulator.add_table("prj", "done", {f"dt={DATE}": ROWS.slice(0, 0)})
    assert table_lacks(table, DATE) == ""


def test_an_address_that_cannot_be_meant_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="isn't of the form"):
        missing("odps://prj/clicks")
