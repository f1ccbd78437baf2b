"""Documents that processes share: canonical bytes, strict reading, foreign progress files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.contracts.base import Document
from tidemill.contracts.progress import DataloaderState, ProgressReport, SplitState, read_progress
from tidemill.errors import CorruptError


def test_equal_documents_have_equal_bytes_whatever_the_order_of_construction():
    a = ProgressReport(data_ts=1.5, step=3, metrics={"auc": 0.7, "ne": 0.9})
    b = ProgressReport(metrics={"ne": 0.9, "auc": 0.7}, step=3, data_ts=1.5)
    assert a.to_bytes() == b.to_bytes()
    assert a.digest() == b.digest()
    assert a.to_bytes().endswith(b"}\n")


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_a_document_reads_back_equal(watermark, name, intervals):
    split = SplitState(kind="kafka", split=name, intervals=intervals, fingerprint={"cluster": name})
    state = DataloaderState(passes_completed=0, splits=[split], watermark=watermark)
    assert DataloaderState.parse(state.to_bytes(), where="x") == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("schema"), "holds None"),
        (lambda body: body.update(schema="tidemill.release/1"), "not a 'tidemill.dataloader_state/1'"),
        (lambda body: body.update(schema="tidemill.dataloader_state/99"), "newer tidemill"),
        (lambda body: body.update(extra=1), "extra"),
        (lambda body: body.update(passes_completed="0"), "passes_completed"),
        (lambda body: body.pop("splits"), "splits"),
    ],
)
def test_what_is_not_the_document_is_refused_with_place_and_key(change, message):
    body = json.loads(DataloaderState(passes_completed=0, splits=[], watermark=None).to_bytes())
    change(body)
    with pytest.raises(CorruptError, match=message) as caught:
        DataloaderState.parse(json.dumps(body).encode(), where="folder/dataloader_state.json")
    assert "folder/dataloader_state.json" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff", b'{"schema": "tidemill.dataloader_state/1"'])
def test_torn_bytes_are_refused(data):
    with pytest.raises(CorruptError):
        DataloaderState.parse(data, where="x")


def test_an_old_version_is_upgraded_step_by_step():
    class Note(Document):
        schema_name = "note"
        schema_version = 3
        upgrades = {1: lambda body: {"words": body["text"]}, 2: lambda body: {"words": body["words"].split()}}  # noqa: RUF012
        words: list[str]

    assert Note.parse(b'{"schema": "tidemill.note/1", "text": "a b"}', where="x").words == ["a", "b"]


def test_a_file_with_data_ts_alone_is_progress():
    """A3: other keys are ours."""
    assert read_progress(b'{"data_ts": 1000.0}', where="x") == ProgressReport(data_ts=1000.0)
    assert read_progress(b'{"data_ts": 1000, "other": "key"}', where="x").data_ts == 1000.0


@pytest.mark.parametrize(
    "value", ["-1", "-1.0", "NaN", "Infinity", "-Infinity", "true", "false", '"12"', "null", "[]", "{}", "1" + "0" * 400, "1e400"]
)
def test_a_value_that_must_not_hand_over_is_refused(value):
    """A9: whatever the file holds, it is one kind of error."""
    with pytest.raises(CorruptError):
        read_progress(b'{"data_ts": %s}' % value.encode(), where="x")


def test_a_reader_of_our_progress_finds_data_ts():
    assert json.loads(ProgressReport(data_ts=12.5, heartbeat=1).to_bytes())["data_ts"] == 12.5
