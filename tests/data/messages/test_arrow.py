"""Arrow messages to rows, and how their columns are fitted."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.data.messages.arrow import ArrowDecoder

COLUMNS = {"n": pa.int64(), "name": pa.string()}
TABLE = pa.table({"n": [1, 2], "name": ["a", "b"]})


def stream(*tables):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def bare(table):
    """Record batches without their schema."""
    return b"".join(batch.serialize().to_pybytes() for batch in table.to_batches())


def test_every_record_batch_is_read():
    """DCL 9.8: not just the first batch of a message."""
    decoded = ArrowDecoder(None).decode([stream(TABLE, TABLE), stream(TABLE.slice(0, 0)), stream(TABLE)])
    assert decoded.table.column("n").to_pylist() == [1, 2, 1, 2, 1, 2]
    assert decoded.rows.tolist() == [4, 0, 2]


def test_columns_by_name_order_and_extras_do_not_matter(caplog):
    """DCL 9.8: absorbed, and said once each."""
    other = pa.table({"extra": [1], "name": pa.array(["c"], pa.large_string()), "n": pa.array([5], pa.int32())})
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("name", pa.string())])
    named = TABLE.replace_schema_metadata({"made": "by hand"})
    decoder = ArrowDecoder(COLUMNS, "kafka clicks")
    with caplog.at_level("INFO", "tidemill"):
        for _ in range(2):
            messages = [stream(table) for table in (TABLE, other, TABLE.cast(strict), named, TABLE.select(["name", "n"]))]
            decoded = decoder.decode(messages)
            assert decoded.poison == {}
            assert decoded.table.schema == pa.schema(list(COLUMNS.items()))
            assert decoded.table.column("n").to_pylist() == [1, 2, 5, 1, 2, 1, 2, 1, 2]
            assert decoded.rows.tolist() == [2, 1, 2, 2, 2]
    told = [message.partition("(")[2].partition(")")[0] for message in caplog.messages]
    assert told == [
        "extra came; name was string, is large_string; n was int64, is int32",
        "nullability",
        "metadata",
        "order",
    ]


def test_missing_and_narrowed_columns_are_schema_errors_that_name_them():
    """DCL 9.8."""
    decoder = ArrowDecoder({"n": pa.int32(), "name": pa.string()})
    good = pa.table({"n": pa.array([1], pa.int32()), "name": ["a"]})
    decoded = decoder.decode([stream(good), stream(good.select(["n"])), stream(TABLE), stream(good)])
    assert decoded.rows.tolist() == [1, 0, 0, 1]
    assert [(index, poison.column, poison.is_schema) for index, poison in decoded.poison.items()] == [
        (1, "name", True),
        (2, "n", True),
    ]
    assert "isn't in the message" in str(decoded.poison[1])
    assert "int64" in str(decoded.poison[2])
    assert "int32" in str(decoded.poison[2])


WIDENED = [
    (pa.array([1], pa.int32()), pa.int64(), [1]),
    (pa.array([1], pa.uint8()), pa.int32(), [1]),
    (pa.array([1], pa.uint32()), pa.int64(), [1]),
    (pa.array([1], pa.int64()), pa.float64(), [1.0]),
    (pa.array([1], pa.int64()), pa.string(), ["1"]),
    (pa.array([0.5], pa.float32()), pa.float64(), [0.5]),
    (pa.array([True]), pa.int64(), [1]),
    (pa.array(["a"], pa.large_string()), pa.string(), ["a"]),
    (pa.array(["a"]).dictionary_encode(), pa.string(), ["a"]),
    (pa.array([[1]], pa.large_list(pa.int16())), pa.list_(pa.int64()), [[1]]),
    (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.list_(pa.string()), [["1", "2"]]),
    (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())), pa.map_(pa.string(), pa.int64()), [[("a", 1)]]),
    (pa.array([1_700_000_000_500], pa.timestamp("ms", "UTC")), pa.float64(), [1_700_000_000.5]),
    (pa.nulls(1), pa.int64(), [None]),
]
REFUSED = [
    (pa.array([1], pa.int64()), pa.int32()),
    (pa.array([1], pa.uint64()), pa.int64()),
    (pa.array([1], pa.int32()), pa.uint32()),
    (pa.array([0.5], pa.float64()), pa.float32()),
    (pa.array([0.5], pa.float64()), pa.int64()),
    (pa.array([0.5], pa.float64()), pa.string()),
    (pa.array(["1"]), pa.int64()),
    (pa.array([b"a"]), pa.string()),
    (pa.array([1]), pa.list_(pa.int64())),
    (pa.array([[1]]), pa.int64()),
]


@pytest.mark.parametrize(("column", "wanted", "read"), WIDENED, ids=lambda value: str(getattr(value, "type", value))[:30])
def test_widened(column, wanted, read):
    """DCL 9.8: int32 -> int64 and the like."""
    decoded = ArrowDecoder({"v": wanted}).decode([stream(pa.table({"v": column}))])
    assert decoded.poison == {}
    assert decoded.table.column("v").type == wanted
    assert decoded.table.column("v").to_pylist() == read


@pytest.mark.parametrize(("column", "wanted"), REFUSED, ids=lambda value: str(getattr(value, "type", value))[:30])
def test_not_narrowed(column, wanted):
    """DCL 9.8: int64 -> int32 and the like, whatever the values."""
    decoded = ArrowDecoder({"v": wanted}).decode([stream(pa.table({"v": column}))])
    assert decoded.poison[0].is_schema
    assert decoded.poison[0].column == "v"


def test_a_number_that_a_double_cannot_hold_is_poison_of_its_message_alone():
    decoder = ArrowDecoder({"v": pa.float64()})
    decoded = decoder.decode([stream(pa.table({"v": [value]})) for value in (1, 2**60 + 1, 3)])
    assert decoded.table.column("v").to_pylist() == [1.0, 3.0]
    assert decoded.rows.tolist() == [1, 0, 1]
    assert list(decoded.poison) == [1]
    assert not decoded.poison[1].is_schema


def test_types_that_are_not_declared_are_the_widest_of_their_kind():
    """So a producer may go from int32 to int64 and back."""
    decoder = ArrowDecoder({"n": None, "x": None, "ids": None})
    narrow = pa.table(
        {"n": pa.array([1], pa.int32()), "x": pa.array([0.5], pa.float32()), "ids": pa.array([[1]], pa.list_(pa.int16()))}
    )
    wide = pa.table({"ids": pa.array([[2]], pa.list_(pa.int64())), "n": pa.array([2**40]), "x": pa.array([0.25])})
    decoded = decoder.decode([stream(narrow), stream(wide), stream(narrow)])
    assert decoded.table.to_pydict() == {"n": [1, 2**40, 1], "x": [0.5, 0.25, 0.5], "ids": [[1], [2], [1]]}
    assert decoded.poison == {}


def test_record_batches_with_a_declared_schema():
    decoder = ArrowDecoder(COLUMNS, declared=TABLE.schema.with_metadata({"made": "by hand"}))
    twice = pa.concat_tables([TABLE, TABLE])
    messages = [bare(TABLE), bare(twice), stream(TABLE), b"garbage", bare(TABLE)[:-9], bare(TABLE)]
    decoded = decoder.decode(messages)
    assert twice.column(0).num_chunks == 2
    assert decoded.rows.tolist() == [2, 4, 2, 0, 0, 2]
    assert decoded.table.column("name").to_pylist() == ["a", "b"] * 5
    assert set(decoded.poison) == {3, 4}


def test_dictionaries_lists_and_maps():
    table = pa.table(
        {
            "color": pa.array(["red", "blue", "red"]).dictionary_encode(),
            "ids": [[1], None, []],
            "weights": pa.array([[("a", 1.0)], [], None], pa.map_(pa.string(), pa.float32())),
        }
    )
    columns = {"color": pa.string(), "ids": pa.list_(pa.int64()), "weights": pa.map_(pa.string(), pa.float32())}
    decoded = ArrowDecoder(columns).decode([stream(table), stream(table)])
    assert decoded.table.to_pylist() == table.to_pylist() * 2


def test_poison():
    """DCL 9.9."""
    good = stream(TABLE)
    decoded = ArrowDecoder(COLUMNS).decode([good, b"garbage", None, b"", good[: len(good) // 2], good])
    assert decoded.table.column("n").to_pylist() == [1, 2, 1, 2]
    assert decoded.rows.tolist() == [2, 0, 0, 0, 0, 2]
    assert set(decoded.poison) == {1, 2, 3, 4}
    assert not any(poison.is_schema for poison in decoded.poison.values())


@given(st.data())
def test_damaged_bytes_never_do_harm(data):
    """A changed byte either shows, or gives rows that are safe to use; other messages keep theirs."""
    good = stream(TABLE)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    decoded = ArrowDecoder(COLUMNS).decode([good, bad, good])
    assert decoded.table.num_rows == decoded.rows.sum()
    assert decoded.rows[0] == decoded.rows[2] == 2
    rows = decoded.table.to_pylist()
    assert rows[:2] == rows[-2:] == TABLE.to_pylist()
