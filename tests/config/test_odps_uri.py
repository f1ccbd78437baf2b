"""MaxCompute's addresses, in the form that tzrec has them."""

from __future__ import annotations

import pytest

from tidemill.config.odps_uri import OdpsTable, parse_odps_path, parse_odps_paths, partition_key


def test_partitions_keep_the_order_in_which_they_are_written():
    """B1: an index is a place in the input path as written, never sorted."""
    path = parse_odps_path("odps://prj/tables/clicks/ds=20240320/hr=1&ds=20240318/hr=2")
    assert path.table == OdpsTable("prj", None, "clicks")
    assert path.partitions == ("ds=20240320/hr=1", "ds=20240318/hr=2")


def test_a_schema_belongs_to_the_table():
    assert parse_odps_path("odps://prj/tables/dw.clicks").table == OdpsTable("prj", "dw", "clicks")
    assert str(parse_odps_path("odps://prj/tables/dw.clicks/").table) == "prj.dw.clicks"


def test_several_tables_are_separated_by_commas():
    paths = parse_odps_paths("odps://a/tables/t/ds=1, odps://b/tables/t/ds=1,odps://a/tables/s.t")
    assert [str(path.table) for path in paths] == ["a.t", "b.t", "a.s.t"]
    assert [path.text for path in paths] == ["odps://a/tables/t/ds=1", "odps://b/tables/t/ds=1", "odps://a/tables/s.t"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "names no table"),
        ("s3://bucket/x", "isn't of the form odps://project/tables/"),
        ("odps://prj/clicks/ds=1", "isn't of the form odps://project/tables/"),
        ("odps://prj/tables/", "isn't of the form odps://project/tables/"),
        ("odps://prj/tables/a.b.c", "'a.b.c' isn't a table, or schema.table"),
        ("odps://prj/tables/.c", "'.c' isn't a table, or schema.table"),
        ("odps://prj/tables/t/ds", "'ds' isn't a partition; write name=value"),
        ("odps://prj/tables/t/ds=1&", "'' isn't a partition"),
        ("odps://prj/tables/t/ds='1'", "without quotes"),
        ("odps://prj/tables/t/ds=1#2", "holds a '#'"),
        ("odps://prj/tables/t/ds=1/hr=2&hr=2/ds=1", "partition ds=1/hr=2 of prj.t would be read twice"),
        ("odps://prj/tables/t/ds=1,odps://prj/tables/t", "the whole table of prj.t would be read twice"),
        ("odps://prj/tables/t,odps://prj/tables/t/ds=1", "partition ds=1 of prj.t would be read twice"),
        ("odps://prj/tables/t/ds=1,odps://prj/tables/default.t/ds=1", "partition ds=1 of prj.default.t would be read twice"),
        ("odps://prj/tables/t/ds=1,odps://PRJ/tables/T/DS=1", "partition ds=1 of PRJ.T would be read twice"),
    ],
)
def test_a_wrong_address_is_told(address, message):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_odps_paths(address)
    assert message in str(caught.value)


def test_a_partition_is_the_same_however_its_columns_are_ordered():
    assert partition_key("hr=1/ds=2") == partition_key("ds=2/hr=1") != partition_key("ds=1/hr=2")


def test_tables_are_the_same_however_they_are_worded():
    """The service's names have no case, and "default" is the schema of tables without one; other schemas are kept apart (B1)."""
    plain, worded, other = (
        path.table.key for path in parse_odps_paths("odps://p/tables/t/d=1,odps://P/tables/DEFAULT.T/d=2,odps://p/tables/s.t/d=1")
    )
    assert plain == worded != other
