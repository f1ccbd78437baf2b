"""Reading through the real client: sessions, splits, columns, types and their lives."""

import datetime
import decimal
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
from odps import ODPS, errors
from odps.apis.storage_api import (
    ArrowOptions,
    Compression,
    ReadRowsRequest,
    SessionRequest,
    SessionStatus,
    SplitOptions,
    Status,
    StorageApiArrowClient,
    TableBatchScanRequest,
    TableBatchScanResponse,
)

from tidemill.clock import ManualClock
from tidemill.testing.maxcompute import MaxComputeEmulator
from tidemill.testing.maxcompute.tables import columns_of

from .conftest import clicks

DAY_S = 24 * 3600.0
BY_ROWS = SplitOptions.get_default_options(SplitOptions.SplitMode.ROW_OFFSET)


def open_session(client: StorageApiArrowClient, *partitions: str, splits: SplitOptions = BY_ROWS) -> TableBatchScanResponse:
    return client.create_read_session(TableBatchScanRequest(required_partitions=list(partitions), split_options=splits))


def batches(client: StorageApiArrowClient, request: ReadRowsRequest) -> list[pa.RecordBatch]:
    reader = client.read_rows_arrow(request)
    found = []
    while (batch := reader.read()) is not None:
        found.append(batch)
    return found


def users(client: StorageApiArrowClient, session_id: str, start: int, count: int) -> list[int]:
    found = batches(client, ReadRowsRequest(session_id, row_index=start, row_count=count))
    return [user for batch in found for user in batch.column("user").to_pylist()]


def status(client: StorageApiArrowClient, session_id: str, refresh: bool = False) -> SessionStatus:
    return client.get_read_session(SessionRequest(session_id, refresh)).session_status


def test_rows_are_numbered_over_the_partitions_in_the_order_of_the_request(client: StorageApiArrowClient) -> None:
    session = open_session(client, "dt=20240320", "dt=20240318", "dt=20240319")

    assert (session.status, session.session_status) == (Status.OK, SessionStatus.NORMAL)
    assert (session.record_count, session.split_count) == (150, -1)
    assert users(client, session.session_id, 0, 150) == [*range(100, 150), *range(100)]
    assert users(client, session.session_id, 45, 10) == [*range(145, 150), *range(5)]
    assert users(client, session.session_id, 7, 0) == []


def test_a_session_without_required_partitions_spans_them_all_in_order(client: StorageApiArrowClient) -> None:
    session = open_session(client)

    assert users(client, session.session_id, 0, session.record_count) == list(range(150))


@pytest.mark.parametrize("compression", list(Compression))
def test_streams_come_in_every_compression_in_batches_of_the_size_that_was_asked_for(
    client: StorageApiArrowClient, compression: Compression
) -> None:
    session = open_session(client, "dt=20240319")

    found = batches(client, ReadRowsRequest(session.session_id, row_count=100, max_batch_rows=40, compression=compression))

    assert [batch.num_rows for batch in found] == [40, 40, 20]
    assert pa.Table.from_batches(found)["user"].to_pylist() == list(range(100))


def test_compressed_streams_are_smaller(client_of: Callable[[str], StorageApiArrowClient], emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "zeros", {"": pa.table({"zero": [0] * 10_000})})
    client = client_of("zeros")
    session = open_session(client)

    sizes = {}
    for compression in Compression:
        stream = client.read_rows_stream(ReadRowsRequest(session.session_id, row_count=10_000, compression=compression))
        sizes[compression.name] = len(stream.read())

    assert sizes["UNCOMPRESSED"] > 80_000
    assert max(sizes["LZ4_FRAME"], sizes["ZSTD"]) < 10_000


def test_columns_come_in_the_order_of_the_request_and_partition_columns_behind_them(client: StorageApiArrowClient) -> None:
    request = TableBatchScanRequest(
        required_data_columns=["page", "user"],
        required_partition_columns=["dt"],
        required_partitions=["dt=20240320"],
        split_options=BY_ROWS,
    )
    session = client.create_read_session(request)

    assert [column.name for column in session.data_schema.data_columns] == ["page", "user"]
    (batch,) = batches(client, ReadRowsRequest(session.session_id, row_count=1))
    assert batch.to_pylist() == [{"page": "page2", "user": 100, "dt": "20240320"}]


def test_column_projection_leaves_the_other_columns_out(client: StorageApiArrowClient) -> None:
    request = TableBatchScanRequest(required_data_columns=["page"], required_partitions=["dt=20240320"], split_options=BY_ROWS)
    session = client.create_read_session(request)

    (batch,) = batches(client, ReadRowsRequest(session.session_id, row_count=1))
    assert batch.schema.names == ["page", "dt"]


def split_rows(client: StorageApiArrowClient, session: TableBatchScanResponse) -> list[list[int]]:
    return [
        [
            user
            for batch in batches(client, ReadRowsRequest(session.session_id, split_index=split))
            for user in batch["user"].to_pylist()
        ]
        for split in range(session.split_count)
    ]


