"""What becomes of each saved position: B2 to B7, offline, as pure functions of state and config."""

from __future__ import annotations

import random

import pytest

from tidemill.config.odps_uri import parse_odps_paths
from tidemill.contracts.positions import parse_key
from tidemill.contracts.progress import DataloaderState, SplitState
from tidemill.data.sources.maxcompute.resume import Decision, Place, decide, places
from tidemill.errors import SourceChangedError

BASE = "odps://prj/tables/clicks"
PATH = f"{BASE}/ds=19&ds=18&ds=20"
ROWS = 100


def now(address: str, ordered: bool = True) -> list[Place]:
    return places(parse_odps_paths(address), ordered=ordered)


def saved(place: Place, session: str, *intervals: tuple[int, int], rows: int | None = ROWS) -> SplitState:
    fingerprint = {"input_path": place.path.text, "sess_idx": place.index, "session": session, "rows": rows}
    return SplitState(kind="maxcompute", split=place.name, intervals=list(intervals), num_rows=rows, fingerprint=fingerprint)


def key_only(text: str) -> list[SplitState]:
    """A state file that holds nothing but a key."""
    assert parse_key(text)
    body = DataloaderState(passes_completed=0, splits=[], watermark=None).to_bytes()
    data = body.replace(b'"passes_completed"', b'"positions": {"' + text.encode() + b'": 9}, "passes_completed"')
    return DataloaderState.parse(data, where="x").splits


def kept(decision: Decision) -> dict[str, str]:
    return {place.name: state.fingerprint["session"] for place, state in decision.kept.items()}


def refusal(states: list[SplitState], address: str, ordered: bool = True) -> str:
    with pytest.raises(SourceChangedError) as caught:
        decide(states, now(address, ordered))
    return str(caught.value)


def test_an_index_is_a_place_in_the_path_as_written():
    """B1."""
    assert [(place.index, place.partitions) for place in now(PATH)] == [(0, ("ds=19",)), (1, ("ds=18",)), (2, ("ds=20",))]
    assert [(place.index, place.partitions) for place in now(PATH, ordered=False)] == [(0, ("ds=19", "ds=18", "ds=20"))]
    assert [(place.index, place.partitions) for place in now(BASE)] == [(0, ())]


def test_each_session_goes_back_to_its_own_index_in_any_order_of_states():
    """DCL 9.13. B2, B3: the empty partition has no position, and keeps its place."""
    first, _, third = now(PATH)
    states = [saved(third, "S2", (0, 7), (50, 60)), saved(first, "S0", (0, ROWS))]
    for _ in range(4):
        random.Random(1).shuffle(states)
        decision = decide(states, now(PATH))
        assert {place.index: state.fingerprint["session"] for place, state in decision.kept.items()} == {0: "S0", 2: "S2"}
        assert decision.notes == ()


def test_an_untouched_partition_takes_a_fresh_session():
    """B2."""
    states = [saved(place, f"S{place.index}") for place in now(PATH)]
    assert decide(states, now(PATH)).kept == {}


def test_two_sessions_at_one_index_are_an_error():
    """B2."""
    first = now(PATH)[0]
    states = [saved(first, "S0", (0, 9)), *key_only(f"{PATH}#0#S9:9")]
    assert "two sessions, S0 and S9, at one index" in refusal(states, PATH)


def test_an_older_versions_key_of_an_own_table_is_refused():
    """B4: without an index nobody can say which partition it is of."""
    message = refusal(key_only(f"{PATH}#S0:0"), PATH)
    assert f"{PATH}#S0: was written by an older version, without the partition's index" in message
    assert "restart from scratch" in message


@pytest.mark.parametrize("key", ["odps://prj/tables/other/ds=1#0#S:0", "odps://prj/tables/other/ds=1#S:0", "/data/a#b.parquet:0"])
def test_positions_of_other_tables_and_files_are_skipped_with_a_warning(key):
    """B4, B9: a checkpoint to fine-tune from may have been trained on anything."""
    decision = decide(key_only(key), now(PATH))
    assert decision.kept == {}
    (note,) = decision.notes
    assert key.rpartition(":")[0] in note


def test_positions_of_other_kinds_of_source_are_nothing_to_a_table():
    kafka = SplitState(kind="kafka", split="clicks:0", intervals=[(0, 9)], fingerprint={})
    assert decide([kafka], now(PATH)) == Decision({}, ())


def test_the_same_table_name_in_another_project_or_schema_is_another_table():
    states = [
        saved(now("odps://prj/tables/dw.clicks/ds=19")[0], "A", (0, 5)),
        saved(now("odps://b/tables/clicks/ds=19")[0], "B", (0, 5)),
    ]
    assert decide(states, now(PATH)).kept == {}
    both = now("odps://b/tables/clicks/ds=19,odps://prj/tables/dw.clicks/ds=19")
    assert kept(decide(states, both)) == {"b.clicks/ds=19": "B", "prj.dw.clicks/ds=19": "A"}


