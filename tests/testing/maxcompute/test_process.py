"""The emulator in a process of its own: the command, the helper, kills and restarts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from odps import ODPS
from odps.apis.storage_api import SessionStatus, StorageApiArrowClient

from tidemill.errors import StorageError, TidemillError
from tidemill.testing.maxcompute import MaxComputeEmulator, MaxComputeProcess

from .conftest import clicks
from .test_read_sessions import open_session, status, users
from .test_write_sessions import commit, write
from .test_write_sessions import open_session as open_write_session

TIMEOUT_S = 30.0


def client_of(endpoint: str) -> StorageApiArrowClient:
    odps = ODPS("id", "secret", project="prj", endpoint=endpoint)
    return StorageApiArrowClient(odps, odps.get_table("clicks"))


@pytest.fixture
def process(tmp_path: Path):
    with MaxComputeProcess(tmp_path / "maxcompute") as process:
        process.add_table("prj", "clicks", {"dt=1": clicks(0, 100)})
        yield process


def test_sessions_and_tables_outlive_a_kill(process: MaxComputeProcess) -> None:
    client, endpoint = client_of(process.endpoint), process.endpoint
    reading, writing = open_session(client, "dt=1"), open_write_session(client, "dt=1")
    message = write(client, writing, clicks(500, 2))

    process.kill()
    assert process.pid is None
    process.restart()

    assert process.endpoint == endpoint
    assert commit(client, writing, message)[1] is SessionStatus.COMMITTED
    assert process.read_table("prj", "clicks", "dt=1")["user"].to_pylist() == [500, 501]
    assert users(client, reading.session_id, 98, 2) == [98, 99]


def test_the_helper_asks_for_faults_and_time_as_in_process(process: MaxComputeProcess) -> None:
    client = client_of(process.endpoint)
    process.faults.wrong_row_count(by=3)
    session = open_session(client, "dt=1")
    assert session.record_count == 103

    process.advance(24 * 3600)
    assert status(client, session.session_id) is SessionStatus.EXPIRED
    other = open_session(client, "dt=1")
    process.end_session(other.session_id, "CRITICAL")
    assert status(client, other.session_id) is SessionStatus.CRITICAL
    assert [request.status for request in process.requests("create_read_session")] == [201, 201]
    process.faults.drop("create_read_session")
    process.faults.clear()
    assert open_session(client, "dt=1").session_status is SessionStatus.NORMAL
    with pytest.raises(TidemillError, match="nope"):
        process.end_session("nope")


def test_one_emulator_a_folder(process: MaxComputeProcess) -> None:
    with pytest.raises(TidemillError, match="another MaxCompute emulator"):
        MaxComputeProcess(process.folder)
    with pytest.raises(StorageError, match="another MaxCompute emulator"):
        MaxComputeEmulator(process.folder)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = "import os, sys; from tidemill.testing.maxcompute import MaxComputeProcess; "
    # Ends without any cleaning up, as a killed test does.
    code += "print(MaxComputeProcess(sys.argv[1]).pid, flush=True); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    pid, deadline = int(done.stdout), time.monotonic() + TIMEOUT_S
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_bare_parquet_files_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "tables"
    for hour in (1, 2):
        path = folder / "prj" / "default" / "clicks" / "dt=1" / f"hr={hour}"
        path.mkdir(parents=True)
        pq.write_table(pa.table({"user": [hour]}), path / "rows.parquet")
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "maxcompute-emulator", "--dir", str(folder), "--port", "0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
        start_new_session=True,
    )
    try:
        client = client_of(_await_endpoint(folder / ".emulator" / "address.json", process))
        session = open_session(client, "dt=1/hr=2", "dt=1/hr=1")
        assert users(client, session.session_id, 0, 2) == [2, 1]
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert not (folder / ".emulator" / "address.json").exists()


def _await_endpoint(path: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    address = json.loads(path.read_text())
    assert address["pid"] == process.pid
    return str(address["endpoint"])
