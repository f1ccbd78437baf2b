"""MaxCompute's text keys: how they look, and what reading them gives (B1, B2, B7, B8)."""

from __future__ import annotations

import json
import random

import pytest

from tidemill.contracts.positions import PositionKey, parse_key
from tidemill.contracts.progress import DataloaderState, SplitState
from tidemill.errors import CorruptError

PATH = "odps://prj/tables/clicks/ds=20240319&ds=20240318&ds=20240320"


def state(index: int, session: str, intervals: list[tuple[int, int]], rows: int = 100, path: str = PATH) -> SplitState:
    partition = path.rpartition("/")[2].split("&")[index]
    fingerprint = {"input_path": path, "sess_idx": index, "session": session, "rows": rows}
    return SplitState(
        kind="maxcompute", split=f"prj.clicks/{partition}", intervals=intervals, num_rows=rows, fingerprint=fingerprint
    )


def document(*splits: SplitState) -> DataloaderState:
    return DataloaderState(passes_completed=0, splits=list(splits), watermark=None)


def test_the_key_has_path_index_session_and_start():
    """B1, B8: segment by segment."""
    body = json.loads(document(state(2, "S2", [(0, 10), (50, 60)])).to_bytes())
    assert body["positions"] == {f"{PATH}#2#S2:0": 9, f"{PATH}#2#S2:50": 59}
    assert parse_key(f"{PATH}#2#S2:50") == PositionKey(input_path=PATH, sess_idx=2, session="S2", start=50)


def test_a_partition_without_rows_gets_no_key():
    """B3."""
    body = json.loads(document(state(0, "S0", [(0, 100)]), state(1, "S1", [], rows=0)).to_bytes())
    assert list(body["positions"]) == [f"{PATH}#0#S0:0"]
    assert [split["split"] for split in body["splits"]] == ["prj.clicks/ds=20240319", "prj.clicks/ds=20240318"]


def test_a_document_without_maxcompute_has_no_positions():
    kafka = SplitState(kind="kafka", split="clicks:0", intervals=[(0, 5)], fingerprint={})
    assert "positions" not in json.loads(document(kafka).to_bytes())


def test_reading_gives_what_was_written_in_any_order_of_keys_and_any_number_of_times():
    """B2: several ranges share a session; order doesn't matter; loading twice changes nothing."""
    written = document(state(0, "S0", [(0, 10), (20, 30), (40, 41)]), state(1, "S1", []), state(2, "S2", [(99, 100)]))
    body = json.loads(written.to_bytes())
    keys = list(body["positions"].items())
    random.Random(3).shuffle(keys)
    read = DataloaderState.parse(json.dumps({**body, "positions": dict(keys)}).encode(), where="x")
    assert read == written
    assert DataloaderState.parse(read.to_bytes(), where="x") == read


@pytest.mark.parametrize("key", ["__epochs_completed__", "__data_ts_watermark__", "clicks:0", "/d/*.parquet:0", "a#b"])
def test_reserved_keys_and_other_sources_keys_are_not_positions(key):
    """B7."""
    assert parse_key(key) is None
    body = json.loads(document(state(0, "S0", [(0, 10)])).to_bytes())
    body["positions"][key] = 2
    assert DataloaderState.parse(json.dumps(body).encode(), where="x") == document(state(0, "S0", [(0, 10)]))


def test_keys_without_a_split_become_splits_that_know_no_rows():
    """Keys by themselves: an older version's has no index."""
    body = json.loads(document().to_bytes())
    body["positions"] = {f"{PATH}#S9:0": 9, f"{PATH}#1#S8:10": 19}
    new, old = DataloaderState.parse(json.dumps(body).encode(), where="x").splits
    assert (old.fingerprint, old.intervals) == ({"input_path": PATH, "session": "S9"}, [(0, 10)])
    assert (new.fingerprint, new.intervals) == ({"input_path": PATH, "session": "S8", "sess_idx": 1}, [(10, 20)])
    assert old.num_rows is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{PATH}#0#S0:0": 8}, "prj.clicks/ds=20240319: positions say [[0, 9]], its intervals [[0, 10]]"),
        ({f"{PATH}#0#S0:0": "9"}, "'9' isn't a row at or after 0"),
        ({f"{PATH}#0#S0:0": True}, "True isn't a row at or after 0"),
        ({f"{PATH}#0#S0:5": 4}, "4 isn't a row at or after 5"),
    ],
)
def test_keys_that_contradict_the_document_are_refused(change, message):
    body = json.loads(document(state(0, "S0", [(0, 10)])).to_bytes())
    body["positions"] |= change
    with pytest.raises(CorruptError) as caught:
        DataloaderState.parse(json.dumps(body).encode(), where="model.ckpt-1/dataloader_state.json")
    assert message in str(caught.value)
    assert "model.ckpt-1/dataloader_state.json" in str(caught.value)