def test_parallelism_divides_the_rows_into_equal_splits(client: StorageApiArrowClient) -> None:
    options = SplitOptions.get_default_options(SplitOptions.SplitMode.PARALLELISM)
    options.split_number = 4
    session = open_session(client, splits=options)

    found = split_rows(client, session)
    assert [len(rows) for rows in found] == [38, 38, 38, 36]
    assert list(chain.from_iterable(found)) == list(range(150))


def test_a_size_split_holds_about_so_many_bytes_and_stays_in_its_partition_if_asked(client: StorageApiArrowClient) -> None:
    options = SplitOptions.get_default_options(SplitOptions.SplitMode.SIZE)
    assert open_session(client, splits=options).split_count == 1
    options.split_number, options.cross_partition = 1500, False
    session = open_session(client, splits=options)

    found = split_rows(client, session)
    assert session.split_count > 2
    assert list(chain.from_iterable(found)) == list(range(150))
    assert all(max(rows) < 100 or min(rows) >= 100 for rows in found)


def test_bucket_splits_are_the_buckets_of_a_clustered_table(
    client_of: Callable[[str], StorageApiArrowClient], emulator: MaxComputeEmulator
) -> None:
    options = SplitOptions.get_default_options(SplitOptions.SplitMode.BUCKET)
    emulator.add_table("prj", "clustered", {"dt=1": clicks(0, 10), "dt=2": clicks(10, 4)}, buckets=2)

    session = open_session(client_of("clustered"), splits=options)
    assert split_rows(client_of("clustered"), session) == [[0, 1, 2, 3, 4, 10, 11], [5, 6, 7, 8, 9, 12, 13]]
    with pytest.raises(errors.InvalidArgument, match="clustered"):
        open_session(client_of("clicks"), splits=options)


def every_type() -> pa.Table:
    noon = datetime.datetime(2024, 3, 19, 12, 0, 0, 123000)
    return pa.table(
        {
            "tiny": pa.array([-128, None], pa.int8()),
            "small": pa.array([1, None], pa.int16()),
            "int": pa.array([1, None], pa.int32()),
            "big": pa.array([2**62, None], pa.int64()),
            "float": pa.array([0.5, None], pa.float32()),
            "double": pa.array([0.1, None], pa.float64()),
            "bool": pa.array([True, None]),
            "text": pa.array(["käse", None]),
            "bytes": pa.array([b"\0\xff", None]),
            "date": pa.array([datetime.date(2024, 3, 19), None]),
            "datetime": pa.array([noon, None], pa.timestamp("ms")),
            "timestamp": pa.array([noon, None], pa.timestamp("ns")),
            "decimal": pa.array([decimal.Decimal("1.25"), None], pa.decimal128(10, 2)),
            "list": pa.array([["a", None], None], pa.list_(pa.string())),
            "nested": pa.array([[[1], []], None], pa.list_(pa.list_(pa.int64()))),
            "map": pa.array([[("a", 1.5)], None], pa.map_(pa.string(), pa.float64())),
            "struct": pa.array([{"x": 1, "y": "b"}, None], pa.struct([("x", pa.int64()), ("y", pa.string())])),
        }
    )


def test_all_types_go_through_the_disk_and_the_wire(
    odps: ODPS, client_of: Callable[[str], StorageApiArrowClient], emulator: MaxComputeEmulator
) -> None:
    emulator.add_table("prj", "types", {"": every_type()})
    session = open_session(client_of("types"))

    found = pa.Table.from_batches(batches(client_of("types"), ReadRowsRequest(session.session_id, row_count=2)))

    assert found.schema.equals(every_type().schema)
    assert found.equals(every_type())
    told = {column.name: column.type for column in session.data_schema.data_columns}
    assert told == {column.name: column.type for column in columns_of(every_type().schema)}
    assert told["map"] == "map<string,double>"
    # The client itself understands every type text.
    assert str(odps.get_table("types").table_schema["list"].type) == "ARRAY<STRING>"


def test_times_come_in_the_unit_that_was_asked_for(
    client_of: Callable[[str], StorageApiArrowClient], emulator: MaxComputeEmulator
) -> None:
    emulator.add_table("prj", "times", {"": every_type().select(["datetime", "timestamp"])})
    units = ArrowOptions(timestamp_unit=ArrowOptions.TimestampUnit.MICRO, date_time_unit=ArrowOptions.TimestampUnit.SECOND)
    session = client_of("times").create_read_session(TableBatchScanRequest(split_options=BY_ROWS, arrow_options=units))

    (batch,) = batches(client_of("times"), ReadRowsRequest(session.session_id, row_count=1))

    assert [field.type for field in batch.schema] == [pa.timestamp("s"), pa.timestamp("us")]
    noon = datetime.datetime(2024, 3, 19, 12)
    assert batch.to_pylist() == [{"datetime": noon, "timestamp": noon.replace(microsecond=123000)}]


def test_a_session_reads_the_rows_of_when_it_was_created(client: StorageApiArrowClient, emulator: MaxComputeEmulator) -> None:
    session = open_session(client, "dt=20240319")

    emulator.add_table("prj", "clicks", {"dt=20240319": clicks(1000, 3)})

    assert users(client, session.session_id, 98, 2) == [98, 99]
    assert users(client, open_session(client, "dt=20240319").session_id, 0, 3) == [1000, 1001, 1002]


