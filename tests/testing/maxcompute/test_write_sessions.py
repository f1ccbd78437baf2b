"""Writing through the real client: blocks, attempts, commits, and what a commit that fails or is killed leaves."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import requests
from odps import ODPS, errors
from odps.apis.storage_api import (
    Compression,
    SessionRequest,
    SessionStatus,
    Status,
    StorageApiArrowClient,
    TableBatchWriteRequest,
    WriteRowsRequest,
)

from tidemill.clock import ManualClock
from tidemill.testing.maxcompute import MaxComputeEmulator
from tidemill.testing.maxcompute import tables as tables_module
from tidemill.testing.maxcompute.documents import TableName
from tidemill.testing.maxcompute.requests import WriteSessionRequest
from tidemill.testing.maxcompute.tables import Tables
from tidemill.testing.maxcompute.write_sessions import WriteSessions

from .conftest import clicks

DAY = "dt=20240319"


def open_session(client: StorageApiArrowClient, partition: str = DAY, overwrite: bool = True) -> str:
    return client.create_write_session(TableBatchWriteRequest(partition_spec=partition, overwrite=overwrite)).session_id


def write(
    client: StorageApiArrowClient,
    session_id: str,
    rows: pa.Table,
    block: int = 0,
    attempt: int = 0,
    compression: Compression = Compression.LZ4_FRAME,
) -> str:
    writer = client.write_rows_arrow(WriteRowsRequest(session_id, block, attempt, compression=compression))
    for batch in rows.to_batches(max_chunksize=7):
        assert writer.write(batch)
    message, done = writer.finish()
    assert done
    return message


def commit(client: StorageApiArrowClient, session_id: str, *messages: str) -> tuple[Status, SessionStatus]:
    answer = client.commit_write_session(SessionRequest(session_id), list(messages))
    return answer.status, answer.session_status


def users(emulator: MaxComputeEmulator, partition: str = DAY) -> list[int]:
    return emulator.read_table("prj", "clicks", partition)["user"].to_pylist()


def status(client: StorageApiArrowClient, session_id: str) -> SessionStatus:
    return client.get_write_session(SessionRequest(session_id)).session_status


@pytest.mark.parametrize("compression", list(Compression))
def test_blocks_become_the_partition_in_the_order_of_their_numbers(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, compression: Compression
) -> None:
    session = open_session(client)
    second = write(client, session, clicks(2000, 20), block=1, compression=compression)
    first = write(client, session, clicks(1000, 20), block=0, compression=compression)

    assert users(emulator) == list(range(100))
    assert commit(client, session, second, first) == (Status.OK, SessionStatus.COMMITTED)

    assert users(emulator) == [*range(1000, 1020), *range(2000, 2020)]
    assert users(emulator, "dt=20240320") == list(range(100, 150))


def test_appending_keeps_the_old_rows(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client, overwrite=False)
    commit(client, session, write(client, session, clicks(1000, 3)))

    assert users(emulator) == [*range(100), 1000, 1001, 1002]


def test_a_partition_that_is_not_there_is_made_by_the_commit(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, odps: ODPS
) -> None:
    session = open_session(client, "dt='20240321'")
    message = write(client, session, clicks(0, 3))
    assert not odps.get_table("clicks").exist_partition("dt=20240321")
    commit(client, session, message)

    assert odps.get_table("clicks").exist_partition("dt=20240321")
    assert users(emulator, "dt=20240321") == [0, 1, 2]


def test_only_the_attempt_whose_message_is_committed_counts(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client)
    write(client, session, clicks(1000, 3), attempt=0)
    second = write(client, session, clicks(2000, 3), attempt=1)
    commit(client, session, second)

    assert users(emulator) == [2000, 2001, 2002]


def test_two_attempts_at_one_block_cannot_both_be_committed(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client)
    messages = [write(client, session, clicks(1000, 3), attempt=attempt) for attempt in (0, 1)]

    with pytest.raises(errors.InvalidArgument, match="block 0"):
        commit(client, session, *messages)
    assert users(emulator) == list(range(100))
    assert commit(client, session, messages[0]) == (Status.OK, SessionStatus.COMMITTED)


def test_a_commit_without_blocks_empties_what_it_overwrites(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    assert commit(client, open_session(client)) == (Status.OK, SessionStatus.COMMITTED)

    assert users(emulator) == []


def test_a_block_without_rows(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client)
    writer = client.write_rows_arrow(WriteRowsRequest(session))
    assert writer.write(pa.RecordBatch.from_pylist([], schema=clicks(0, 0).schema))
    message, _ = writer.finish()
    commit(client, session, message)

    assert users(emulator) == []


def test_a_body_that_is_no_stream_is_refused(client: StorageApiArrowClient) -> None:
    writer = client.write_rows_arrow(WriteRowsRequest(open_session(client)))
    with pytest.raises(errors.InvalidArgument, match="whole Arrow stream"):
        writer.finish()


def test_a_slow_commit_shows_nothing_until_it_is_done(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock
) -> None:
    emulator.faults.slow_commit(seconds=20)
    session = open_session(client)
    message = write(client, session, clicks(1000, 3))

    assert commit(client, session, message) == (Status.WAIT, SessionStatus.COMMITTING)
    clock.advance(19)
    assert status(client, session) is SessionStatus.COMMITTING
    assert users(emulator) == list(range(100))
    clock.advance(1)

    assert status(client, session) is SessionStatus.COMMITTED
    assert users(emulator) == [1000, 1001, 1002]


def test_a_slow_commit_needs_no_poll(client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock) -> None:
    emulator.faults.slow_commit(seconds=20)
    session = open_session(client)
    commit(client, session, write(client, session, clicks(1000, 3)))
    clock.advance(20)

    # Any request will do.
    client.table.reload()
    assert users(emulator) == [1000, 1001, 1002]


def test_a_commit_can_last_for_ever(client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock) -> None:
    emulator.faults.slow_commit()
    session = open_session(client)
    commit(client, session, write(client, session, clicks(1000, 3)))
    clock.advance(1e6)

    assert status(client, session) is SessionStatus.COMMITTING


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_failed_commit_leaves_the_old_rows(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock, seconds: float
) -> None:
    emulator.faults.fail_commit(seconds=seconds)
    session = open_session(client)
    message = write(client, session, clicks(1000, 3))
    _, first = commit(client, session, message)
    clock.advance(seconds)

    assert first is (SessionStatus.COMMITTING if seconds else SessionStatus.CRITICAL)
    assert status(client, session) is SessionStatus.CRITICAL
    assert commit(client, session, message)[1] is SessionStatus.CRITICAL
    assert users(emulator) == list(range(100))


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_commit_whose_answer_is_lost_can_be_repeated(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, overwrite: bool
) -> None:
    emulator.faults.lose_answer("commit_write_session")
    session = open_session(client, overwrite=overwrite)
    message = write(client, session, clicks(1000, 3))

    with pytest.raises(requests.exceptions.ConnectionError):
        commit(client, session, message)
    assert commit(client, session, message) == (Status.OK, SessionStatus.COMMITTED)

    assert users(emulator) == ([] if overwrite else list(range(100))) + [1000, 1001, 1002]


def test_a_commit_that_never_arrived_did_nothing(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    emulator.faults.drop("commit_write_session")
    session = open_session(client)
    message = write(client, session, clicks(1000, 3))

    with pytest.raises(requests.exceptions.ConnectionError):
        commit(client, session, message)

    assert users(emulator) == list(range(100))
    assert status(client, session) is SessionStatus.NORMAL


def test_a_committed_session_takes_nothing_more(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client)
    message = write(client, session, clicks(1000, 3))
    commit(client, session, message)

    with pytest.raises(errors.ODPSError, match="COMMITTED"):
        write(client, session, clicks(0, 1), block=1)
    with pytest.raises(errors.ODPSError, match="other messages"):
        commit(client, session)
    assert users(emulator) == [1000, 1001, 1002]


def test_an_expired_session_takes_nothing_more(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, clock: ManualClock
) -> None:
    session = open_session(client)
    message = write(client, session, clicks(1000, 3))
    clock.advance(24 * 3600)

    assert status(client, session) is SessionStatus.EXPIRED
    with pytest.raises(errors.ODPSError, match="EXPIRED"):
        commit(client, session, message)
    assert users(emulator) == list(range(100))


def test_messages_of_another_session_are_refused(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    other, session = open_session(client), open_session(client)
    message = write(client, other, clicks(1000, 3))

    for wrong in (message, "nonsense", "../x"):
        with pytest.raises(errors.InvalidArgument, match="commit message"):
            commit(client, session, wrong)
    assert users(emulator) == list(range(100))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (pa.table({"user": [1]}), "page"),
        (pa.table({"user": [1], "page": ["a"], "more": [1]}), "more"),
        (pa.table({"user": ["x"], "page": ["a"]}), "fit"),
    ],
)
def test_rows_that_do_not_fit_the_table_are_refused(client: StorageApiArrowClient, rows: pa.Table, text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=text):
        write(client, open_session(client), rows)


def test_dynamic_partitions_come_from_the_rows(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client, partition="")
    rows = clicks(1000, 4).append_column("dt", pa.array(["20240319", "20240325", "20240319", "20240325"]))
    commit(client, session, write(client, session, rows))

    assert users(emulator) == [1000, 1002]
    assert users(emulator, "dt=20240325") == [1001, 1003]
    assert users(emulator, "dt=20240320") == list(range(100, 150))


def test_more_partitions_than_allowed_fail_the_commit(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    request = TableBatchWriteRequest(partition_spec="")
    request.dynamic_partition_options.dynamic_partition_limit = 1
    session = client.create_write_session(request).session_id
    rows = clicks(1000, 2).append_column("dt", pa.array(["20240319", "20240325"]))

    assert commit(client, session, write(client, session, rows))[1] is SessionStatus.CRITICAL
    assert users(emulator) == list(range(100))


def test_a_table_without_partitions(client_of: Callable[[str], StorageApiArrowClient], emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "flat", {"": clicks(0, 3)})
    client = client_of("flat")
    session = open_session(client, partition="", overwrite=False)
    commit(client, session, write(client, session, clicks(3, 2)))

    assert emulator.read_table("prj", "flat")["user"].to_pylist() == list(range(5))


def test_a_commit_to_a_table_that_was_dropped_fails(
    client: StorageApiArrowClient, emulator: MaxComputeEmulator, odps: ODPS
) -> None:
    emulator.faults.slow_commit(seconds=1)
    session = open_session(client)
    commit(client, session, write(client, session, clicks(0, 1)))
    odps.delete_table("clicks")
    emulator.advance(1)

    assert status(client, session) is SessionStatus.CRITICAL
    assert not odps.exist_table("clicks")


class Killed(BaseException):
    """What stands for SIGKILL."""


@pytest.mark.parametrize("overwrite", [True, False])
def test_killed_at_any_moment_of_a_commit_the_table_is_whole_and_the_commit_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """Every change on disk ends in a rename: die before rename 1, 2, ... until a commit needs fewer."""
    old, new = list(range(10)), [*range(100, 105), *range(200, 205)]
    wanted = new if overwrite else old + new
    killed = 0
    while True:
        folder = tmp_path / f"{killed}"
        name = TableName(project="prj", table="clicks")
        with MaxComputeEmulator(folder, clock=ManualClock()) as emulator:
            emulator.add_table("prj", "clicks", {DAY: clicks(0, 10)})
        sessions = _opened(folder)
        session = sessions.create(name, WriteSessionRequest.model_validate({"PartitionSpec": DAY, "Overwrite": overwrite}))
        messages = [sessions.add_block(session, block, 0, clicks(100 * (block + 1), 5)) for block in (0, 1)]
        died = _dies_before_rename(killed, monkeypatch, lambda: sessions.commit(session, messages, None))  # noqa: B023

        sessions = _opened(folder)
        with MaxComputeEmulator(folder, clock=ManualClock()) as emulator:
            assert users(emulator) in (old, wanted)
        again = sessions.commit(sessions.get(session.id, name), messages, None)

        assert again.status == "COMMITTED"
        with MaxComputeEmulator(folder, clock=ManualClock()) as emulator:
            assert users(emulator) == wanted
        if not died:
            break
        killed += 1
    assert killed >= 4


def _opened(folder: Path) -> WriteSessions:
    tables = Tables(folder, ManualClock())
    return WriteSessions(folder / ".emulator" / "write_sessions", tables, ManualClock(), 3600.0)


def _dies_before_rename(number: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> bool:
    """Run `action`; whether it died because it came to rename `number`."""
    renames = 0
    replace = tables_module.os.replace

    def counted(source: Path, target: Path) -> None:
        nonlocal renames
        if renames == number:
            raise Killed
        renames += 1
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", counted)
        try:
            action()
        except Killed:
            return True
    return False
