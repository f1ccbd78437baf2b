"""Writing to MaxCompute, through the real client, against the emulator: the shipped contract, and what is particular to tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import requests

from tidemill.clock import Clock, ManualClock
from tidemill.config.env import OdpsCredentials, odps_table_lifecycle
from tidemill.data.writers.maxcompute.output import MaxComputeOutput, MaxComputeOutputConfig
from tidemill.errors import ConfigError, DataError, DeadlineError, SchemaError, StorageError
from tidemill.testing.maxcompute import MaxComputeEmulator
from tidemill.testing.maxcompute.replies import ApiError
from tidemill.testing.output_contract import OutputContract, rows

PARTITION = "dt=20240320"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MaxComputeEmulator]:
    with MaxComputeEmulator(tmp_path_factory.mktemp("maxcompute")) as running:
        yield running
        running.faults.clear()


def output(emulator: MaxComputeEmulator, address: str, clock: Clock | None = None, **settings: Any) -> MaxComputeOutput:
    credentials = OdpsCredentials(emulator.endpoint, "the test", "id", "secret")
    return MaxComputeOutput(MaxComputeOutputConfig(path=address, **settings), credentials=credentials, clock=clock)


def held(emulator: MaxComputeEmulator, table: str, partition: str = PARTITION) -> pa.Table | None:
    try:
        return emulator.read_table("prj", table, partition)
    except ApiError:
        return None


def write(made: MaxComputeOutput, *tables: pa.Table) -> int:
    """All steps of one rank."""
    schema = tables[0].schema if tables else None
    try:
        made.check(schema)
        for table in tables:
            made.write(table)
        begun = made.begin(schema)
        return made.commit(begun, [made.deliver(begun, 0)]).rows
    finally:
        made.abort()


class TestMaxCompute(OutputContract):
    """B: written through a session, one block a rank, visible by one commit."""

    counts_operations = True

    @pytest.fixture(autouse=True)
    def _start(self, emulator: MaxComputeEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self._emulator = emulator
        self._monkeypatch = monkeypatch

    def table(self, directory: Path) -> str:
        return "t" + hashlib.md5(str(directory).encode()).hexdigest()

    def make(self, directory: Path, *, overwrite: bool = False) -> MaxComputeOutput:
        address = f"odps://prj/tables/{self.table(directory)}/{PARTITION}"
        return output(self._emulator, address, overwrite=overwrite, timeout_s=0.2)

    def read(self, directory: Path) -> pa.Table | None:
        found = held(self._emulator, self.table(directory))
        return None if found is None or found.num_rows == 0 else found

    @contextmanager
    def dying(self, directory: Path, number: int) -> Iterator[None]:
        """From the request with this number on none leaves this process."""
        sent, send = 0, requests.Session.send

        def dead(session: requests.Session, *arguments: Any, **more: Any) -> requests.Response:
            nonlocal sent
            sent += 1
            if sent >= number:
                raise StorageError(f"died before request {sent}")
            return send(session, *arguments, **more)

        with self._monkeypatch.context() as patch:
            patch.setattr(requests.Session, "send", dead)
            yield


def test_table_and_partition_are_made_for_the_rows(emulator: MaxComputeEmulator) -> None:
    table = rows(0, 4).append_column("tags", pa.array([["a"], [], None, ["b", "c"]], pa.list_(pa.string())))
    table = table.append_column("small", pa.array([1, 2, 3, None], pa.int32()))
    assert write(output(emulator, "odps://prj/tables/made/dt=1/hr=02", lifecycle=7), table) == 4
    document = emulator._service.tables.document(_name("made"))
    assert [(c.name, c.type) for c in document.columns] == [
        ("n", "bigint"), ("text", "string"), ("score", "double"), ("tags", "array<string>"), ("small", "int"),
    ]  # fmt: skip
    assert [(c.name, c.type) for c in document.partition_columns] == [("dt", "string"), ("hr", "string")]
    assert document.lifecycle == 7
    assert emulator.read_table("prj", "made", "dt=1/hr=02").select(table.column_names).to_pylist() == table.to_pylist()


def _name(table: str) -> Any:
    from tidemill.testing.maxcompute.documents import TableName

    return TableName(project="prj", schema_name="default", table=table)


def test_lifecycle_comes_from_tzrecs_variable() -> None:
    assert odps_table_lifecycle({"ODPS_TABLE_LIFECYCLE": "30"}) == 30
    assert odps_table_lifecycle({}) is None
    with pytest.raises(ConfigError, match="ODPS_TABLE_LIFECYCLE"):
        odps_table_lifecycle({"ODPS_TABLE_LIFECYCLE": "a month"})


def test_a_table_without_partitions(emulator: MaxComputeEmulator) -> None:
    assert write(output(emulator, "odps://prj/tables/flat"), rows(0, 3)) == 3
    with pytest.raises(ConfigError, match="the table has no partitions"):
        output(emulator, "odps://prj/tables/flat/dt=1").check(rows(0, 1).schema)
    with pytest.raises(ConfigError, match="--overwrite"):
        output(emulator, "odps://prj/tables/flat").check(rows(0, 1).schema)
    assert write(output(emulator, "odps://prj/tables/flat", overwrite=True), rows(5, 6)) == 1
    assert emulator.read_table("prj", "flat").to_pylist() == rows(5, 6).to_pylist()


def test_a_partitioned_table_needs_its_partition(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "parts", {"dt=1/hr=1": rows(0, 2)})
    for address in ("odps://prj/tables/parts", "odps://prj/tables/parts/dt=1", "odps://prj/tables/parts/hr=1/dt=1"):
        with pytest.raises(ConfigError, match="name one partition, dt=VALUE/hr=VALUE"):
            output(emulator, address).check(rows(0, 1).schema)
    with pytest.raises(ConfigError, match="one at a time"):
        output(emulator, "odps://prj/tables/parts/dt=1&dt=2")


def test_rows_must_fit_the_table(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "typed", {"dt=1": pa.table({"n": pa.array([1], pa.int32()), "text": ["a"]})})
    address = "odps://prj/tables/typed/dt=2"
    for table, match in (
        (pa.table({"n": [1]}), "its column 'text' isn't among"),
        (pa.table({"n": pa.array([1], pa.int32()), "text": ["a"], "more": [1]}), "has no column 'more'"),
        (pa.table({"n": pa.array([1], pa.int64()), "text": ["a"]}), "column 'n' is int32 there, and int64"),
        (pa.table({"n": pa.array([1], pa.int32()), "text": ["a"], "dt": ["2"]}), "'dt' is a partition column"),
    ):
        with pytest.raises(SchemaError, match=match):
            output(emulator, address).check(table.schema)
    # Narrower numbers and other encodings of text are no difference, nor is the order or the case of names.
    fits = pa.table({"TEXT": pa.array(["x", None], pa.large_string()), "n": pa.array([7, 8], pa.int8())})
    assert write(output(emulator, address), fits) == 2
    assert held(emulator, "typed", "dt=2").select(["n", "text"]).to_pylist() == [{"n": 7, "text": "x"}, {"n": 8, "text": None}]


@pytest.mark.parametrize(
    ("table", "match"),
    [
        (pa.table({"dt": ["a"]}), "'dt' is a partition column"),
        (pa.table({"a-b": ["a"]}), "can't be called 'a-b'"),
        (pa.table({"a": ["a"], "A": ["b"]}), "'A' is another column too"),
        (pa.table({"a": pa.array([1], pa.duration("s"))}), "'a' is duration"),
    ],
)
def test_a_table_that_cant_be_made_is_refused_before_anything_is_computed(
    emulator: MaxComputeEmulator, table: pa.Table, match: str
) -> None:
    with pytest.raises(SchemaError, match=match):
        output(emulator, "odps://prj/tables/impossible/dt=1").check(table.schema)
    assert held(emulator, "impossible", "dt=1") is None


def test_no_rows_make_the_partition_empty(emulator: MaxComputeEmulator) -> None:
    with pytest.raises(ConfigError, match="create it first"):
        output(emulator, "odps://prj/tables/nothing/dt=1").check(None)
    emulator.add_table("prj", "nothing", {"dt=1": rows(0, 2)})
    assert write(output(emulator, "odps://prj/tables/nothing/dt=1", overwrite=True)) == 0
    assert held(emulator, "nothing", "dt=1").num_rows == 0


def test_faults_that_pass_are_waited_out_and_no_row_is_written_twice(emulator: MaxComputeEmulator) -> None:
    for operation in ("create_write_session", "write_rows", "commit_write_session"):
        emulator.faults.refuse(operation)
        emulator.faults.drop(operation)
        emulator.faults.lose_answer(operation)
    emulator.faults.refuse("get_write_session", times=2)
    assert write(output(emulator, f"odps://prj/tables/faulty/{PARTITION}", clock=ManualClock()), rows(0, 30_000)) == 30_000
    assert held(emulator, "faulty")["n"].to_pylist() == list(range(30_000))
    attempts = [int(request.query["attempt_number"]) for request in emulator.requests("write_rows")]
    assert attempts[-4:] == [0, 1, 2, 3]


def test_a_slow_commit_is_waited_for_and_nothing_shows_until_it_is_done(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "slow", {PARTITION: rows(0, 2)})
    emulator.faults.slow_commit()
    with pytest.raises(DeadlineError, match="isn't known: look before you write again"):
        write(output(emulator, f"odps://prj/tables/slow/{PARTITION}", overwrite=True, timeout_s=0.5), rows(5, 9))
    assert held(emulator, "slow").to_pylist() == rows(0, 2).to_pylist()
    emulator.faults.slow_commit(seconds=0.3)
    assert write(output(emulator, f"odps://prj/tables/slow/{PARTITION}", overwrite=True), rows(5, 9)) == 4
    assert held(emulator, "slow").to_pylist() == rows(5, 9).to_pylist()


def test_a_failed_commit_leaves_the_old_rows(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "failing", {PARTITION: rows(0, 2)})
    emulator.faults.fail_commit()
    with pytest.raises(StorageError, match="is CRITICAL; nothing was written"):
        write(output(emulator, f"odps://prj/tables/failing/{PARTITION}", overwrite=True), rows(5, 9))
    assert held(emulator, "failing").to_pylist() == rows(0, 2).to_pylist()


def test_an_abort_takes_the_partition_away_that_it_made(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "aborted", {"dt=1": rows(0, 2)})
    made = output(emulator, "odps://prj/tables/aborted/dt=2")
    made.write(rows(0, 1))
    begun = made.begin(rows(0, 1).schema)
    made.deliver(begun, 0)
    assert held(emulator, "aborted", "dt=2").num_rows == 0
    made.abort()
    assert held(emulator, "aborted", "dt=2") is None


def test_rows_that_came_meanwhile_arent_overwritten(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "race", {"dt=1": rows(0, 2)})
    made = output(emulator, "odps://prj/tables/race/dt=2")
    made.check(rows(0, 1).schema)
    made.write(rows(0, 1))
    emulator.add_table("prj", "race", {"dt=2": rows(7, 9)})
    with pytest.raises(ConfigError, match="holds rows already"):
        made.begin(rows(0, 1).schema)
    made.abort()
    assert held(emulator, "race", "dt=2").to_pylist() == rows(7, 9).to_pylist()


def test_a_value_that_doesnt_fit_is_named(emulator: MaxComputeEmulator) -> None:
    emulator.add_table("prj", "days", {"dt=1": pa.table({"day": pa.array([0], pa.timestamp("ms"))})})
    made = output(emulator, "odps://prj/tables/days/dt=2")
    with pytest.raises(DataError, match="'day'"):
        write(made, pa.table({"day": pa.array([1], pa.timestamp("ns"))}))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_faults_pass_the_partition_holds_all_rows_once_or_the_old_ones(emulator: MaxComputeEmulator, seed: int) -> None:
    """Two ranks, faults of any kind at any call, a commit that takes its time or fails; waiting costs no time."""
    random, table = Random(seed), f"story{seed}"
    old = seed % 2 == 0
    if old:
        emulator.add_table("prj", table, {PARTITION: rows(100, 103)})
    faults = emulator.faults
    operations = ["metadata", "sql", "create_write_session", "get_write_session", "write_rows", "commit_write_session"]
    for _ in range(random.randint(1, 6)):
        fault = random.choice([faults.refuse, faults.drop, faults.lose_answer])
        fault(random.choice(operations), times=random.randint(1, 3), skip=random.randint(0, 3))
    if random.random() < 0.3:
        faults.fail_commit()
    address = f"odps://prj/tables/{table}/{PARTITION}"
    ranks = [output(emulator, address, clock=ManualClock(), overwrite=True) for _ in range(2)]
    schema, failure = rows(0, 1).schema, None
    try:
        ranks[0].check(schema)
        for rank, made in enumerate(ranks):
            made.write(rows(10 * rank, 10 * rank + 10))
        begun = ranks[0].begin(schema)
        ranks[0].commit(begun, [made.deliver(begun, rank) for rank, made in enumerate(ranks)])
    except StorageError as error:
        failure = error
    finally:
        faults.clear()
        for made in ranks:
            made.abort()
    found = held(emulator, table)
    if failure is None:
        assert found.to_pylist() == rows(0, 20).to_pylist()
    elif old:
        assert "CRITICAL" in str(failure)
        assert found.to_pylist() == rows(100, 103).to_pylist()
    else:
        assert found is None or found.num_rows == 0
