"""Where CSV records end: the scan agrees with Arrow's parser, whatever the text."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.data.sources.csv_scan import scan


def scanned(text, values=2, **options):
    return scan(np.frombuffer(text, np.uint8), ord(","), values, is_end=options.pop("is_end", True), **options)


def arrow_rows(text, values):
    """How many rows Arrow finds, and how many of them have another number of values."""
    odd = []
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text),
        read_options=pyarrow.csv.ReadOptions(column_names=[str(n) for n in range(values)], use_threads=False, block_size=1 << 20),
        parse_options=pyarrow.csv.ParseOptions(
            newlines_in_values=True, invalid_row_handler=lambda row: odd.append(row.actual_columns) or "skip"
        ),
    )
    return table.num_rows + len(odd), odd


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(["a", "bc", ",", ",", '"', '""', "\n", "\n", "\r\n", "\r", " ", "é"]), max_size=40).map("".join))
def test_counts_as_arrow_does(text):
    data = text.encode()
    found = scanned(data)
    if not data.strip(b"\r\n") or found.in_quotes:
        return
    rows, odd = arrow_rows(data, 2)
    assert found.rows == rows
    assert (found.odd_values if found.odd_line >= 0 else None) == (odd[0] if odd else None)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(["a", ",", '"', '""', "\n", "\r\n", "\r"]), max_size=30).map("".join), st.integers(0, 40))
def test_a_cut_anywhere_changes_nothing(text, cut):
    data = text.encode()
    whole = scanned(data)
    head = scanned(data[:cut], is_end=False)
    tail = scanned(data[head.size :])
    assert head.rows + tail.rows == whole.rows
    assert head.lines + tail.lines == whole.lines


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (b"", 0),
        (b"\n\r\n\r", 0),
        (b"1,2", 1),
        (b'1,"2\n3"\n4,5', 2),
        (b'1,"a""\n""b"\r\n2,3\r\n', 2),
        (b'1,5" pipe\n2,"x"y"z\n', 2),
        (b"1,2\r3,4\r", 2),
    ],
)
def test_rows(text, rows):
    found = scanned(text)
    assert (found.rows, found.size, found.odd_line, found.open_line) == (rows, len(text), -1, -1)


def test_tells_the_line_of_a_row_with_too_many_values():
    found = scanned(b'1,"a\nb"\n\n1,2,3\n4,5,6,7\n')
    assert (found.odd_line, found.odd_values) == (3, 3)


def test_tells_where_a_quote_opens_that_never_closes():
    found = scanned(b'1,2\n3,"4\n5,6\n')
    assert (found.rows, found.size, found.open_line, found.in_quotes) == (1, 4, 1, True)


def test_stops_behind_so_many_rows():
    found = scanned(b"1,2\n3,4\n5,6\n", max_rows=2)
    assert (found.rows, found.size, found.lines, found.open_line) == (2, 8, 2, -1)


@pytest.mark.parametrize(
    ("text", "line"),
    [(b'1,2\n"a"b,2\n', 1), (b'1,"2"\n"a""b",2\r\n', -1), (b'5" pipe,2\n', -1), (b'"a\n",2\n1,"2\n3,"4"\n', 2), (b'1,"2" \n', 0)],
)
@pytest.mark.parametrize("before", [b"", b"1,2\n" * 50, b'"' + b"x" * 60 + b'",2\n'])
def test_tells_the_line_where_text_follows_a_closing_quote(text, line, before):
    expected = line if line < 0 else line + before.count(b"\n")
    for options in ({}, {"max_rows": 1000}):
        assert scanned(before + text, **options).stray_line == expected


VALUES = st.lists(st.sampled_from(["y", '""', ",", "\n", "\r\n", "long enough"]), max_size=8).map("".join)
TEXTS = st.one_of(st.text("xyz", max_size=30), VALUES.map(lambda text: f'"{text}"'))
PLAIN = st.tuples(TEXTS, TEXTS, st.sampled_from(["\n", "\n", "\r\n", "\n\n", "\r\n\r\n"])).map(
    lambda row: f"{row[0]},{row[1]}{row[2]}"
)
ODD = st.sampled_from(["1\n", "1,2,3\n", '5" pipe,2\n', '"x"y"z,2\n', "1,2\r", "\r", '"', ","])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(PLAIN, PLAIN, PLAIN, ODD), max_size=40).map("".join), st.integers(0, 500), st.booleans())
def test_words_and_bytes_agree(text, cut, is_end):
    """Plain records are scanned 64 bytes at once; `max_rows` has all scanned byte by byte."""
    data = text.encode()[:cut] if cut < 400 else text.encode()
    words, each = scanned(data, is_end=is_end), scanned(data, is_end=is_end, max_rows=len(data) + 1)
    assert replace(words, may_be_empty=each.may_be_empty) == each
    assert words.may_be_empty or not each.may_be_empty


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from(["\n", "\r\n", "\r"])), max_size=12))
def test_an_empty_value_is_never_overlooked(rows):
    data = "".join(f"{first},{second}{end}" for first, second, end in rows).encode()
    is_there = any(value in ("", '""') for row in rows for value in row[:2])
    for found in (scanned(data), scanned(data, max_rows=100)):
        assert found.may_be_empty or not is_there


def test_plain_rows_have_no_empty_value():
    assert not scanned(b'"e1",2\r\n"a,b\nc",3\n' * 50).may_be_empty
    assert scanned(b'"e1",2\n' * 50 + b'"e1",\n' + b'"e1",2\n' * 50).may_be_empty
