"""What is particular to CSV files."""

import gzip
import io
import math

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.data.intervals import IntervalSet
from tidemill.data.sources import csv
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.errors import ConfigError, DataError, SchemaError, SourceChangedError

TYPES = {"id": pa.string(), "n": pa.int64()}


def source(*patterns, types=TYPES, header=True, names=(), time=None, delimiter=","):
    paths = ",".join(map(str, patterns))
    config = CsvConfig(paths=paths, with_header=header, names=names, event_time_column=time, delimiter=delimiter)
    return CsvSource(config, types)


def pieces(made, split, remaining=None):
    reader = made.open(split, remaining, IntervalSet())
    try:
        while True:
            yield reader.read(1.0)
    except EOFError:
        return
    finally:
        reader.close()


def rows(made, split=None, remaining=None):
    split = split or made.discover()[0]
    return [row for piece in pieces(made, split, remaining) for row in piece.table.to_pylist()]


def numbered(start, stop):
    return b"id,n\n" + b"".join(b"e%d,%d\n" % (n, n) for n in range(start, stop))


@pytest.fixture
def small_blocks(monkeypatch):
    """Files of a few hundred bytes have many blocks and marks."""
    monkeypatch.setattr(csv, "_BLOCK", 64)
    monkeypatch.setattr(csv, "_MARK_EVERY", 100)


def test_types_are_forced_whatever_the_first_rows_look_like(tmp_path):
    (tmp_path / "a.csv").write_text("n,id,unused\n1,007,x\n,0,\n")
    (tmp_path / "b.csv").write_text("id,n\ntext,3\n")
    made = source(tmp_path / "*.csv", types={**TYPES, "n": pa.float32()})
    first, second = made.discover()
    assert rows(made, first) == [{"id": "007", "n": 1.0}, {"id": "0", "n": None}]
    assert rows(made, second) == [{"id": "text", "n": 3.0}]
    [piece] = pieces(made, first)
    assert piece.table.schema == pa.schema({"id": pa.string(), "n": pa.float32()})


def test_without_a_header_names_come_from_the_config(tmp_path):
    (tmp_path / "a.csv").write_text("1\t9\tx\n2\t8\ty\n")
    made = source(tmp_path / "a.csv", header=False, names=("n", "other", "id"), delimiter="\t")
    assert rows(made) == [{"id": "x", "n": 1}, {"id": "y", "n": 2}]
    with pytest.raises(ConfigError, match="list all their columns in input_fields, or set with_header"):
        source(tmp_path / "a.csv", header=False)


def test_empty_is_null_and_so_are_the_words_for_it_among_numbers(tmp_path):
    (tmp_path / "a.csv").write_text('id,n\n,\n"",NULL\nNULL,NaN\n')
    assert rows(source(tmp_path / "a.csv")) == [{"id": None, "n": None}, {"id": None, "n": None}, {"id": "NULL", "n": None}]


def test_quotes_hold_delimiters_quotes_and_line_ends(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"id",n\r\n"a,""b""\r\nc",1\r\n\r\n5" pipe,2\r\n')
    made = source(tmp_path / "a.csv")
    assert made.discover()[0].num_rows == 2
    assert rows(made) == [{"id": 'a,"b"\r\nc', "n": 1}, {"id": '5" pipe', "n": 2}]


def compressed(suffix, data):
    if suffix == ".gz":
        return gzip.compress(data[:50]) + gzip.compress(data[50:])
    return pa.compress(data, codec="zstd", asbytes=True) if suffix == ".zst" else data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("wanted", [[(0, 300)], [(7, 8)], [(99, 201)], [(5, 60), (250, 300)], []])
@pytest.mark.usefixtures("small_blocks")
def test_reads_exactly_the_rows_asked_for(tmp_path, suffix, wanted):
    (tmp_path / f"a.csv{suffix}").write_bytes(compressed(suffix, numbered(0, 300)))
    made = source(tmp_path / f"a.csv{suffix}")
    [split] = made.discover()
    assert split.num_rows == 300
    assert ("marks" in split.fingerprint) == (not suffix)
    found = list(pieces(made, split, IntervalSet.of(wanted)))
    assert [n for piece in found for n in piece.table["n"].to_pylist()] == [n for start, stop in wanted for n in range(start, stop)]
    assert IntervalSet.of((run.start, run.stop) for piece in found for run in piece.runs).intervals == tuple(wanted)


def test_a_mark_saves_reading_what_lies_before_it(tmp_path, small_blocks, monkeypatch):
    (tmp_path / "a.csv").write_bytes(numbered(0, 1000))
    made = source(tmp_path / "a.csv")
    [split] = made.discover()
    scans = []
    monkeypatch.setattr(csv, "scan", lambda text, *args, **options: scans.append(1) or scan(text, *args, **options))
    assert [row["n"] for row in rows(made, split, IntervalSet.of([(990, 1000)]))] == list(range(990, 1000))
    assert len(scans) < 12  # of some 170 blocks


scan = csv.scan
values = st.text(st.sampled_from('a,"\n\r é'), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(values, st.integers(-9, 9)), min_size=1, max_size=40), st.data())
def test_any_quoted_text_comes_back(tmp_path_factory, given_rows, data):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    quoted = ['"' + text.replace('"', '""') + '"' for text, _ in given_rows]
    path.write_text("id,n\n" + "\n".join(f"{text},{n}" for text, (_, n) in zip(quoted, given_rows, strict=True)), newline="")
    made = source(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv, "_BLOCK", data.draw(st.integers(8, 80)))
        patch.setattr(csv, "_MARK_EVERY", 50)
        [split] = made.discover()
        start = data.draw(st.integers(0, len(given_rows) - 1))
        found = rows(made, split, IntervalSet.of([(start, len(given_rows))]))
    assert [(row["id"], row["n"]) for row in found] == given_rows[start:]