def test_a_session_of_a_dropped_table_has_no_rows_any_more(client: StorageApiArrowClient, odps: ODPS) -> None:
    session = open_session(client, "dt=20240319")
    assert users(client, session.session_id, 0, 1) == [0]
    odps.delete_table("clicks")

    with pytest.raises(errors.NoSuchObject, match="dropped"):
        users(client, session.session_id, 0, 1)


def test_a_dropped_partition_can_be_read_by_a_session_of_before(client: StorageApiArrowClient, odps: ODPS) -> None:
    session = open_session(client, "dt=20240319")
    odps.get_table("clicks").delete_partition("dt=20240319")

    assert users(client, session.session_id, 98, 2) == [98, 99]


def test_an_unrefreshed_session_expires_after_a_day(client: StorageApiArrowClient, clock: ManualClock) -> None:
    session = open_session(client, "dt=20240319")
    assert session.expiration_time == int((clock.time() + DAY_S) * 1000)

    clock.advance(DAY_S - 1)
    assert users(client, session.session_id, 0, 1) == [0]
    clock.advance(1)

    assert status(client, session.session_id) is SessionStatus.EXPIRED
    with pytest.raises(errors.ODPSError, match="EXPIRED"):
        users(client, session.session_id, 0, 1)
    assert status(client, session.session_id, refresh=True) is SessionStatus.EXPIRED


def test_a_refreshed_session_lives_on(client: StorageApiArrowClient, clock: ManualClock) -> None:
    session = open_session(client, "dt=20240319")
    for _ in range(5):
        clock.advance(DAY_S / 2)
        assert status(client, session.session_id, refresh=True) is SessionStatus.NORMAL

    assert users(client, session.session_id, 99, 1) == [99]


def test_looking_at_a_session_does_not_refresh_it(client: StorageApiArrowClient, clock: ManualClock) -> None:
    session = open_session(client, "dt=20240319")
    clock.advance(DAY_S / 2)
    assert status(client, session.session_id) is SessionStatus.NORMAL
    clock.advance(DAY_S / 2)

    assert status(client, session.session_id) is SessionStatus.EXPIRED


def test_a_restarted_emulator_knows_its_sessions_and_its_time(tmp_path: Path) -> None:
    with MaxComputeEmulator(tmp_path / "restarted") as emulator:
        emulator.add_table("prj", "clicks", {"dt=1": clicks(0, 10)})
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        session = open_session(StorageApiArrowClient(odps, odps.get_table("clicks")))
        emulator.advance(DAY_S - 60)
        # What the session reads is kept over a restart, too, though no partition holds it any more.
        emulator.add_table("prj", "clicks", {"dt=1": clicks(50, 10)})

    with MaxComputeEmulator(tmp_path / "restarted") as emulator:
        odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)
        client = StorageApiArrowClient(odps, odps.get_table("clicks"))
        assert users(client, session.session_id, 0, 10) == list(range(10))
        emulator.advance(60)
        assert status(client, session.session_id) is SessionStatus.EXPIRED


@pytest.mark.parametrize(
    ("request_", "kind", "text"),
    [
        (TableBatchScanRequest(required_partitions=["dt=19990101"]), errors.NoSuchPartition, "dt=19990101"),
        (TableBatchScanRequest(required_partitions=["hr=1"]), errors.InvalidArgument, "dt"),
        (TableBatchScanRequest(required_data_columns=["nope"]), errors.InvalidArgument, "nope"),
        (TableBatchScanRequest(filter_predicate="user > 3"), errors.ODPSError, "FilterPredicate"),
    ],
)
def test_bad_sessions_are_refused(
    client: StorageApiArrowClient, request_: TableBatchScanRequest, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        client.create_read_session(request_)


def test_bad_reads_are_refused(client: StorageApiArrowClient, client_of: Callable[[str], StorageApiArrowClient]) -> None:
    session = open_session(client, "dt=20240319")
    with pytest.raises(errors.InvalidArgument, match="90 to 101"):
        users(client, session.session_id, 90, 11)
    with pytest.raises(errors.NoSuchObject, match="read session nope"):
        users(client, "nope", 0, 1)
    with pytest.raises(errors.NoSuchTable, match=r"prj\.default\.missing"):
        open_session(StorageApiArrowClient(client._odps, client._odps.get_table("missing")))


def test_tables_of_one_name_in_two_projects_and_schemas_are_apart(odps: ODPS, emulator: MaxComputeEmulator) -> None:
    emulator.add_table("other", "clicks", {"dt=20240319": clicks(500, 1)})
    emulator.add_table("prj", "clicks", {"dt=20240319": clicks(600, 1)}, schema="lab")

    found = []
    for project, schema in (("prj", None), ("other", None), ("prj", "lab")):
        table = odps.get_table("clicks", project=project, schema=schema)
        client = StorageApiArrowClient(odps, table)
        found += users(client, open_session(client, "dt=20240319").session_id, 0, 1)

    assert found == [0, 500, 600]
