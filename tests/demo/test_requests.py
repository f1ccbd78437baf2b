from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidemill.demo.playlog import REQUEST_SCHEMA
from tidemill.demo.requests import count_requests, least_in


def requests(sent_at: np.ndarray, status: np.ndarray | None = None) -> pa.Table:
    rows = [
        {
            "request": n,
            "event_time": 0.0,
            "sent_at": at,
            "latency_s": 0.01 * (n + 1),
            "status": 200 if status is None else status[n],
        }
        for n, at in enumerate(sent_at.tolist())
    ]
    return pa.Table.from_pylist(rows, REQUEST_SCHEMA)


def test_counts() -> None:
    counts = count_requests(requests(np.arange(10.0), np.array([200] * 8 + [503, 0])), (2.0, 8.0))
    assert (counts.total, counts.failed) == (10, 2)
    assert (counts.during_switch, counts.failed_during_switch) == (7, 1)
    assert counts.max_ms == pytest.approx(80.0)


def test_failed_requests_say_why() -> None:
    """The server's own words, for each status once: what a 503 meant was known to the players alone."""
    table = requests(np.arange(6.0), np.array([503, 200, 503, 0, 200, 200]))
    errors = pa.array(["503: not ready", None, "503: late", "no answer within 5 s", None, None])
    table = table.set_column(table.schema.get_field_index("error"), "error", errors)
    counts = count_requests(table, (2.5, 4.0))
    assert counts.reasons == (
        "2 status 503, first 0.0 s after the first request: 503: not ready",
        "1 without an answer, first 3.0 s after the first request, during the switch: no answer within 5 s",
    )
    assert counts.verdict == "; ".join(["3 of 6 requests failed", *counts.reasons])
    assert count_requests(requests(np.arange(2.0)), None).verdict is None


def test_without_a_switch_or_requests_there_is_nothing_to_tell() -> None:
    counts = count_requests(requests(np.empty(0)), None)
    assert (counts.total, counts.failed, counts.during_switch, counts.min_per_s, counts.p50_ms) == (0, 0, None, None, None)


def test_a_pause_is_seen_wherever_it_lies() -> None:
    steady = np.arange(0.0, 20.0, 0.05)
    paused = steady[(steady < 7.3) | (steady > 9.3)]
    assert least_in(steady, 5.0) in (99, 100)
    assert least_in(paused, 5.0) == pytest.approx(60, abs=2)
    assert least_in(paused, 1.0) == 0
    assert least_in(steady[:3], 5.0) is None
