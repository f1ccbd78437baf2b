"""What can't be used (DCL 9.9): counted, kept, skipped within a budget; and batches of which some rows can't be transformed."""

import base64
import json
import resource
import threading
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import logs
from tidemill.clock import ManualClock
from tidemill.config.data import FolderConfig
from tidemill.data.assignment import assign
from tidemill.data.dead_letters import DeadLetter, DeadLetterFile, DeadLetters, DeadLetterSink
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.progress import Progress
from tidemill.data.salvage import bad_rows, without_rows
from tidemill.data.shuffle import Shuffle
from tidemill.data.sources.folder import FolderSource
from tidemill.data.split import Provenance, Run, SplitId
from tidemill.errors import DataError, SchemaError, StorageError
from tidemill.testing.scripted_source import Eof, Rows, ScriptedSource


class Kept(DeadLetterSink):
    where = "a list"

    def __init__(self):
        self.letters = []

    def keep(self, letters):
        self.letters.extend(letters)


def letter(offset, row=None, **more):
    place = {"topic": "clicks", "partition": 0, "offset": offset, "row": row}
    return DeadLetter(place, more.pop("reason", "it is garbage"), **more)


def test_budget_names_the_first_and_where_they_are():
    letters = DeadLetters(max_poison=2, window=1000, sink=(kept := Kept()))
    letters.passed(10)
    letters.add([letter(3), letter(5, row=1)])
    with pytest.raises(DataError) as caught:
        letters.add([letter(7)])
    text = str(caught.value)
    assert "3 messages or rows among the last 10 can't be used, and max_poison allows 2" in text
    assert "topic clicks, partition 0, offset 3: it is garbage; topic clicks, partition 0, offset 5, row 1: it is garbage;" in text
    assert "a list" in text
    # Also the one too many is kept.
    assert [kept.place["offset"] for kept in kept.letters] == [3, 5, 7]
    assert letters.count == 3


def test_budget_is_of_the_last_rows():
    letters = DeadLetters(max_poison=1, window=100)
    for number in range(20):
        letters.passed(100)
        letters.add([letter(number)])
    letters.passed(99)
    with pytest.raises(DataError, match="offset 19"):
        letters.add([letter(20)])


def test_no_budget_at_all():
    with pytest.raises(DataError, match="max_poison allows 0"):
        DeadLetters(max_poison=0, window=100).add([letter(1)])


def test_what_comes_again_counts_once():
    letters = DeadLetters(max_poison=1, window=100, sink=(kept := Kept()))
    for _ in range(3):
        letters.add([letter(1)])
    assert letters.count == len(kept.letters) == 1


def test_one_column_for_all_is_a_schema_error():
    letters = DeadLetters(max_poison=1, window=100)
    with pytest.raises(SchemaError, match="column 'n' holds"):
        letters.add([letter(offset, reason="column 'n' holds 'x', not int64", column="n") for offset in (1, 2)])
    other = DeadLetters(max_poison=1, window=100)
    with pytest.raises(DataError) as caught:
        other.add([letter(1, column="n"), letter(2)])
    assert type(caught.value) is DataError


def restarted(letters, **budget):
    """The next process: it knows what a checkpoint holds, as JSON, and no more."""
    following = DeadLetters(**budget)
    following.load_state([json.loads(json.dumps(letters.state()))])
    return following


def test_a_restart_is_no_new_budget():
    """A job that starts again every minute, with two letters each time."""
    budget = {"max_poison": 5, "window": 1000}
    letters = DeadLetters(**budget)
    for life in range(2):
        letters.passed(50)
        letters.add([letter(10 * life), letter(10 * life + 1, row=2, column="n")])
        letters = restarted(letters, **budget)
        assert letters.count == 0
    letters.passed(50)
    with pytest.raises(DataError) as caught:
        letters.add([letter(20), letter(21)])
    text = str(caught.value)
    assert "6 messages or rows among the last 100 can't be used, and max_poison allows 5" in text
    assert "topic clicks, partition 0, offset 0: it is garbage" in text


