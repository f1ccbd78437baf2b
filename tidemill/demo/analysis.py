"""From what a demo left behind to the figures of its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.contracts import layout
from tidemill.demo.director import Director, Story
from tidemill.demo.folder import DemoFolder
from tidemill.demo.freshness import Freshness, measure, read_swaps
from tidemill.demo.playlog import IMPRESSION_SCHEMA, IMPRESSIONS, REQUEST_SCHEMA, REQUESTS, ArrowTail, read_status
from tidemill.demo.quality import ScoredRows, score_rows, share_closed
from tidemill.demo.requests import RequestCounts, count_requests
from tidemill.demo.rows import RowsProof, prove_rows
from tidemill.demo.table import rows_between
from tidemill.errors import RetiredError
from tidemill.jobs.ledger import read_steps, surviving_steps
from tidemill.lineage.records import read_lineage, run_records
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

if TYPE_CHECKING:
    from tidemill.jobs.verify import Verification


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured; what could not be is None."""

    requests: RequestCounts
    scored: ScoredRows | None
    freshness: Freshness | None
    rows: RowsProof | None
    verification: Verification | None
    examples_per_s: float | None
    undelivered: int


def analyse(director: Director) -> Findings:
    """Measure a demo that has been played to its end, or as far as it came."""
    folder, story = director.folder, director.story
    root = open_storage(folder.root)
    impressions = ArrowTail(folder.players / IMPRESSIONS, IMPRESSION_SCHEMA).read()
    requests = ArrowTail(folder.players / REQUESTS, REQUEST_SCHEMA).read()
    complete = story.stream_exit_code is not None
    lineages = [layout.lineage(date) for date in story.dates]
    return Findings(
        requests=count_requests(requests, switch_of(story, root)),
        scored=_score(director, root, impressions) if director.frozen.is_loaded else None,
        freshness=measure(root, lineages, impressions, requests, read_swaps(str(folder.serving_events))) if complete else None,
        rows=_prove(root, folder, story, impressions) if complete else None,
        verification=_verify(str(folder.root / lineages[1])) if complete else None,
        examples_per_s=_examples_per_s(root, layout.daily(story.dates[0])),
        undelivered=read_status(folder.players).undelivered,
    )


def _verify(folder: str) -> Verification:
    # Imports PyTorch, which someone who stops a demo early shouldn't wait for.
    from tidemill.jobs.verify import verify

    return verify(folder)


def switch_of(story: Story, root: Storage) -> tuple[float, float] | None:
    """From the successor's first progress report to the predecessor's retired record; None if it didn't come to that."""
    record = read_lineage(root, prefix=layout.lineage(story.dates[0]))
    if story.first_progress_at is None or record is None or record.retired_at is None:
        return None
    return story.first_progress_at, record.retired_at


def _prove(root: Storage, folder: DemoFolder, story: Story, impressions: pa.Table) -> RowsProof:
    first, second = story.dates
    return prove_rows(root, (folder.table(first), folder.table(second)), story.boundaries, impressions)


def _score(director: Director, root: Storage, impressions: pa.Table) -> ScoredRows | None:
    """Day T's random impressions that the stream of day T-1 has trained, with all four scores."""
    story = director.story
    rows = rows_between(impressions, *story.boundaries)
    rows = rows.filter(pc.equal(rows["is_random"], 1))
    online = online_scores(root, layout.lineage(story.dates[0]), director.folder)
    if not rows.num_rows or online is None:
        return None
    return score_rows(rows, online, director.frozen.scores(rows))


def online_scores(root: Storage, lineage: str, folder: DemoFolder) -> pa.Table | None:
    """event_id and score of every row in a lineage's surviving steps: what the trainer thought of it before it learned from it."""
    from tidemill.training.observers import read_scores

    parts = []
    for steps in surviving_steps(read_steps(root, prefix=lineage)):
        scores = read_scores(folder.root / lineage / layout.run(steps.run_id) / layout.score_log(0))
        if scores is not None:
            inside = pc.and_(pc.greater_equal(scores["step"], steps.first), pc.less(scores["step"], steps.stop))
            parts.append(scores.filter(inside).select(["event_id", "score"]))
    return pa.concat_tables(parts).combine_chunks() if parts else None


def _examples_per_s(root: Storage, prefix: str) -> float | None:
    """Median over the daily job's reports."""
    rates = []
    for record in run_records(root, prefix=prefix):
        for line in root.read(f"{prefix}/{layout.run(record.run_id)}/{layout.EVENTS}").splitlines():
            event = orjson.loads(line)
            if event["event"] == "train.progress":
                rates.append(event["examples_per_s"])
    return float(np.median(rates)) if rates else None


