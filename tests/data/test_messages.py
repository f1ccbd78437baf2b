"""Messages to rows: which message each row came from, and which can't be read."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.data.messages import ArrowDecoder, JsonDecoder

COLUMNS = {"n": pa.int64(), "name": pa.string(), "ids": pa.list_(pa.int64())}


def stream(*tables):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_json_objects_and_arrays():
    decoded = JsonDecoder(COLUMNS).decode(
        [b'{"n":1,"name":"a"}', b'[{"n":2},{"n":3,"ids":[7]}]', b' {"n":\n4}', b"[]", b'{"other":1}']
    )
    assert decoded.table.schema == pa.schema(list(COLUMNS.items()))
    assert decoded.table.column("n").to_pylist() == [1, 2, 3, 4, None]
    assert decoded.table.column("name").to_pylist() == ["a", None, None, None, None]
    assert decoded.table.column("ids").to_pylist() == [None, None, [7], None, None]
    assert decoded.rows.tolist() == [1, 2, 1, 0, 1]
    assert decoded.poison == {}


POISON = [
    None,
    b"",
    b"  ",
    b"garbage",
    b"null",
    b"3",
    b'{"n":"x"}',
    b'{"n":1.5}',
    b'{"n":1}{"n":2}',
    b'[{"n":1},2]',
    b'{"n":1',
    b"\xff{}",
]


@pytest.mark.parametrize("message", POISON)
def test_json_poison_is_only_its_own_message(message):
    decoded = JsonDecoder(COLUMNS).decode([b'{"n":1}', message, b'{"n":2}', b'{"n":3}'])
    assert decoded.table.column("n").to_pylist() == [1, 2, 3]
    assert decoded.rows.tolist() == [1, 0, 1, 1]
    assert list(decoded.poison) == [1]
    assert decoded.poison[1]


@given(st.lists(st.one_of(st.sampled_from(POISON), st.integers(0, 4)), max_size=30))
def test_json_rows_stay_with_their_messages(script):
    """A number stands for an array of so many rows, each holding its message's index."""
    messages = [json.dumps([{"n": i}] * entry).encode() if isinstance(entry, int) else entry for i, entry in enumerate(script)]
    decoded = JsonDecoder(COLUMNS).decode(messages)
    assert decoded.rows.tolist() == [entry if isinstance(entry, int) else 0 for entry in script]
    assert decoded.table.column("n").to_pylist() == [
        i for i, entry in enumerate(script) if isinstance(entry, int) for _ in range(entry)
    ]
    assert set(decoded.poison) == {i for i, entry in enumerate(script) if not isinstance(entry, int)}


def test_arrow_reads_every_record_batch():
    table = pa.table({"n": [1, 2], "name": ["a", "b"]})
    decoded = ArrowDecoder(None).decode([stream(table, table), stream(table.slice(0, 0)), stream(table)])
    assert decoded.table.column("n").to_pylist() == [1, 2, 1, 2, 1, 2]
    assert decoded.rows.tolist() == [4, 0, 2]


def test_arrow_columns_by_name_missing_null_narrower_widened():
    decoder = ArrowDecoder(COLUMNS)
    table = pa.table({"extra": [1], "name": pa.array(["a"], pa.large_string()), "n": pa.array([5], pa.int32())})
    decoded = decoder.decode([stream(table), stream(pa.table({"ids": pa.array([[1]], pa.large_list(pa.int16()))}))])
    assert decoded.table.to_pylist() == [{"n": 5, "name": "a", "ids": None}, {"n": None, "name": None, "ids": [1]}]
    assert decoded.poison == {}


def test_arrow_poison():
    good = stream(pa.table({"n": [1]}))
    decoded = ArrowDecoder(COLUMNS).decode([good, b"garbage", None, good[: len(good) // 2], stream(pa.table({"n": ["x"]})), good])
    assert decoded.table.column("n").to_pylist() == [1, 1]
    assert decoded.rows.tolist() == [1, 0, 0, 0, 0, 1]
    assert set(decoded.poison) == {1, 2, 3, 4}
    assert decoded.poison[4] == "column 'n' is string, not int64"