def test_a_row_with_too_few_values_names_file_and_line(tmp_path):
    (tmp_path / "a.csv").write_text('id,n\n"x\ny",1\n\nz\n')
    with pytest.raises(DataError, match=r"a\.csv, line 5: 1 values, where 2 columns are expected"):
        source(tmp_path / "a.csv").discover()


@pytest.mark.usefixtures("small_blocks")
def test_a_bad_value_names_file_line_and_column(tmp_path):
    (tmp_path / "a.csv").write_bytes(numbered(0, 100) + b'\n"two\nlines",5\ne,many\n' + numbered(0, 9)[5:])
    made = source(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.csv, line 105, column 'n': .*invalid value 'many'; it is declared as int64"):
        rows(made)


def test_bytes_that_arent_utf8_name_their_line(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,n\na,1\n\xff,2\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3, column 'id': .*UTF8"):
        rows(source(tmp_path / "a.csv"))


def test_a_quote_that_never_closes_names_its_line(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_bytes(b'id,n\na,1\n"b,2\n' + numbered(0, 2000))
    with pytest.raises(DataError, match=r"a\.csv, line 3: a quoted value begins in this row and never ends"):
        source(tmp_path / "a.csv").discover()
    monkeypatch.setattr(csv, "_BLOCK", 64)
    monkeypatch.setattr(csv, "_MAX_RECORD", 1000)
    with pytest.raises(DataError, match=r"a\.csv, line 3: a quoted value begins in this row and never ends"):
        source(tmp_path / "a.csv").discover()


def test_missing_and_doubled_columns_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("id,n\n")
    (tmp_path / "b.csv").write_text("id,m\n")
    with pytest.raises(
        SchemaError, match=r"b\.csv, line 1: no column 'n'; it has 'id', 'm'; if this line is a row, set with_header: false"
    ):
        source(tmp_path / "*.csv").discover()
    (tmp_path / "b.csv").write_text("id,n,n\n")
    (tmp_path / "c.csv").write_bytes("id,n\n".encode("utf-16"))
    with pytest.raises(SchemaError, match=r"c\.csv, line 1: no header that can be read, which has to be UTF-8 text"):
        source(tmp_path / "c.csv").discover()
    with pytest.raises(SchemaError, match=r"b\.csv: its header names column 'n' twice"):
        source(tmp_path / "b.csv").discover()
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(SchemaError, match=r"b\.csv: no header"):
        source(tmp_path / "b.csv").discover()


def test_damaged_compression_is_named(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(numbered(0, 1000))[:-20])
    with pytest.raises(DataError, match=r"a\.csv\.gz: can't be read; it is damaged"):
        source(tmp_path / "a.csv.gz").discover()


def test_lists_and_wrong_delimiters_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"column 'id' is declared as list<item: int64>, but a value is one text"):
        source("x.csv", types={"id": pa.list_(pa.int64())})
    for delimiter in ("", "||", "é", '"', "\n"):
        with pytest.raises(ConfigError, match="one ASCII character"):
            source("x.csv", delimiter=delimiter)


def test_rewritten_rows_are_told_even_if_size_and_number_are_the_same(tmp_path):
    """DCL 9.12 (b)."""
    path = tmp_path / "a.csv"
    path.write_bytes(numbered(0, 30))
    made = source(path)
    [before] = made.discover()
    path.write_bytes(numbered(0, 30).replace(b"e7,7", b"e8,7"))
    [after] = made.discover()
    with pytest.raises(SourceChangedError, match=r"a\.csv changed since it was first read \(digest was"):
        made.verify(after, before.fingerprint)
    path.write_bytes(numbered(0, 31))
    with pytest.raises(SourceChangedError, match=r"size was"):
        made.open(before, None, IntervalSet())
    path.unlink()
    with pytest.raises(SourceChangedError, match=r"a\.csv: the file is gone"):
        made.open(before, None, IntervalSet())


def test_a_file_that_shrank_while_it_was_read_is_told(tmp_path):
    (tmp_path / "a.csv").write_bytes(numbered(0, 30))
    made = source(tmp_path / "a.csv")
    [split] = made.discover()
    with pytest.raises(SourceChangedError, match="it has 30 rows"):
        rows(made, split, IntervalSet.of([(0, 31)]))


def test_event_times_come_from_a_column(tmp_path):
    (tmp_path / "a.csv").write_text("id,n,t\na,1,1700000000.5\nb,2,\n")
    made = source(tmp_path / "a.csv", types={**TYPES, "t": pa.float64()}, time="t")
    [piece] = pieces(made, made.discover()[0])
    assert piece.event_time[0] == 1700000000.5
    assert math.isnan(piece.event_time[1])
    assert piece.runs[0].event_time == 1700000000.5


def test_reads_behind_urls(tmp_path):
    files = fsspec.filesystem("memory")
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb") as out:
        out.write(numbered(0, 25))
    files.pipe("/csv-days/1/a.csv.gz", buffer.getvalue())
    made = source("memory://csv-days/*/*.csv.gz")
    try:
        [split] = made.discover()
        assert split.id.name == "memory:///csv-days/1/a.csv.gz"
        assert [row["n"] for row in rows(made, split, IntervalSet.of([(7, 23)]))] == list(range(7, 23))
    finally:
        files.rm("/csv-days", recursive=True)


NAMED = {"header": False, "names": ("id", "n")}
TEXTS = {"id": pa.string(), "n": pa.string()}


@pytest.mark.parametrize("types", [TYPES, TEXTS])
@pytest.mark.parametrize("header", ["id,n", '"id","n"', "\ufeffid,n", "\n\r\nID, N", "n,id"])
def test_a_header_is_never_read_as_a_row(tmp_path, header, types):
    """Also of columns that are all text, and in another order than `input_fields` has."""
    (tmp_path / "a.csv").write_text(f"{header}\na,1\n", encoding="utf-8", newline="")
    line = 3 if header.startswith("\n") else 1
    with pytest.raises(SchemaError, match=rf"a\.csv, line {line}: the columns' names stand where .* set with_header: true"):
        source(tmp_path / "a.csv", types=types, **NAMED).discover()


def test_two_names_where_they_belong_are_a_header_and_one_is_a_value(tmp_path):
    made = {"header": False, "names": ("id", "n", "kind", "color"), "types": {"kind": pa.string()}}
    (tmp_path / "a.csv").write_text("id,number,kind,colour\na,1,b,c\n")
    with pytest.raises(SchemaError, match=r"a\.csv, line 1: the columns' names stand"):
        source(tmp_path / "a.csv", **made).discover()
    (tmp_path / "a.csv").write_text("a,1,kind,id\n")
    assert rows(source(tmp_path / "a.csv", **made)) == [{"kind": "kind"}]


def test_the_first_row_is_never_taken_for_the_header(tmp_path):
    (tmp_path / "a.csv").write_text("a,1\nb,2\n")
    with pytest.raises(
        SchemaError, match=r"a\.csv, line 1: no column 'id'; it has 'a', '1'; if this line is a row, set with_header"
    ):
        source(tmp_path / "a.csv").discover()


@pytest.mark.parametrize(
    ("header", "why"), [(True, r"line 1: no column 'id'; it has 'b', '2'"), (False, r"line 1: the columns' names")]
)
def test_the_one_file_of_a_list_that_differs_in_its_header_is_named(tmp_path, header, why):
    (tmp_path / "a.csv").write_text("id,n\na,1\n" if header else "a,1\n")
    (tmp_path / "b.csv").write_text("b,2\n" if header else "id,n\nb,2\n")
    with pytest.raises(SchemaError, match=r"b\.csv, " + why):
        source(tmp_path / "*.csv", header=header, names=("id", "n")).discover()


def test_columns_in_another_order_are_found_by_name_or_told_by_type(tmp_path):
    (tmp_path / "a.csv").write_text("n,id\n1,a\n")
    assert rows(source(tmp_path / "a.csv")) == [{"id": "a", "n": 1}]
    (tmp_path / "a.csv").write_text("1,a\n")
    with pytest.raises(DataError, match=r"a\.csv, line 1, column 'n': .*invalid value 'a'; it is declared as int64"):
        rows(source(tmp_path / "a.csv", **NAMED))


def test_a_header_of_other_names_is_guessed_where_its_types_dont_fit(tmp_path):
    (tmp_path / "a.csv").write_text("name,number\na,1\n")
    with pytest.raises(
        DataError, match=r"a\.csv, line 1, column 'n': .*'number'.*; if this line is a header, set with_header: true"
    ):
        rows(source(tmp_path / "a.csv", **NAMED))
    (tmp_path / "a.csv").write_text("a,1\nb,number\n")
    with pytest.raises(DataError, match=r"a\.csv, line 2, column 'n': .*'number'; it is declared as int64$"):
        rows(source(tmp_path / "a.csv", **NAMED))


def test_a_header_in_the_middle_is_told(tmp_path):
    """Files that were joined."""
    (tmp_path / "a.csv").write_text("id,n\na,1\nid,n\nb,2\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3, column 'n': .*it is the column's name, so this line is a header"):
        rows(source(tmp_path / "a.csv"))


def test_a_header_may_be_longer_than_a_block(tmp_path, small_blocks):
    names = ["id", "n", *(f"column{number}" for number in range(40))]
    (tmp_path / "a.csv").write_text(",".join(names) + "\na,1" + ",0" * 40 + "\n")
    assert rows(source(tmp_path / "a.csv")) == [{"id": "a", "n": 1}]


AB = [{"id": "a", "n": 1}, {"id": "b", "n": 2}]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize(
    "text", [b"a,1\nb,2\n", b"a,1\nb,2", b"a,1\r\nb,2\r\n", b"a,1\r\nb,2", b"a,1\rb,2\r", b"\na,1\n\n\r\nb,2\n\n"]
)
def test_any_line_end_and_mark_gives_the_same_rows(tmp_path, text, header, mark, suffix):
    """The last line may lack its end; blank lines are nothing."""
    end = b"\r\n" if b"\r\n" in text else b"\r" if b"\r" in text else b"\n"
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(compressed(suffix, mark + (b"id,n" + end if header else b"") + text))
    made = source(path, header=header, names=("id", "n"))
    [split] = made.discover()
    assert split.num_rows == 2
    assert rows(made, split) == AB
    assert rows(made, split, IntervalSet.of([(1, 2)])) == AB[1:]


@pytest.mark.parametrize("text", [b"id,n\n", b"id,n", b"\xef\xbb\xbfid,n\r\n", b"id,n\n\n\r\n"])
def test_a_header_alone_is_no_row(tmp_path, text):
    (tmp_path / "a.csv").write_bytes(text)
    made = source(tmp_path / "a.csv")
    [split] = made.discover()
    assert split.num_rows == 0
    assert rows(made, split) == []


@pytest.mark.parametrize("text", [b"", b"\xef\xbb\xbf", b"\n\r\n"])
def test_an_empty_file_has_no_rows_or_lacks_its_header(tmp_path, text):
    (tmp_path / "a.csv").write_bytes(text)
    made = source(tmp_path / "a.csv", **NAMED)
    assert [split.num_rows for split in made.discover()] == [0]
    assert rows(made) == []
    with pytest.raises(SchemaError, match=r"a\.csv: no header in its first line; the file is empty"):
        source(tmp_path / "a.csv").discover()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a,1\nb\n", r"line 3: 1 values, where 2 columns are expected"),
        (b"a,1\n\nb,2,\n", r"line 4: 3 values, where 2 columns are expected"),
        (b'a,1\n"b,2\nc,3\n', r"line 3: a quoted value begins in this row and never ends"),
        (b'a,1\n"b,2\n"c",3\n', r"line 3: text follows a closing quote in this row; close the quote that was left open"),
        (b'a,1\nb,"2\nc,"3"\n', r"line 3: text follows a closing quote"),
        (b'a,1\n"b"x"c",2\n', r"line 3: text follows a closing quote"),
    ],
)
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_rows_that_are_none_are_told_with_their_line(tmp_path, text, why, size, monkeypatch):
    monkeypatch.setattr(csv, "_BLOCK", size)
    (tmp_path / "a.csv").write_bytes(b"id,n\n" + text)
    with pytest.raises(DataError, match=r"a\.csv, " + why):
        source(tmp_path / "a.csv").discover()


def test_a_nul_stays_in_a_text_and_is_no_number(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,n\na\0b,1\n")
    assert rows(source(tmp_path / "a.csv")) == [{"id": "a\0b", "n": 1}]
    (tmp_path / "a.csv").write_bytes(b"id,n\na,1\nb,2\0\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3, column 'n': .*invalid value"):
        rows(source(tmp_path / "a.csv"))


def test_bytes_that_arent_utf8_matter_where_they_are_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff,1\n")
    made = source(tmp_path / "a.csv", types={"n": pa.int64()}, **NAMED)
    assert rows(made) == [{"n": 1}]
    with pytest.raises(DataError, match=r"a\.csv, line 1, column 'id': .*UTF8"):
        rows(source(tmp_path / "a.csv", **NAMED))
    (tmp_path / "a.csv").write_bytes("a,1\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"a\.csv, line [12]"):
        rows(source(tmp_path / "a.csv", **NAMED))
