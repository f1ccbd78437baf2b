"""Every row of a range once and in order, whatever breaks on the way; what can't be mended is told with table, rows and session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import odps
import pyarrow as pa
import pytest

from tests.data.maxcompute.conftest import MakeSource, numbers
from tidemill.clock import ManualClock
from tidemill.config.env import OdpsCredentials
from tidemill.config.maxcompute import MaxComputeConfig
from tidemill.data.assignment import Assigned
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source
from tidemill.data.sources.maxcompute import client
from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
from tidemill.data.split import RawBatch
from tidemill.errors import DataError, DeadlineError, SchemaError, SourceChangedError
from tidemill.testing.maxcompute import MaxComputeEmulator

PATH = "odps://prj/tables/clicks/ds=1"


def everything(source: Source) -> Iterator[RawBatch]:
    assigned = [Assigned(split, IntervalSet.of([(0, split.num_rows or 0)])) for split in source.discover()]
    with closing(source.open_all(assigned)) as reader:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                raw = reader.read(1.0)
            except EOFError:
                return
            if raw is not None:
                yield raw
    raise AssertionError("still reading after a minute")


def ids(source: Source) -> list[int]:
    return [number for raw in everything(source) for number in raw.table.column("id").to_pylist()]


@pytest.fixture
def clicks(emulator: MaxComputeEmulator) -> MaxComputeEmulator:
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 5000)})
    return emulator


@pytest.mark.parametrize("readers", [1, 4])
def test_positions_come_in_order_however_many_read_ahead(clicks: MaxComputeEmulator, make: MakeSource, readers: int):
    source = make(PATH, reading={"readers": readers, "rows_per_request": 300})
    at = 0
    for raw in everything(source):
        (run,) = raw.runs
        assert (run.start, run.rows) == (at, raw.num_rows)
        assert raw.table.column("id")[0].as_py() == at
        at = run.stop
    assert at == 5000


def test_only_what_remains_is_asked_for(clicks: MaxComputeEmulator, make: MakeSource):
    source = make(PATH, columns=["id"])
    (split,) = source.discover()
    with closing(source.open(split, IntervalSet.of([(10, 12), (4990, 5000)]), IntervalSet())) as reader:
        rows = []
        while len(rows) < 12:
            raw = reader.read(1.0)
            rows += raw.table.column("id").to_pylist() if raw else []
    assert rows == [10, 11, *range(4990, 5000)]
    asked = [(request.query["row_index"], request.query["row_count"]) for request in clicks.requests("read_rows")]
    assert sorted(asked) == [("10", "2"), ("4990", "10")]


@pytest.mark.parametrize("compression", ["LZ4_FRAME", "ZSTD", "UNCOMPRESSED"])
def test_compressions(clicks: MaxComputeEmulator, make: MakeSource, compression: str):
    assert ids(make(PATH, columns=["id"], compression=compression)) == list(range(5000))


def test_a_body_that_ends_cleanly_too_early_is_read_on(clicks: MaxComputeEmulator, make: MakeSource):
    """The client reports that as the end of the rows."""
    clicks.faults.end_early(after_batches=0, times=2)
    clicks.faults.end_early(after_batches=1, times=3, skip=1)
    assert ids(make(PATH, columns=["id"], reading={"readers": 3})) == list(range(5000))


def test_a_cut_stream_is_read_on(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.cut(after_bytes=0)
    clicks.faults.cut(after_bytes=4000, times=4, skip=1)
    assert ids(make(PATH, columns=["id"])) == list(range(5000))


def test_a_stream_that_hangs_is_read_on(clicks: MaxComputeEmulator, make: MakeSource):
    """Every wait has a deadline: the client's own, two minutes, is shortened here."""
    usual, odps.options.read_timeout = odps.options.read_timeout, 2
    clicks.faults.hang(after_bytes=4000)
    try:
        assert ids(make(PATH, columns=["id"])) == list(range(5000))
    finally:
        odps.options.read_timeout = usual
        clicks.faults.clear()


def test_rows_come_without_the_clients_private_parts_too(
    clicks: MaxComputeEmulator, make: MakeSource, monkeypatch: pytest.MonkeyPatch
):
    """Reading looks for the response inside the client's stream, which another version may not have there."""
    monkeypatch.setattr(client, "_response", lambda stream: None)
    clicks.faults.cut(after_bytes=4000)
    assert ids(make(PATH, columns=["id"])) == list(range(5000))