def test_what_is_met_again_by_a_restart_is_kept_again_but_counts_once():
    """It was read ahead of the checkpoint. The next run's file has it too."""
    budget = {"max_poison": 2, "window": 1000}
    letters = DeadLetters(**budget)
    letters.add([letter(1), letter(2)])
    kept = Kept()
    again = restarted(letters, **budget, sink=kept)
    again.add([letter(1), letter(2)])
    assert again.count == len(kept.letters) == 2
    with pytest.raises(DataError, match="max_poison allows 2"):
        again.add([letter(3)])


def test_a_restart_forgets_what_lies_before_the_window():
    letters = DeadLetters(max_poison=1, window=100)
    letters.add([letter(1)])
    letters.passed(60)
    letters = restarted(letters, max_poison=1, window=100)
    letters.passed(41)
    letters.add([letter(2)])
    with pytest.raises(DataError, match=r"the first: topic clicks, partition 0, offset 2"):
        letters.add([letter(3)])


def test_a_flood_is_a_warning_a_minute_for_each_kind_with_its_number(caplog):
    clock = ManualClock()
    letters = DeadLetters(max_poison=1000, window=1000, clock=clock)
    for number in range(50):
        letters.add([letter(number, reason=f"column 'n' holds '{number}'")])
    letters.add([letter(100, reason="it is a tombstone")])
    assert [record.getMessage() for record in caplog.records] == [
        "skipped, can't be used: topic clicks, partition 0, offset 0: column 'n' holds '0'",
        "skipped, can't be used: topic clicks, partition 0, offset 100: it is a tombstone",
    ]
    caplog.clear()
    clock.advance(61.0)
    letters.add([letter(101, reason="column 'n' holds 'x'")])
    letters.add([letter(102, reason="column 'n' holds 'y'")])
    letters.close()
    letters.close()
    assert [record.getMessage() for record in caplog.records] == [
        "skipped, can't be used: topic clicks, partition 0, offset 101: column 'n' holds 'x' (and 49 more like the one before)",
        "skipped, can't be used: 1 more like: topic clicks, partition 0, offset 101: column 'n' holds 'x'",
    ]


def test_a_checkpoint_waits_for_no_sink():
    """Where dead letters are kept may be away for minutes; whoever saves the budget mustn't wait for that."""
    began, end = threading.Event(), threading.Event()

    class Slow(Kept):
        def keep(self, letters):
            began.set()
            assert end.wait(60)

    letters = DeadLetters(max_poison=9, window=100, sink=Slow())
    adding = threading.Thread(target=letters.add, args=([letter(1)],))
    adding.start()
    try:
        assert began.wait(60)
        assert letters.state() == {"recent": []}
    finally:
        end.set()
        adding.join()
    assert [entry[:2] for entry in letters.state()["recent"]] == [[0, letter(1).place]]


def test_file(tmp_path):
    path = tmp_path / "runs" / "dead.jsonl"
    sink = DeadLetterFile(path, max_bytes=10_000, max_payload_bytes=8)
    assert not path.exists()
    long = letter(6, row=4, values={"text": "x" * 9})
    sink.keep([letter(3, payload=b"\xff\n"), letter(4), letter(5, payload=b"0123456789"), letter(6, row=2, values={"n": 1}), long])
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert all(line["topic"] == "clicks" and line["partition"] == 0 and line["at"] > 0 for line in lines)
    assert [(line["offset"], line["row"], line["truncated"]) for line in lines] == [
        (3, None, False),
        (4, None, False),
        (5, None, True),
        (6, 2, False),
        (6, 4, True),
    ]
    assert base64.b64decode(lines[0]["payload_base64"]) == b"\xff\n"
    assert (lines[1]["payload_base64"], lines[1]["payload_bytes"]) == (None, None)
    assert (base64.b64decode(lines[2]["payload_base64"]), lines[2]["payload_bytes"]) == (b"01234567", 10)
    assert lines[3]["values"] == {"n": 1}
    assert lines[4]["values"] is None


