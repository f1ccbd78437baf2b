"""series.json: what the plots show, as a few hundred points each."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.contracts import layout
from tidemill.data.click_world import HOUR_S
from tidemill.demo.analysis import Findings, online_scores, timeline
from tidemill.demo.director import Director
from tidemill.demo.freshness import Freshness
from tidemill.demo.playlog import IMPRESSION_SCHEMA, IMPRESSIONS, REQUEST_SCHEMA, REQUESTS, ArrowTail
from tidemill.demo.quality import ScoredRows, auc, score_rows
from tidemill.lineage.records import run_records
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

_WINDOW_S = 3 * HOUR_S
_STEP_S = HOUR_S / 2
_MIN_ROWS = 500
"""Below so many rows the AUC of a window says little."""
_POINTS = 400
_CONFIRMED = "confirmed: first answer"


def series(director: Director, findings: Findings) -> dict[str, Any]:
    """Everything that a plot of this demo needs; times in Unix seconds, event times where the name says so."""
    root = open_storage(director.folder.root)
    story = director.story
    impressions = ArrowTail(director.folder.players / IMPRESSIONS, IMPRESSION_SCHEMA).read()
    requests = ArrowTail(director.folder.players / REQUESTS, REQUEST_SCHEMA).read()
    scored = _scored(director, root, impressions) if director.frozen.is_loaded else None
    moments = hand_over_moments(root, story.dates, timeline(story, root), requests)
    return {
        "auc": rolling_aucs(scored) if scored else [],
        "lineages": [sample for sample in director.state.samples if sample["event_time"] is not None],
        "requests": requests_by_second(requests),
        "freshness": _thinned(findings.freshness) if findings.freshness else {},
        "handover": moments,
        "kills": [{"at": at, "lineage": lineage} for at, lineage in story.kills],
        "started_at": director.state.started_at,
        "play_started_at": story.play_started_at,
        "play_starts_event_time": story.boundaries[0],
        "midnight_event_time": story.boundaries[1],
        "switch_event_time": _switch_event_time(moments, requests),
        "speed": director.plan.speed,
        "window_s": _WINDOW_S,
    }


def _scored(director: Director, root: Storage, impressions: pa.Table) -> ScoredRows | None:
    """Every random impression with its four scores; the trainer's from the lineage whose day it belongs to."""
    rows = impressions.filter(pc.equal(impressions["is_random"], 1))
    times, midnight = rows["event_time"], director.story.boundaries[1]
    parts = []
    for date, day in zip(director.story.dates, (pc.less(times, midnight), pc.greater_equal(times, midnight)), strict=True):
        mine, online = rows.filter(day), online_scores(root, layout.lineage(date), director.folder)
        if online is not None and mine.num_rows:
            parts.append(score_rows(mine, online, director.frozen.scores(mine)))
    if not parts:
        return None
    return ScoredRows(
        np.concatenate([part.event_times for part in parts]),
        np.concatenate([part.clicks for part in parts]),
        {name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores},
    )


def hand_over_moments(
    root: Storage, dates: tuple[str, str], known: list[dict[str, Any]], requests: pa.Table
) -> list[dict[str, Any]]:
    """The moments of a hand-over in their order: those that are known, the mark, and when the switch showed in an answer."""
    moments = list(known)
    prefix = layout.lineage(dates[0])
    for record in run_records(root, prefix=prefix):
        lines = root.read(f"{prefix}/{layout.run(record.run_id)}/{layout.EVENTS}").splitlines()
        marked = [orjson.loads(line)["at"] for line in lines if b'"handover.marked"' in line]
        moments += [{"moment": "caught up: mark set", "at": at} for at in marked]
    good = pc.and_(pc.equal(requests["lineage"], layout.lineage(dates[1])), pc.equal(requests["status"], 200))
    answered = requests.filter(pc.fill_null(good, False))
    if answered.num_rows:
        at = float(np.min(answered["sent_at"].to_numpy() + answered["latency_s"].to_numpy()))
        moments.append({"moment": _CONFIRMED, "at": at})
    return sorted(moments, key=lambda moment: moment["at"])


def _switch_event_time(moments: list[dict[str, Any]], requests: pa.Table) -> float | None:
    """Event time of the first answer that the successor gave; None if it gave none."""
    at = [moment["at"] for moment in moments if moment["moment"] == _CONFIRMED]
    if not at:
        return None
    order = np.argsort(requests["sent_at"].to_numpy())
    return float(np.interp(at[0], requests["sent_at"].to_numpy()[order], requests["event_time"].to_numpy()[order]))


def rolling_aucs(scored: ScoredRows) -> list[dict[str, float | int | None]]:
    """AUCs of the windows of three hours of event time that end every half hour; `event_time`: the middle of the window."""
    if not len(scored.event_times):
        return []
    order = np.argsort(scored.event_times, kind="stable")
    times, clicks = scored.event_times[order], scored.clicks[order]
    by_name = {name: scores[order] for name, scores in scored.scores.items()}
    points: list[dict[str, float | int | None]] = []
    for start in np.arange(times[0], times[-1] - _WINDOW_S + _STEP_S, _STEP_S):
        inside = slice(*np.searchsorted(times, (start, start + _WINDOW_S)))
        rows = inside.stop - inside.start
        if rows >= _MIN_ROWS:
            aucs = {name: auc(clicks[inside], scores[inside]) for name, scores in by_name.items()}
            points.append({"event_time": float(start + _WINDOW_S / 2), "rows": int(rows), **aucs})
    return points


def requests_by_second(requests: pa.Table) -> list[dict[str, float | int | None]]:
    """Each whole second's answers, failures and latencies. `at`: the second's begin; a request counts when it has ended."""
    good = requests["status"].to_numpy() == 200
    latency_ms = requests["latency_s"].to_numpy() * 1000
    seconds = np.floor(requests["sent_at"].to_numpy() + latency_ms / 1000).astype(np.int64)
    if not len(seconds):
        return []
    points: list[dict[str, float | int | None]] = []
    for second in range(int(seconds.min()), int(seconds.max())):
        inside = seconds == second
        answered = latency_ms[inside & good]
        p50, p99 = (float(q) for q in np.quantile(answered, (0.5, 0.99))) if len(answered) else (None, None)
        points.append(
            {"at": second, "answered": len(answered), "failed": int(np.sum(inside & ~good)), "p50_ms": p50, "p99_ms": p99}
        )
    return points


def _thinned(freshness: Freshness) -> dict[str, list[float]]:
    """Medians of so many consecutive events that a plot has some hundred points."""
    order = np.argsort(freshness.event_times, kind="stable")
    blocks = [block for block in np.array_split(order, min(_POINTS, max(1, len(order)))) if len(block)]
    return {
        "event_time": [float(np.median(freshness.event_times[block])) for block in blocks],
        "total_s": [float(np.median(freshness.total_s[block])) for block in blocks],
    }
