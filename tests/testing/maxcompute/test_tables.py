"""Tables on disk: folders taken up, replaced files, and rows from several threads at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from odps import ODPS
from odps.apis.storage_api import StorageApiArrowClient

from tidemill.clock import ManualClock
from tidemill.errors import ConfigError, DataError
from tidemill.testing.maxcompute import MaxComputeEmulator
from tidemill.testing.maxcompute.documents import TableName
from tidemill.testing.maxcompute.replies import ApiError
from tidemill.testing.maxcompute.tables import Tables

from .conftest import clicks
from .test_read_sessions import open_session, users

DAY_S = 24 * 3600.0


def write(path: Path, rows: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)


def test_a_folder_of_parquet_files_becomes_a_table(tmp_path: Path) -> None:
    table = tmp_path / "prj" / "default" / "clicks"
    write(table / "dt=1" / "hr=1" / "b.parquet", clicks(10, 5))
    write(table / "dt=1" / "hr=1" / "a.parquet", clicks(0, 10))
    write(table / "dt=1" / "hr=2" / "a.parquet", clicks(20, 1))
    write(tmp_path / "prj" / "lab" / "flat" / "rows.parquet", clicks(0, 3))

    with MaxComputeEmulator(tmp_path) as emulator:
        assert emulator.adopted == ["prj.default.clicks", "prj.lab.flat"]
        assert emulator.read_table("prj", "clicks", "dt=1/hr=1")["user"].to_pylist() == list(range(15))
        assert emulator.read_table("prj", "clicks", "dt='1',hr='2'").num_rows == 1
        assert emulator.read_table("prj", "flat", schema="lab").equals(clicks(0, 3))
    with MaxComputeEmulator(tmp_path) as emulator:
        assert emulator.adopted == []


@pytest.mark.parametrize(
    ("second", "rows", "text"),
    [
        ("dt=1/b.parquet", pa.table({"user": ["x"]}), "different columns"),
        ("hr=1/b.parquet", pa.table({"user": [1]}), "hr=1"),
        ("dt=1/b.parquet", pa.table({"user": pa.array([1], pa.uint8())}), "uint8"),
    ],
)
def test_a_folder_that_is_no_table_is_refused_by_name(tmp_path: Path, second: str, rows: pa.Table, text: str) -> None:
    table = tmp_path / "prj" / "default" / "clicks"
    write(table / "dt=1" / "a.parquet", pa.table({"user": [1]}))
    write(table / second, rows)

    with pytest.raises(DataError, match=f"clicks.*{text}"):
        MaxComputeEmulator(tmp_path)
    assert not (table / "table.json").exists()


def test_replaced_files_go_once_no_session_reads_them(tmp_path: Path) -> None:
    clock = ManualClock()
    with MaxComputeEmulator(tmp_path, clock=clock) as emulator:
        emulator.add_table("prj", "clicks", {"dt=1": clicks(0, 10)})
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        open_session(StorageApiArrowClient(odps, odps.get_table("clicks")))
        emulator.add_table("prj", "clicks", {"dt=1": clicks(10, 10)})

    def files() -> int:
        with MaxComputeEmulator(tmp_path, clock=clock) as emulator:
            assert emulator.read_table("prj", "clicks", "dt=1")["user"].to_pylist() == list(range(10, 20))
        return len(list(tmp_path.rglob("*.parquet")))

    assert files() == 2
    clock.advance(DAY_S)
    assert files() == 1


def test_rows_that_do_not_fit_leave_the_table_as_it_was(emulator: MaxComputeEmulator) -> None:
    with pytest.raises(ApiError, match="columns"):
        emulator.add_table("prj", "clicks", {"dt=20240319": pa.table({"other": [1]})})
    with pytest.raises(ApiError, match="dt"):
        emulator.add_table("prj", "clicks", {"hr=1": clicks(0, 1)})
    with pytest.raises(ValueError, match="at least one partition"):
        emulator.add_table("prj", "empty", {})

    assert emulator.read_table("prj", "clicks", "dt=20240319").equals(clicks(0, 100))


def test_many_threads_read_and_write_at_once(emulator: MaxComputeEmulator, odps: ODPS) -> None:
    table = odps.get_table("clicks")

    def read(start: int) -> list[int]:
        client = StorageApiArrowClient(odps, table)
        return users(client, open_session(client, "dt=20240319").session_id, start, 25)

    def add(number: int) -> None:
        emulator.add_table("prj", "clicks", {f"dt=new{number}": clicks(number, 1)})

    with ThreadPoolExecutor(8) as pool:
        added = [pool.submit(add, number) for number in range(8)]
        assert list(pool.map(read, [0, 25, 50, 75] * 2)) == [list(range(start, start + 25)) for start in [0, 25, 50, 75] * 2]
        assert [future.result() for future in added] == [None] * 8
    assert len(list(table.partitions)) == 3 + 8


def test_a_table_of_a_crash_in_the_midst_of_a_write_is_whole(tmp_path: Path) -> None:
    """Files that no document names, as a killed process leaves them, are no rows."""
    tables = Tables(tmp_path, ManualClock())
    with MaxComputeEmulator(tmp_path) as emulator:
        emulator.add_table("prj", "clicks", {"dt=1": clicks(0, 10)})
    tables.write_file(TableName(project="prj", table="clicks"), "dt=1", "left-over", clicks(50, 10))

    with MaxComputeEmulator(tmp_path) as emulator:
        assert emulator.read_table("prj", "clicks", "dt=1").num_rows == 10


def test_a_port_that_is_taken(emulator: MaxComputeEmulator, tmp_path: Path) -> None:
    port = int(emulator.endpoint.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=str(port)):
        MaxComputeEmulator(tmp_path / "other", port=port)
    # Nothing is held by the one that failed.
    with MaxComputeEmulator(tmp_path / "other"):
        pass