def test_file_is_bounded(tmp_path, caplog):
    path = tmp_path / "dead.jsonl"
    with caplog.at_level("WARNING", "tidemill"):
        for offset in range(100):
            DeadLetterFile(path, max_bytes=1000, max_payload_bytes=100).keep([letter(offset, payload=b"x")])
    assert 500 < path.stat().st_size <= 1000
    assert [json.loads(line)["offset"] for line in path.read_bytes().splitlines()] == list(
        range(len(path.read_bytes().splitlines()))
    )
    assert "aren't kept" in caplog.messages[0]


def test_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="dead letters can't be kept"):
        DeadLetterFile(tmp_path / "file" / "dead.jsonl", max_bytes=1000, max_payload_bytes=100).keep([letter(1)])


def test_a_file_that_takes_only_part_of_a_line_is_an_error(tmp_path):
    """As when a disk is full: the system writes what fits, and says nothing."""
    file = DeadLetterFile(tmp_path / "dead.jsonl", max_bytes=10_000, max_payload_bytes=100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(StorageError, match="No space left"):
            file.keep([letter(0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events(tmp_path):
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        DeadLetters(max_poison=9, window=100).add([letter(3, row=1, column="n")])
    finally:
        logs.send_events_to(None)
        sink.close()
    event = json.loads((tmp_path / "events.jsonl").read_text())
    del event["at"]
    expected = {"event": "source.poison", "topic": "clicks", "partition": 0, "offset": 3, "row": 1}
    assert event == {**expected, "why": "it is garbage", "column": "n"}


def refuse(bad):
    """A transform that fails for tables that hold any of those numbers."""

    def transform(table, size=None):
        numbers = table.column("n").to_pylist()
        for row, number in enumerate(numbers):
            if number in bad:
                raise DataError(f"column 'n', row {row}: {number} is bad")
        return numbers

    return transform


@given(st.sets(st.integers(0, 40)), st.integers(1, 40))
def test_bad_rows_are_found(bad, count):
    table = pa.table({"n": range(count)})
    expected = [number for number in sorted(bad) if number < count]
    if expected:
        with pytest.raises(DataError) as caught:
            refuse(bad)(table)
        found = list(bad_rows(table, refuse(bad), caught.value))
        assert found == [(number, f"column 'n': {number} is bad") for number in expected]


def test_what_no_row_is_at_fault_for_is_raised():
    def together(table):
        if table.num_rows > 2:
            raise DataError("too many")

    with pytest.raises(DataError, match="too many"):
        list(bad_rows(pa.table({"n": range(8)}), together, DataError("too many")))
    with pytest.raises(SchemaError):
        list(bad_rows(pa.table({"n": range(8)}), refuse({1}), SchemaError("no such column")))


def test_positions_without_rows_stay_covered():
    split = SplitId("kafka", "clicks:0")
    runs = (Run(split, 0, 4 << 20, 4, 1 << 20, 0, 9.0), Run(split, 4 << 20, 5 << 20, 2, 1, 0, 5.0))
    times = np.array([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    table = pa.table({"n": range(6)})
    kept, provenance = without_rows(table, Provenance(runs, 6, 1.0, event_time=times), [0, 2, 5])
    assert kept.column("n").to_pylist() == [1, 3, 4]
    assert [provenance.locate(row)[1] for row in range(3)] == [1 << 20, 3 << 20, 4 << 20]
    assert (provenance.runs[0].start, provenance.runs[-1].stop) == (0, 5 << 20)
    assert max(run.event_time for run in provenance.runs if run.rows) == 4.0


def load(source, letters, transform, **options):
    splits = source.discover()
    loader = Loader(source, assign(splits, {}, 1, 0), batch_size=4, transform=transform, dead_letters=letters, **options)
    progress, rows = Progress(), []
    try:
        while True:
            delivery = loader.take(5.0)
            assert delivery is not None
            assert delivery.provenance.num_rows == len(delivery.payload) > 0
            progress.advance(delivery.provenance)
            rows.extend(delivery.payload)
    except EOFError:
        progress.advance(loader.take_covered())
        return rows, progress, loader.counts
    finally:
        loader.close()


def script(count, *, step=3):
    table = pa.table({"n": range(count)})
    return [Rows(table.slice(at, step), event_time=[1.0 + at] * table.slice(at, step).num_rows) for at in range(0, count, step)]


@given(bad=st.sets(st.integers(0, 30)), count=st.integers(1, 30), threads=st.integers(1, 3), bounded=st.booleans())
def test_loader_drops_bad_rows_and_covers_their_positions(bad, count, threads, bounded):
    """Whole batches of them too, also at the very end."""
    source = ScriptedSource({"a": [*script(count), Eof()]}, bounded=bounded)
    letters = DeadLetters(max_poison=100, window=100, sink=(kept := Kept()))
    rows, progress, counts = load(source, letters, refuse(bad), threads=threads)
    assert rows == [number for number in range(count) if number not in bad]
    found = sorted((letter.place["row"], letter.values["n"], letter.reason) for letter in kept.letters)
    assert found == [(number, number, f"column 'n': {number} is bad") for number in sorted(bad) if number < count]
    assert counts.poison == len(found)
    assert progress.done[SplitId("scripted", "a")].intervals == ((0, count),)


def test_loader_over_budget_fails_after_what_was_good():
    source = ScriptedSource({"a": script(12)})
    letters = DeadLetters(max_poison=2, window=100, sink=Kept())
    loader = Loader(source, assign(source.discover(), {}, 1, 0), batch_size=4, transform=refuse({4, 5, 6}), dead_letters=letters)
    try:
        assert loader.take(5.0).payload == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(DataError, match="split a, row 4: column 'n': 4 is bad; split a, row 5"):
                loader.take(5.0)
    finally:
        loader.close()


@pytest.mark.parametrize("letters", [None, DeadLetters(max_poison=9, window=9)])
def test_loader_with_a_wrong_schema_fails_at_once(letters):
    def transform(table, size):
        raise SchemaError("no")

    with pytest.raises(SchemaError, match=r"^no$"):
        load(ScriptedSource({"a": script(5)}), letters, transform)


@pytest.mark.parametrize("shuffle", [None, Shuffle(seed=1, pass_number=0, block_rows=16)])
def test_loader_without_dead_letters_names_the_place_of_the_row_at_fault(shuffle):
    """B: bad input gets an error that names its row, also out of a shuffled batch, whose own numbers say nothing."""
    source = ScriptedSource({"a": script(9), "b": [Rows(pa.table({"n": [9, 10, 11]}), event_time=[1.0, 1.0, 1.0])]})
    with pytest.raises(DataError, match=r"^split b, row 1: column 'n': 10 is bad$"):
        load(source, None, refuse({10}), reading=ReadPlan(shuffle=shuffle))


def test_rows_of_a_folder_are_named_by_file(tmp_path):
    pq.write_table(pa.table({"n": [0, 1, 2]}), tmp_path / "a.parquet")
    letters = DeadLetters(max_poison=9, window=9, sink=(kept := Kept()))
    config = FolderConfig(num_splits=1, poll_s=0.01)
    source = FolderSource(config, str(tmp_path), {"n": pa.int64()}, dead_letters=letters)
    assigned = assign(source.discover(), {}, 1, 0)
    with closing(Loader(source, assigned, batch_size=3, transform=refuse({1}), dead_letters=letters)) as loader:
        assert loader.take(10.0).payload == [0, 2]
    (letter,) = kept.letters
    assert (letter.place["file"], letter.place["row"], letter.values) == ("a.parquet", 1, {"n": 1})
    with pytest.raises(DataError, match="10 messages or rows among the last 3 can't be used"):
        letters.add([DeadLetter({"row": number}, "no") for number in range(9)])


def test_letters_from_several_threads():
    letters = DeadLetters(max_poison=1000, window=1000, sink=(kept := Kept()))

    def work(first):
        for number in range(first, first + 100):
            letters.passed(1)
            letters.add([letter(number)])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert letters.count == len(kept.letters) == 400
