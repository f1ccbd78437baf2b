from __future__ import annotations

from tidemill.contracts.progress import SplitState
from tidemill.data.progress import merge_states


def state(split: str, intervals: list[tuple[int, int]], time: float | None = None, kind: str = "kafka") -> SplitState:
    return SplitState(kind=kind, split=split, intervals=intervals, num_rows=None, fingerprint={"cluster": "c"}, max_event_time=time)


def test_intervals_are_united_and_the_largest_event_time_wins():
    first = [state("t:1", [(0, 5), (8, 9)], 10.0), state("t:0", [])]
    second = [state("t:1", [(5, 7)], 12.0), state("t:1", [(20, 21)], None, kind="other")]
    assert merge_states([first, second]) == [
        state("t:0", []),
        state("t:1", [(0, 7), (8, 9)], 12.0),
        state("t:1", [(20, 21)], None, kind="other"),
    ]


def test_nothing_merges_to_nothing():
    assert merge_states([]) == merge_states([[], []]) == []