def report(director: Director, findings: Findings, *, wall_s: float, error: str | None) -> dict[str, Any]:
    """report.json."""
    story, plan = director.story, director.plan
    root = open_storage(director.folder.root)
    scored, rows, checked = findings.scored, findings.rows, findings.verification
    aucs = scored.aucs() if scored else {}
    result = story.handover
    return {
        "ok": error is None and not failures(director, findings),
        "error": error,
        "failures": failures(director, findings),
        "requests": asdict(findings.requests),
        "auc": {
            **{name: aucs.get(name) for name in ("served", "online", "frozen", "best_possible")},
            "random_impressions": len(scored.clicks) if scored else 0,
        },
        "share_closed": share_closed(aucs.get("frozen"), aucs.get("online"), aucs.get("best_possible")),
        "freshness_s": findings.freshness.to_json() if findings.freshness else {"p50": None, "p99": None},
        "handover": {
            "retired": result.predecessor if result and result.retired else None,
            "successor": result.deployment.lineage if result else None,
            "lag_s": result.lag_s if result else None,
            "refuses_restart": story.restart_exit_code == RetiredError.exit_code,
            "restart_exit_code": story.restart_exit_code,
            "timeline": timeline(story, root),
        },
        "rows": {**(rows.to_json() if rows else {}), "undelivered": findings.undelivered},
        "verify": {
            "keys_compared": checked.keys_compared if checked else None,
            "keys_different": checked.keys_different if checked else None,
            "keys_excluded": checked.keys_excluded if checked else None,
            "dense_compared": checked.dense_compared if checked else None,
            "dense_different": checked.dense_different if checked else None,
        },
        "train": {"examples_per_s": findings.examples_per_s},
        "kills": [{"at_s": at - director.state.started_at, "lineage": lineage} for at, lineage in story.kills],
        "speed": plan.speed,
        "tolerance_s": plan.tolerance_s,
        "tolerance_wall_s": plan.tolerance_wall_s,
        "seed": director.seed,
        "wall_s": wall_s,
        "phases": [{"name": n, "begin_s": a - director.state.started_at, "wall_s": b - a} for n, a, b in story.phases],
    }


def failures(director: Director, findings: Findings) -> list[str]:
    """Why a demo that came to its end isn't good; empty if it is."""
    found = []
    story, requests, rows, checked = director.story, findings.requests, findings.rows, findings.verification
    if story.stream_exit_code is None:
        found.append("it was not played to its end")
        return found
    if requests.verdict is not None:
        found.append(requests.verdict)
    if findings.undelivered:
        found.append(f"{findings.undelivered} impressions were not acknowledged by the broker")
    if rows is None or not rows.is_clean:
        found.append(f"rows were lost or doubled: {rows.to_json() if rows else 'unknown'}")
    if checked is None or not checked.is_equal or not checked.keys_compared:
        found.append(f"served rows differ from the trainer's: {checked.differences if checked else 'unknown'}")
    if story.restart_exit_code != RetiredError.exit_code:
        found.append(
            f"the retired lineage ended with {story.restart_exit_code} when it was started again, not {RetiredError.exit_code}"
        )
    aucs = findings.scored.aucs() if findings.scored else {}
    if share_closed(aucs.get("frozen"), aucs.get("online"), aucs.get("best_possible")) is None:
        found.append("which share of the distance the online model closes can't be told")
    return found


def timeline(story: Story, root: Storage) -> list[dict[str, Any]]:
    """The hand-over's moments, in wall time."""
    moments: list[tuple[str, float | None]] = [("midnight", _midnight_at(story))]
    second = story.dates[1]
    daily = [record for record in run_records(root, prefix=layout.daily(second)) if record.status == "completed"]
    streams = run_records(root, prefix=layout.lineage(second))
    retired = read_lineage(root, prefix=layout.lineage(story.dates[0]))
    moments += [
        ("daily job started", daily[0].started_at if daily else None),
        ("daily job completed", daily[0].ended_at if daily else None),
        ("successor started", streams[0].started_at if streams else None),
        ("successor's first progress", story.first_progress_at),
        ("serving switched", story.switched_at if story.handover else None),
        ("predecessor retired", retired.retired_at if retired else None),
    ]
    return [{"moment": name, "at": at} for name, at in moments if at is not None]


def _midnight_at(story: Story) -> float | None:
    ends = [end for name, _, end in story.phases if name.startswith("day T (") and "learns" in name]
    return ends[0] if ends else None