def test_errors_of_the_service_and_dropped_connections_are_waited_out(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.refuse("read_rows", times=6, skip=1, status=500, code="InternalServerError")
    clicks.faults.refuse("read_rows", times=2, status=429, code="FlowExceeded")
    clicks.faults.drop("read_rows", times=2, skip=3)
    clicks.faults.refuse("create_read_session", times=2, status=503)
    clicks.faults.drop("metadata", times=1)
    assert ids(make(PATH, columns=["id"])) == list(range(5000))


def test_a_service_that_cant_be_reached_at_the_start_is_named(clock: ManualClock):
    """Whatever the client asks first (whether the project has schemas) is tried again, until its deadline."""
    config = MaxComputeSourceConfig(paths=(PATH,), reading=MaxComputeConfig(session_timeout_s=5))
    nobody = OdpsCredentials("http://127.0.0.1:9", "a test", "id", "SECRET-KEY")
    source = MaxComputeSource(config, ["id"], credentials=nobody, clock=clock)
    with closing(source), odps.config.option_context() as options:
        options.retry_times = 0
        with pytest.raises(DeadlineError, match=r"prj\.clicks: asking for its columns: no answer in time; last: Conn"):
            source.discover()


def test_a_service_that_stays_away_is_given_up_in_time(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.refuse("read_rows", times=1000, status=500, code="InternalServerError")
    source = make(PATH, columns=["id"], reading={"readers": 1, "outage_timeout_s": 60})
    with pytest.raises(DeadlineError, match=r"prj.clicks/ds=1, rows 0 to 1000 of read session \w+: .* no new row for 60 s"):
        ids(source)


def test_a_session_that_says_more_rows_than_it_has_is_told(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.wrong_row_count(by=7)
    with pytest.raises(DataError, match=r"prj.clicks/ds=1, rows 5000 to 5007 of read session \w+"):
        ids(make(PATH, columns=["id"]))


def test_a_session_that_ends_while_it_is_read_is_told_with_the_rows_that_are_lost(clicks: MaxComputeEmulator, make: MakeSource):
    source = make(PATH, columns=["id"], reading={"readers": 1})
    (split,) = source.discover()
    session = split.fingerprint["session"]
    clicks.end_session(session)
    lost = rf"rows 17 to 1017 of read session {session}: from row 17 .* is EXPIRED.*restart"
    with (
        closing(source.open(split, IntervalSet.of([(17, 5000)]), IntervalSet())) as reader,
        pytest.raises(SourceChangedError, match=lost),
    ):
        reader.read(30.0)


def test_a_slow_session_is_waited_for(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.slow_init(seconds=90)
    assert ids(make(PATH, columns=["id"])) == list(range(5000))


def test_a_session_that_is_never_made_is_given_up_in_time(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.slow_init(seconds=None)
    with pytest.raises(DeadlineError, match=r"prj.clicks/ds=1: read session \w+ is still being made; .*session_timeout_s"):
        make(PATH, columns=["id"], reading={"session_timeout_s": 30}).discover()


def test_a_session_that_fails_is_told(clicks: MaxComputeEmulator, make: MakeSource):
    clicks.faults.fail_init(seconds=1)
    with pytest.raises(DataError, match=r"prj.clicks/ds=1: the new read session \w+ is CRITICAL"):
        make(PATH, columns=["id"]).discover()


@pytest.mark.parametrize(
    ("path", "columns", "error", "message"),
    [
        ("odps://prj/tables/clicks/ds=7", ["id"], DataError, "prj.clicks/ds=7: the service makes no read session: NoSuchPartition"),
        ("odps://prj/tables/nope/ds=1", ["id"], DataError, "prj.nope: the service doesn't show it: NoSuch"),
        (PATH, ["idd"], SchemaError, "prj.clicks: no column 'idd'; did you mean 'id'? It has id, name, ds"),
        ("odps://prj/tables/odd/ds=1", ["s"], SchemaError, "prj.odd: column 's' is of type STRUCT"),
        (f"{PATH},odps://prj/tables/texts/ds=1", ["id"], SchemaError, "prj.texts: column 'id' is string, but bigint in prj.clicks"),
    ],
)
def test_what_cannot_be_read_is_told_before_any_row(
    clicks: MaxComputeEmulator, make: MakeSource, path: str, columns: list[str], error: type[Exception], message: str
):
    clicks.add_table("prj", "odd", {"ds=1": pa.table({"s": pa.array([{"a": 1}])})})
    clicks.add_table("prj", "texts", {"ds=1": pa.table({"id": pa.array(["x"])})})
    with pytest.raises(error) as caught:
        make(path, columns=columns).discover()
    assert message in str(caught.value)
    assert "SECRET-KEY" not in str(caught.value)


def test_keys_are_in_no_log(clicks: MaxComputeEmulator, make: MakeSource, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    clicks.faults.refuse("read_rows", times=3, status=500, code="InternalServerError")
    source = make(PATH, columns=["id"])
    assert ids(source) == list(range(5000))
    assert "SECRET-KEY" not in caplog.text
    assert "SECRET-KEY" not in repr(source._config) + repr(vars(source))


def test_types_and_partition_columns(emulator: MaxComputeEmulator, make: MakeSource):
    """All simple types, ARRAY and MAP, and the partition's own columns."""
    rows = pa.table(
        {
            "i8": pa.array([1, None], pa.int8()),
            "i16": pa.array([1, None], pa.int16()),
            "i32": pa.array([1, None], pa.int32()),
            "i64": pa.array([1, None], pa.int64()),
            "f32": pa.array([1.5, None], pa.float32()),
            "f64": pa.array([1.5, None], pa.float64()),
            "flag": pa.array([True, None]),
            "text": pa.array(["a", None]),
            "bytes": pa.array([b"a", None]),
            "day": pa.array([date(2024, 3, 19), None]),
            "at": pa.array([datetime(2024, 3, 19), None], pa.timestamp("ms")),
            "exact": pa.array([datetime(2024, 3, 19), None], pa.timestamp("ns")),
            "money": pa.array([Decimal("1.50"), None], pa.decimal128(18, 2)),
            "ids": pa.array([[1, 2], None], pa.list_(pa.int64())),
            "words": pa.array([["a"], None], pa.list_(pa.string())),
            "lists": pa.array([[[1.5]], None], pa.list_(pa.list_(pa.float64()))),
            "pairs": pa.array([[("a", 1.0)], None], pa.map_(pa.string(), pa.float64())),
        }
    )
    emulator.add_table("prj", "types", {"ds=20240319,hr=7": rows})
    (raw,) = everything(make("odps://prj/tables/types/ds=20240319/hr=7"))
    assert raw.table.column("hr").to_pylist() == ["7", "7"]
    assert raw.table.select(rows.column_names).to_pylist() == rows.to_pylist()
    (raw,) = everything(make("odps://prj/tables/types/ds=20240319/hr=7", columns=["ds", "i64"]))
    assert raw.table.column_names == ["ds", "i64"]


def test_event_times_come_from_a_column(emulator: MaxComputeEmulator, make: MakeSource):
    emulator.add_table("prj", "clicks", {"ds=1": numbers(0, 3).append_column("at", pa.array([10.0, 30.0, 20.0]))})
    (raw,) = everything(make(PATH, columns=["id"], event_time_column="at"))
    assert raw.event_time is not None
    assert np.array_equal(raw.event_time, [10.0, 30.0, 20.0])
    assert raw.runs[0].event_time == 30.0


def test_closing_in_the_middle_leaves_no_thread_behind(clicks: MaxComputeEmulator, make: MakeSource):
    import threading

    source = make(PATH, columns=["id"], reading={"rows_per_request": 10})
    (split,) = source.discover()
    reader = source.open(split, IntervalSet.of([(0, 5000)]), IntervalSet())
    assert reader.read(5.0) is not None
    reader.close()
    reader.close()
    source.close()
    until = time.monotonic() + 10
    while any(thread.name.startswith("maxcompute-read") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_clouds_own_chain_needs_its_package():
    """Without it the message says what to install."""
    from tidemill.config.env import OdpsCredentials
    from tidemill.data.sources.maxcompute.client import Connection
    from tidemill.errors import MissingExtraError

    credentials = OdpsCredentials("http://service", "ALIBABA_CLOUD_ECS_METADATA", uses_chain=True)
    connection = Connection(credentials, quota="", compression="ZSTD")
    with pytest.raises(MissingExtraError, match=r"ALIBABA_CLOUD_ECS_METADATA is set.*pip install alibabacloud-credentials"):
        connection.service("prj")
