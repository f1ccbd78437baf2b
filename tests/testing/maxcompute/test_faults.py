"""Faults as the real client meets them, asked for in process and by the control call."""

import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
import requests
import urllib3
from odps import ODPS, errors
from odps.apis.storage_api import (
    ArrowReader,
    Compression,
    ReadRowsRequest,
    SessionRequest,
    SessionStatus,
    Status,
    StorageApiArrowClient,
)

from tidemill.clock import ManualClock
from tidemill.testing.maxcompute import MaxComputeEmulator

from .conftest import clicks
from .test_read_sessions import batches, open_session, status, users


def test_the_client_repeats_reads_that_are_refused_with_503(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client, "dt=20240319")
    emulator.faults.refuse("read_rows", times=2)

    assert users(client, session.session_id, 0, 3) == [0, 1, 2]
    assert [request.status for request in emulator.requests("read_rows")] == [503, 503, 200]


def test_a_refused_creation_reaches_the_caller(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.refuse("create_read_session", status=429, code="FlowExceeded")

    with pytest.raises(errors.ODPSError, match="asked for") as caught:
        open_session(client)

    assert (caught.value.code, caught.value.status_code) == ("FlowExceeded", 429)
    assert open_session(client).session_status is SessionStatus.NORMAL


def test_a_fault_can_skip_requests(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.refuse("create_read_session", skip=1)

    assert open_session(client).session_status is SessionStatus.NORMAL
    with pytest.raises(errors.ODPSError):
        open_session(client)
    assert open_session(client).session_status is SessionStatus.NORMAL


def test_a_dropped_connection(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.drop("create_read_session")

    with pytest.raises(requests.exceptions.ConnectionError):
        open_session(client)

    assert [request.status for request in emulator.requests("create_read_session")] == [0]
    assert not list((emulator.folder / ".emulator" / "read_sessions").glob("*.json"))


def test_a_lost_answer_did_what_was_asked(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.lose_answer("create_read_session")

    with pytest.raises(requests.exceptions.ConnectionError):
        open_session(client)

    assert len(list((emulator.folder / ".emulator" / "read_sessions").glob("*.json"))) == 1


def test_a_cut_stream_breaks_in_the_midst_of_a_chunk(
    client_of: Callable[[str], StorageApiArrowClient], emulator: MaxComputeEmulator
) -> None:
    emulator.add_table("prj", "many", {"": clicks(0, 40_000)})
    session = open_session(client_of("many"))
    emulator.faults.cut(after_bytes=400_000)

    request = ReadRowsRequest(session.session_id, row_count=40_000, max_batch_rows=1000, compression=Compression.UNCOMPRESSED)
    reader = client_of("many").read_rows_arrow(request)
    found: list[int] = []
    with pytest.raises((urllib3.exceptions.HTTPError, pa.ArrowInvalid)):
        _read_on(reader, found)

    assert 0 < sum(found) < 40_000
    assert users(client_of("many"), session.session_id, sum(found), 2) == [sum(found), sum(found) + 1]


def _read_on(reader: ArrowReader, found: list[int]) -> None:
    while (batch := reader.read()) is not None:
        found.append(batch.num_rows)


def test_an_early_clean_end_looks_like_success_to_the_client(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client, "dt=20240319")
    emulator.faults.end_early(after_batches=3)

    reader = client.read_rows_arrow(ReadRowsRequest(session.session_id, row_count=100, max_batch_rows=10))
    rows = 0
    while (batch := reader.read()) is not None:
        rows += batch.num_rows

    assert (rows, reader.get_status()) == (30, Status.OK)
    assert len(batches(client, ReadRowsRequest(session.session_id, row_count=100, max_batch_rows=10))) == 10


def test_an_early_end_before_the_first_row(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client, "dt=20240319")
    emulator.faults.end_early(after_batches=0)

    assert users(client, session.session_id, 0, 100) == []


def test_a_slow_session_is_init_until_its_time_has_come(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock
) -> None:
    emulator.faults.slow_init(seconds=30)
    session = open_session(client, "dt=20240319")
    assert (session.status, session.session_status) == (Status.WAIT, SessionStatus.INIT)

    with pytest.raises(errors.ODPSError, match="INIT"):
        users(client, session.session_id, 0, 1)
    clock.advance(30)

    assert status(client, session.session_id) is SessionStatus.NORMAL
    assert users(client, session.session_id, 0, 1) == [0]


def test_a_session_can_stay_init_for_ever(client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock) -> None:
    emulator.faults.slow_init()
    session = open_session(client, "dt=20240319")
    clock.advance(20 * 3600)

    assert status(client, session.session_id) is SessionStatus.INIT


def test_a_session_can_fail_while_it_is_made(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock
) -> None:
    emulator.faults.fail_init(seconds=5)
    session = open_session(client, "dt=20240319")
    assert session.session_status is SessionStatus.INIT
    clock.advance(5)

    assert status(client, session.session_id) is SessionStatus.CRITICAL


@pytest.mark.parametrize("end", ["EXPIRED", "CRITICAL"])
def test_a_session_can_be_ended(client: StorageApiArrowClient, emulator: MaxComputeEmulator, end: str) -> None:
    session = open_session(client, "dt=20240319")
    emulator.end_session(session.session_id, end)  # type: ignore[arg-type]

    # The call itself succeeds: only the status tells.
    answer = client.get_read_session(SessionRequest(session.session_id, refresh=True))
    assert (answer.status, answer.session_status) == (Status.OK, SessionStatus(end))
    with pytest.raises(errors.ODPSError, match=end):
        users(client, session.session_id, 0, 1)


def test_a_wrong_row_count(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.wrong_row_count(by=7)
    session = open_session(client, "dt=20240319")

    assert session.record_count == 107
    assert users(client, session.session_id, 0, 107) == list(range(100))
    assert open_session(client, "dt=20240319").record_count == 100


def test_faults_can_be_taken_back(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.drop("create_read_session", times=10)
    emulator.faults.clear()

    assert open_session(client).session_status is SessionStatus.NORMAL


@pytest.fixture
def call(emulator: MaxComputeEmulator) -> Callable[..., tuple[int, object]]:
    def send(method: str, path: str, document: object = None) -> tuple[int, object]:
        connection = http.client.HTTPConnection(urlsplit(emulator.endpoint).netloc, timeout=10)
        try:
            connection.request(method, f"/_emulator/{path}", None if document is None else json.dumps(document))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    return send


def test_the_control_call(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock, call: Callable[..., tuple[int, object]]
) -> None:
    session = open_session(client, "dt=20240319")
    before = clock.time()

    assert call("POST", "faults", {"kind": "row_count", "operation": "create_read_session", "amount": -1, "times": 2})[0] == 200
    assert open_session(client, "dt=20240319").record_count == 99
    assert call("DELETE", "faults")[0] == 200
    assert open_session(client, "dt=20240319").record_count == 100
    assert call("POST", "clock", {"advance_s": 60}) == (200, {"time": before + 60})
    assert call("POST", f"sessions/{session.session_id}", {"status": "CRITICAL"})[0] == 200
    assert status(client, session.session_id) is SessionStatus.CRITICAL
    code, found = call("GET", "requests?operation=create_read_session")
    assert code == 200
    assert isinstance(found, list)
    assert [json.loads(request["body"])["RequiredPartitions"] for request in found] == [["dt=20240319"]] * 3


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("faults", {"kind": "cut"}),
        ("faults", {"kind": "explode", "operation": "read_rows"}),
        ("clock", {"advance_s": -1}),
        ("clock", {}),
        ("clock", []),
        ("sessions/x", {"status": "NORMAL"}),
        ("nothing", {}),
    ],
)
def test_a_wrong_control_call_says_so(call: Callable[..., tuple[int, object]], path: str, document: object) -> None:
    code, answer = call("POST", path, document)

    assert code in (400, 404)
    assert isinstance(answer, dict)
    assert path in answer["Message"] or "session" in answer["Message"]


def test_no_credentials_are_logged(client: StorageApiArrowClient, emulator: MaxComputeEmulator, odps: ODPS) -> None:
    open_session(client)

    logged = "".join(request.model_dump_json() for request in emulator.requests())
    assert emulator.requests("create_read_session")
    assert "secret" not in logged
    assert "ODPS id:" not in logged


def test_a_stalled_request_is_never_answered(emulator: MaxComputeEmulator, odps: ODPS) -> None:
    emulator.faults.stall("metadata")
    connection = http.client.HTTPConnection(urlsplit(emulator.endpoint).netloc, timeout=0.2)
    try:
        connection.request("GET", "/projects/prj/tables/clicks")
        with pytest.raises(TimeoutError):
            connection.getresponse()
    finally:
        connection.close()

    emulator.faults.clear()
    assert odps.exist_table("clicks")


def test_a_hanging_stream_holds_its_client_until_the_fault_is_cleared(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator
) -> None:
    session = open_session(client, "dt=20240319")
    emulator.faults.hang(after_bytes=500)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(users, client, session.session_id, 0, 100)
        while not emulator.requests("read_rows"):
            assert not reading.done()
        with pytest.raises(TimeoutError):
            reading.result(timeout=0.2)
        emulator.faults.clear()
        with pytest.raises((urllib3.exceptions.HTTPError, pa.ArrowInvalid)):
            reading.result(timeout=30)


def test_closing_ends_what_hangs_and_every_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with MaxComputeEmulator(tmp_path) as emulator, ThreadPoolExecutor(4) as pool:
        emulator.add_table("prj", "clicks", {"": clicks(0, 100)})
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        client = StorageApiArrowClient(odps, odps.get_table("clicks"))
        session = open_session(client)
        emulator.faults.hang(after_bytes=500, times=4)
        reading = [pool.submit(users, client, session.session_id, 0, 100) for _ in range(4)]
        while len(emulator.requests("read_rows")) < 4:
            assert not any(future.done() for future in reading)
        emulator.close()
        assert all(isinstance(future.exception(timeout=30), urllib3.exceptions.HTTPError | pa.ArrowInvalid) for future in reading)

    assert threading.active_count() == before
    emulator.close()