def test_an_index_beyond_the_sessions_of_now_is_an_error():
    """DCL 9.13. B4: is_orderby_partition was switched off."""
    message = refusal([saved(now(PATH)[2], "S2", (0, 9))], PATH, ordered=False)
    assert f"{PATH}#2: this path has 1 session(s) now; is_orderby_partition was true" in message


@pytest.mark.parametrize("rows", [(0, 9), (0, ROWS)])
def test_switching_the_order_is_refused_at_index_0_too(rows):
    """B4: the index alone wouldn't tell."""
    assert "splits them up otherwise" in refusal([saved(now(PATH)[0], "S0", rows)], PATH, ordered=False)
    assert "splits them up otherwise" in refusal([saved(now(PATH, ordered=False)[0], "S0", rows)], PATH, ordered=True)


def test_a_position_that_knows_no_rows_is_refused():
    """A key by itself doesn't tell whether its session was read to its end (B4)."""
    assert "doesn't say how many rows" in refusal(key_only(f"{PATH}#1#S1:0"), PATH)


def test_a_finished_partition_is_skipped_and_a_new_one_read():
    """B6, in order: yesterday's list and today's overlap."""
    states = [saved(place, f"S{place.index}", (0, ROWS)) for place in now(PATH)]
    assert kept(decide(states, now(f"{BASE}/ds=20&ds=21"))) == {"prj.clicks/ds=20": "S2"}
    assert decide(states, now(f"{BASE}/ds=21&ds=22")).kept == {}


def test_a_half_read_partition_goes_on_wherever_it_stands_now():
    """B6: the list was reordered and has grown; the spec decides, not the index."""
    states = [saved(now(PATH)[0], "S0", (0, ROWS)), saved(now(PATH)[2], "S2", (0, 7))]
    decision = decide(states, now(f"{BASE}/ds=21&ds=20&ds=19"))
    assert {place.index: state.fingerprint["session"] for place, state in decision.kept.items()} == {1: "S2", 2: "S0"}


def test_a_half_read_partition_that_has_gone_is_an_error():
    """B6."""
    message = refusal([saved(now(PATH)[2], "S2", (0, 7))], f"{BASE}/ds=21")
    assert "prj.clicks/ds=20 was read in part (7 of 100 rows), and the input path doesn't name it any more; put it back" in message


def test_one_session_over_all_partitions_starts_afresh_on_disjoint_ones():
    """B6, without order."""
    done = saved(now(PATH, ordered=False)[0], "S", (0, ROWS))
    assert decide([done], now(f"{BASE}/ds=21&ds=22", ordered=False)).kept == {}


@pytest.mark.parametrize("rows", [(0, 9), (0, ROWS)])
def test_one_session_over_all_partitions_refuses_other_lists_and_shows_the_difference(rows):
    """B6, without order: some read, some new."""
    message = refusal([saved(now(PATH, ordered=False)[0], "S", rows)], f"{BASE}/ds=20&ds=21", ordered=False)
    assert "(no longer named: ds=18, ds=19; new: ds=21)" in message


def test_a_half_read_session_over_all_partitions_refuses_disjoint_lists():
    """B6, without order."""
    message = refusal([saved(now(PATH, ordered=False)[0], "S", (0, 9))], f"{BASE}/ds=21", ordered=False)
    assert "(no longer named: ds=18, ds=19, ds=20; new: ds=21)" in message


def test_the_same_partitions_in_another_wording_are_the_same_session():
    state = saved(now(f"{BASE}/ds=1/hr=2&ds=1/hr=3", ordered=False)[0], "S", (0, 9))
    (place,) = decide([state], now(f"{BASE}/hr=3/ds=1&ds=1/hr=2", ordered=False)).kept
    assert place.index == 0


def test_the_same_table_in_another_wording_goes_on_and_isnt_read_again():
    state = saved(now(f"{BASE}/ds=19")[0], "S", (0, 9))
    (place,) = decide([state], now("odps://PRJ/tables/default.Clicks/DS=19&ds=20")).kept
    assert place.partitions == ("DS=19",)


@pytest.mark.parametrize("address", [f"{BASE}/ds=19", BASE])
def test_a_whole_table_and_its_partitions_overlap(address):
    whole, part = now(BASE)[0], now(f"{BASE}/ds=19")[0]
    state = saved(whole, "S", (0, ROWS)) if address != BASE else saved(part, "S", (0, ROWS))
    assert "names other partitions" in refusal([state], address)
