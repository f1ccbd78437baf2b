"""Tables and partitions through the real client."""

import http.client
import json
from urllib.parse import urlsplit

import pytest
from odps import ODPS, errors
from odps.models import TableSchema
from odps.types import Column, Partition

from tidemill.testing.maxcompute import MaxComputeEmulator

from .conftest import clicks

SCHEMA = TableSchema(
    columns=[
        Column("user", "bigint", comment="who's it"),
        Column("scores", "map<string,array<double>>"),
        Column("price", "decimal(10,2)"),
        Column("name", "varchar(20)"),
    ],
    partitions=[Partition("dt", "string"), Partition("hr", "bigint")],
)


def test_tables_are_found(odps: ODPS) -> None:
    assert odps.exist_project("prj")
    assert odps.exist_table("clicks")
    assert not odps.exist_table("missing")
    assert [table.name for table in odps.list_tables()] == ["clicks"]
    with pytest.raises(errors.NoSuchTable, match=r"prj\.default\.missing"):
        odps.get_table("missing").reload()


def test_the_tunnel_is_this_server(odps: ODPS, emulator: MaxComputeEmulator) -> None:
    from odps.tunnel import TableTunnel

    assert TableTunnel(odps).tunnel_rest.endpoint == emulator.endpoint


def test_a_table_is_made_with_its_columns_and_lifecycle(odps: ODPS, emulator: MaxComputeEmulator) -> None:
    made = odps.create_table("made", SCHEMA, lifecycle=7, comment="it's mine")
    odps.create_table("made", SCHEMA, if_not_exists=True)

    made.reload()
    columns = [(column.name, str(column.type).lower()) for column in made.table_schema.simple_columns]
    assert columns == [
        ("user", "bigint"),
        ("scores", "map<string,array<double>>"),
        ("price", "decimal(10,2)"),
        ("name", "varchar(20)"),
    ]
    assert [(column.name, str(column.type)) for column in made.table_schema.partitions] == [("dt", "STRING"), ("hr", "BIGINT")]
    assert (made.lifecycle, made.comment, made.table_schema["user"].comment) == (7, "it's mine", "who's it")
    with pytest.raises(errors.ODPSError, match="already exists"):
        odps.create_table("made", SCHEMA)
    assert [request.status for request in emulator.requests("sql")][:1] == [201]


def test_a_table_of_column_texts_without_lifecycle(odps: ODPS) -> None:
    made = odps.create_table("made", ("user bigint, score double not null", "dt string"))

    assert made.table_schema.names == ["user", "score"]
    assert not made.table_schema["score"].nullable
    assert made.lifecycle == -1
    assert not list(made.iterate_partitions())


def test_a_table_in_a_schema(odps: ODPS) -> None:
    odps.create_table("made", ("user bigint", "dt string"), schema="lab")

    assert odps.exist_table("made", schema="lab")
    assert not odps.exist_table("made")
    odps.get_table("made", schema="lab").create_partition("dt=1")
    assert odps.get_table("made", schema="lab").exist_partition("dt=1")
    assert [table.name for table in odps.list_tables(schema="lab")] == ["made"]
    odps.delete_table("made", schema="lab")
    assert not odps.exist_table("made", schema="lab")


@pytest.mark.parametrize(
    "statement", ["select 1", "create table", "create table t (user colour)", "alter table clicks rename to x"]
)
def test_other_statements_fail(odps: ODPS, statement: str) -> None:
    with pytest.raises(errors.ODPSError):
        odps.execute_sql(statement)


def test_partitions_are_listed_page_by_page(odps: ODPS, emulator: MaxComputeEmulator) -> None:
    days = [f"2024030{day}" for day in range(1, 6)]
    emulator.add_table("prj", "daily", {f"dt={day}/hr={hour}": clicks(0, 1) for day in days for hour in "12"})
    table = odps.get_table("daily")

    listed = [dict(partition.partition_spec.kv) for partition in table.iterate_partitions()]
    assert listed == [{"dt": day, "hr": hour} for day in days for hour in "12"]
    # Two a page, as the fixture wants it.
    assert sum("partitions" in request.query for request in emulator.requests("metadata")) == 5
    assert [str(found) for found in table.iterate_partitions("dt=20240303")] == ["dt='20240303',hr='1'", "dt='20240303',hr='2'"]
    assert [str(found) for found in table.iterate_partitions("dt>20240304,hr=2")] == ["dt='20240305',hr='2'"]
    assert str(next(table.iterate_partitions(reverse=True))) == "dt='20240305',hr='2'"


def test_a_partition_tells_its_rows_and_times(odps: ODPS, emulator: MaxComputeEmulator) -> None:
    table = odps.get_table("clicks")
    before = table.get_partition("dt=20240319")
    assert (before.record_num, before.file_num) == (100, 1)
    assert before.size > 0
    assert before.last_data_modified_time.timestamp() == emulator.clock.time()

    emulator.advance(60)
    emulator.add_table("prj", "clicks", {"dt=20240319": clicks(0, 1)})

    after = table.get_partition("dt=20240319")
    assert (after.record_num, after.creation_time) == (1, before.creation_time)
    assert (after.last_data_modified_time - before.last_data_modified_time).total_seconds() == 60
    assert table.get_partition("dt=20240318").record_num == 0


def test_partitions_are_made_and_dropped(odps: ODPS) -> None:
    table = odps.get_table("clicks")
    table.create_partition("dt=20240321")
    table.create_partition("dt=20240321", if_not_exists=True)
    assert table.exist_partition("dt=20240321")
    with pytest.raises(errors.ODPSError, match="already exists"):
        table.create_partition("dt=20240321")

    table.delete_partition("dt=20240321")
    assert not table.exist_partition("dt=20240321")
    table.delete_partition("dt=20240321", if_exists=True)
    with pytest.raises(errors.ODPSError, match="doesn't exist"):
        table.delete_partition("dt=20240321")


@pytest.mark.parametrize("spec", ["hr=1", "dt=1,hr=2"])
def test_wrong_partition_specs_are_refused(odps: ODPS, spec: str) -> None:
    with pytest.raises(errors.ODPSError, match="dt"):
        odps.get_table("clicks").create_partition(spec)


def test_tables_are_dropped(odps: ODPS, emulator: MaxComputeEmulator) -> None:
    odps.delete_table("clicks")
    assert not odps.exist_table("clicks")
    assert not (emulator.folder / "prj" / "default" / "clicks").exists()
    odps.delete_table("clicks", if_exists=True)
    with pytest.raises(errors.NoSuchTable):
        odps.delete_table("clicks")


@pytest.mark.parametrize("path", ["/projects/prj/tables/..", "/projects/.emulator/tables/x", "/projects/prj/tables/..%2f..%2fx"])
def test_names_that_leave_the_folder_are_refused(emulator: MaxComputeEmulator, path: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(emulator.endpoint).netloc, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        code = json.loads(answer.read())["Code"]
    finally:
        connection.close()

    assert (answer.status, code) in [(400, "InvalidArgument"), (404, "NoSuchObject")]
