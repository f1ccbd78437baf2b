"""JSON messages to rows: which message each row came from, and which can't be read."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.data.messages.json import JsonDecoder

COLUMNS = {"n": pa.int64(), "name": pa.string(), "ids": pa.list_(pa.int64())}


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
    assert str(decoded.poison[1])


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


def test_json_blank_and_broken_lines_keep_rows_with_their_messages():
    """Embedded line breaks, in and between values, and messages without a row."""
    messages = [b'{"n":1,\n"name":"a\\nb"}', b"[]", b'\n{"n":2}\n', None, b'[{"n":3},\n{"n":4}]', b"{}"]
    decoded = JsonDecoder(COLUMNS).decode(messages)
    assert decoded.rows.tolist() == [1, 0, 1, 0, 2, 1]
    assert decoded.table.column("n").to_pylist() == [1, 2, 3, 4, None]
    assert decoded.table.column("name").to_pylist()[0] == "a\nb"
    assert list(decoded.poison) == [3]


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (pa.int64(), 7, 7),
        (pa.int64(), 2**40, 2**40),
        (pa.int32(), 7, 7),
        (pa.int32(), 2**40, None),
        (pa.int64(), 2**70, None),
        (pa.int64(), 1.5, None),
        (pa.int64(), "7", None),
        (pa.float64(), 7, 7.0),
        (pa.string(), 7, "7"),
        (pa.string(), "7", "7"),
        (pa.list_(pa.int64()), [1, 2], [1, 2]),
        (pa.list_(pa.int64()), ["x"], None),
    ],
)
def test_json_types(kind, value, read):
    """DCL 9.8: what widens is taken; what doesn't is poison that names the column."""
    decoded = JsonDecoder({"v": kind}).decode([json.dumps({"v": value}).encode()])
    if read is None:
        assert decoded.poison[0].column == "v"
        assert "column 'v' holds" in str(decoded.poison[0])
        assert str(kind) in str(decoded.poison[0])
    else:
        assert decoded.table.column("v").to_pylist() == [read]
        assert decoded.poison == {}


def test_json_drift_is_told_once(caplog):
    """DCL 9.8: a column that comes, and one that goes."""
    decoder = JsonDecoder(COLUMNS, "kafka clicks")
    full = b'{"n":1,"name":"a","ids":[1]}'
    with caplog.at_level("INFO", "tidemill"):
        decoder.decode([full] * 3)
        assert not caplog.messages
        for _ in range(2):
            decoder.decode([b'{"ids":[1],"name":"a","n":1,"extra":1}'])
            decoder.decode([b'{"n":1,"ids":[1]}'] * 2)
    assert caplog.messages == ["kafka clicks: extra came", "kafka clicks: name isn't there, and is taken as null"]


def test_json_with_a_registrys_header():
    decoder = JsonDecoder(COLUMNS, header=5)
    decoded = decoder.decode([b"\0\0\0\0\7" + b'{"n":1}', b"\0\0", b'{"n":2}', None])
    assert decoded.table.column("n").to_pylist() == [1, 2]
    assert decoded.rows.tolist() == [1, 0, 1, 0]
    assert set(decoded.poison) == {1, 3}


@pytest.mark.parametrize("message", [b'{"n":' + b"[" * 100_000, b'{"x":' * 50_000, b'{"n":1' + b" " * 10_000])
def test_json_bombs_are_poison(message):
    decoded = JsonDecoder(COLUMNS).decode([b'{"n":1}', message])
    assert decoded.rows.tolist() == [1, 0]
    assert list(decoded.poison) == [1]
