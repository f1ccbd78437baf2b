"""What a replay of MovieLens-100k measured: online against frozen, block by block, and with what certainty."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.contracts import layout
from tidemill.demo.analysis import online_scores
from tidemill.demo.freshness import Freshness, measure, read_swaps
from tidemill.demo.movielens import SCHEMA, TERMS
from tidemill.demo.movielens_director import HandOver, MovieLensDirector
from tidemill.demo.playlog import IMPRESSIONS, REQUEST_SCHEMA, REQUESTS, ArrowTail, impression_schema, read_status
from tidemill.demo.quality import auc
from tidemill.demo.requests import RequestCounts, count_requests
from tidemill.demo.rows import RowCounts
from tidemill.demo.series import requests_by_second
from tidemill.jobs.verify import Verification, verify
from tidemill.lineage.records import read_lineage
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

_RESAMPLES = 1000
_NO_SCORES = pa.table({"event_id": pa.array([], pa.string()), "score": pa.array([], pa.float32())})


@dataclass(frozen=True, slots=True)
class ScoredBlock:
    """A block's rows that its stream has trained, with their scores; one element a row. `served`: None if a row has no answer."""

    number: int
    users: np.ndarray
    labels: np.ndarray
    online: np.ndarray
    frozen: np.ndarray
    served: np.ndarray | None

    def to_json(self) -> dict[str, Any]:
        return {
            "block": self.number,
            "rows": len(self.labels),
            "users": len(np.unique(self.users)),
            "auc_online": auc(self.labels, self.online),
            "auc_frozen": auc(self.labels, self.frozen),
            "auc_served": None if self.served is None else auc(self.labels, self.served),
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured; what could not be is empty or None."""

    blocks: list[ScoredBlock]
    rows: RowCounts
    requests: RequestCounts
    during_switches: list[int]
    """Requests during each hand-over; 0 when it came after the players had played everything."""
    freshness: Freshness | None
    verification: Verification | None
    undelivered: int


def analyse(director: MovieLensDirector) -> Findings:
    """Measure a replay that came to its end, or as far as it came."""
    folder, root = director.folder, open_storage(director.folder.root)
    impressions = ArrowTail(folder.players / IMPRESSIONS, impression_schema(SCHEMA)).read()
    requests = ArrowTail(folder.players / REQUESTS, REQUEST_SCHEMA).read()
    complete = director.stream_exit_code is not None
    blocks, counts = [], RowCounts(0, 0, 0, 0)
    for number in range(2, director.blocks.count + 1) if complete else ():
        online = online_scores(root, layout.lineage(director.dates[number - 2]), folder)
        blocks.append(_scored(director, number, online, impressions))
        counts += _count(director.blocks.block(number)["event_id"], online)
    streams = [layout.lineage(date) for date in director.dates[:-1]]
    switches = [switch for hand_over in director.hand_overs if (switch := _switch(root, hand_over))]
    sent = requests["sent_at"].to_numpy()
    return Findings(
        blocks=blocks,
        rows=counts,
        requests=count_requests(requests, None),
        during_switches=[int(np.sum((sent >= begin) & (sent <= end))) for begin, end in switches],
        freshness=measure(root, streams, impressions, requests, read_swaps(str(folder.serving_events))) if complete else None,
        verification=verify(str(folder.root / streams[-1])) if complete else None,
        undelivered=read_status(folder.players).undelivered,
    )


def _switch(root: Storage, hand_over: HandOver) -> tuple[float, float] | None:
    """From the successor's first progress report to the predecessor's retired record."""
    predecessor = hand_over.result.predecessor
    record = read_lineage(root, prefix=predecessor) if predecessor else None
    if record is None or record.retired_at is None or hand_over.first_progress_at is None:
        return None
    return hand_over.first_progress_at, record.retired_at


def _scored(director: MovieLensDirector, number: int, online: pa.Table | None, impressions: pa.Table) -> ScoredBlock:
    """A block's rows by the stream that learned from it, by the snapshot before it, and as served."""
    frozen = director.frozen(number - 1)
    frozen.load()
    rows = director.blocks.block(number)
    trained = (
        online if online is not None else pa.table({"event_id": pa.array([], pa.string()), "score": pa.array([], pa.float32())})
    )
    place = pc.index_in(rows["event_id"], trained["event_id"].combine_chunks())
    rows = rows.filter(pc.is_valid(place))
    served = pc.index_in(rows["event_id"], impressions["event_id"].combine_chunks())
    return ScoredBlock(
        number,
        rows["user_id"].to_numpy(),
        rows["click"].to_numpy(),
        trained["score"].to_numpy()[place.drop_null().to_numpy()],
        frozen.scores(rows),
        None if served.null_count else impressions["served_score"].to_numpy()[served.to_numpy()],
    )


def _count(event_ids: pa.ChunkedArray, online: pa.Table | None) -> RowCounts:
    """How often the stream's surviving steps hold each of a block's rows."""
    ids = [] if online is None else online["event_id"].filter(pc.is_in(online["event_id"], event_ids.combine_chunks())).to_pylist()
    times = np.unique(ids, return_counts=True)[1]
    once = int(np.sum(times == 1))
    return RowCounts(len(event_ids), once, len(event_ids) - len(times), len(times) - once)


def mean_aucs(blocks: list[ScoredBlock]) -> dict[str, float | None]:
    """Means over the blocks, weighted by their rows: scores of different models are never ranked against each other."""
    figures = [block.to_json() for block in blocks]
    means: dict[str, float | None] = {}
    for name in ("auc_online", "auc_frozen", "auc_served"):
        known = [figure for figure in figures if figure[name] is not None]
        means[name] = float(np.average([f[name] for f in known], weights=[f["rows"] for f in known])) if known else None
    return means


def interval(blocks: list[ScoredBlock], seed: int, resamples: int = _RESAMPLES) -> tuple[float, float] | None:
    """95 % bootstrap interval of online minus frozen, as `mean_aucs` takes them; None without blocks.

    Users are drawn with replacement, each with all rows, since one user's ratings come in one sitting and hang together; blocks
    would be too few to draw from.
    """
    if not blocks:
        return None
    rng = np.random.default_rng([seed, 13])
    names, places = np.unique(np.concatenate([block.users for block in blocks]), return_inverse=True)
    parts = np.split(places, np.cumsum([len(block.users) for block in blocks])[:-1])
    pairs = [(_Ranking(block.labels, block.online), _Ranking(block.labels, block.frozen)) for block in blocks]
    differences = []
    for _ in range(resamples):
        drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)))
        found = [(online.auc(drawn[part]) - frozen.auc(drawn[part])) for (online, frozen), part in zip(pairs, parts, strict=True)]
        differences.append(np.average(found, weights=[len(part) for part in parts]))
    low, high = np.quantile(differences, (0.025, 0.975))
    return float(low), float(high)


class _Ranking:
    """Rows sorted by score once, for AUCs of many weightings of them. Ties count half."""

    def __init__(self, labels: np.ndarray, scores: np.ndarray) -> None:
        self._positive = labels > 0
        values, self._places = np.unique(scores, return_inverse=True)
        self._count = len(values)

    def auc(self, weights: np.ndarray) -> float:
        """NaN if only one class has weight."""
        positive = np.bincount(self._places, weights * self._positive, self._count)
        negative = np.bincount(self._places, weights * ~self._positive, self._count)
        below = np.cumsum(negative) - negative / 2
        return float(np.sum(positive * below) / (np.sum(positive) * np.sum(negative)))


def report(director: MovieLensDirector, findings: Findings, *, wall_s: float, error: str | None) -> dict[str, Any]:
    """report.json."""
    means, checked = mean_aucs(findings.blocks), findings.verification
    last = director.hand_overs[-1] if director.hand_overs else None
    online, frozen = means["auc_online"], means["auc_frozen"]
    problems = failures(director, findings)
    return {
        "ok": error is None and not problems,
        "error": error,
        "failures": problems,
        "title": "MovieLens-100k, played through the life of a model",
        "played": _played(director, findings),
        "data": {
            "name": "movielens-100k",
            "blocks": director.blocks.count,
            "block_rows": director.blocks.block_rows,
            "terms": TERMS,
        },
        "movielens": {
            **means,
            "difference": online - frozen if online is not None and frozen is not None else None,
            "interval_95": interval(findings.blocks, director.seed),
            "resampled": "users, each with all rows",
            "resamples": _RESAMPLES,
            "blocks": [block.to_json() for block in findings.blocks],
        },
        "requests": asdict(findings.requests) | {"during_switch": sum(findings.during_switches)},
        "freshness_s": findings.freshness.to_json() if findings.freshness else {"p50": None, "p99": None},
        "handover": {
            "count": len(director.hand_overs),
            "under_requests": _under_requests(findings),
            "retired": last.result.predecessor if last else None,
            "successor": last.result.deployment.lineage if last else None,
            "lag_s": last.result.lag_s if last else None,
        },
        "rows": asdict(findings.rows) | {"undelivered": findings.undelivered},
        "verify": {
            "keys_compared": checked.keys_compared if checked else None,
            "keys_different": checked.keys_different if checked else None,
            "dense_compared": checked.dense_compared if checked else None,
            "dense_different": checked.dense_different if checked else None,
        },
        "kills": [{"at_s": at - director.state.started_at, "lineage": lineage} for at, lineage in director.kills],
        "speed": director.state.speed,
        "tolerance_s": director.tolerance_s,
        "seed": director.seed,
        "wall_s": wall_s,
        "phases": [{"name": n, "begin_s": a - director.state.started_at, "wall_s": b - a} for n, a, b in director.phases],
    }


def _under_requests(findings: Findings) -> int:
    return sum(count > 0 for count in findings.during_switches)


def _played(director: MovieLensDirector, findings: Findings) -> str:
    blocks = director.blocks
    return (
        f"{blocks.count} blocks of {blocks.block_rows:,} interactions, all through the full life: daily job, export, stream,"
        f" server; {len(director.hand_overs)} hand-overs, {_under_requests(findings)} of them while players asked"
    )


def failures(director: MovieLensDirector, findings: Findings) -> list[str]:
    """Why a replay that came to its end isn't good; empty if it is."""
    if director.stream_exit_code is None:
        return ["it was not played to its end"]
    found, requests, checked = [], findings.requests, findings.verification
    if requests.verdict is not None:
        found.append(requests.verdict)
    if not findings.rows.is_clean or findings.undelivered:
        found.append(f"rows were lost or doubled: {asdict(findings.rows)}, {findings.undelivered} not acknowledged")
    if checked is None or not checked.is_equal or not checked.keys_compared:
        found.append(f"served rows differ from the trainer's: {checked.differences if checked else 'unknown'}")
    return found


def series(director: MovieLensDirector) -> dict[str, Any]:
    """series.json: what the plots show."""
    requests = ArrowTail(director.folder.players / REQUESTS, REQUEST_SCHEMA).read()
    switches = [
        {"moment": f"switched to {h.result.deployment.lineage.rpartition('/')[2]}", "at": h.switched_at}
        for h in director.hand_overs
    ]
    return {
        "lineages": [sample for sample in director.state.samples if sample["event_time"] is not None],
        "requests": requests_by_second(requests),
        "handover": switches,
        "kills": [{"at": at, "lineage": lineage} for at, lineage in director.kills],
        "started_at": director.state.started_at,
        "play_started_at": director.play_started_at,
        "speed": director.state.speed,
    }


def summary(report: dict[str, Any]) -> str:
    """The report on one screen."""
    found, requests, fresh, rows, check = (report[name] for name in ("movielens", "requests", "freshness_s", "rows", "verify"))
    lines = [
        f"{'movielens-100k':20} {'OK' if report['ok'] else 'NOT OK'}, {report['wall_s']:.0f} s",
        f"{'played':20} {report['played']}",
        f"{'block':>20} {'users':>6} {'online':>8} {'frozen':>8} {'served':>8} {'online - frozen':>16}",
    ]
    for block in found["blocks"]:
        cells = [f"{_number(block[name], 4):>8}" for name in ("auc_online", "auc_frozen", "auc_served")]
        gain = block["auc_online"] - block["auc_frozen"] if block["auc_online"] and block["auc_frozen"] else None
        lines.append(f"{block['block']:>20} {block['users']:>6} {' '.join(cells)} {_number(gain, 4, '+'):>16}")
    low, high = found["interval_95"] or (None, None)
    lines += [
        f"{'AUC':20} online {_number(found['auc_online'], 4)}, frozen {_number(found['auc_frozen'], 4)},"
        f" served {_number(found['auc_served'], 4)}",
        f"{'online - frozen':20} {_number(found['difference'], 4, '+')}, 95 %: {_number(low, 4, '+')} to {_number(high, 4, '+')}"
        f" ({found['resamples']} draws of users)",
        f"{'requests':20} {requests['total']}, failed {requests['failed']}, during switches {requests['during_switch']};"
        f" p50 {_number(requests['p50_ms'], 1)} ms, p99 {_number(requests['p99_ms'], 1)} ms",
        f"{'event to served':20} p50 {_number(fresh['p50'], 2)} s, p99 {_number(fresh['p99'], 2)} s",
        f"{'rows':20} {rows['in_stream']} in streams, trained once {rows['trained_once']},"
        f" lost {rows['lost']}, doubled {rows['doubled']}",
        f"{'verify':20} {_number(check['keys_compared'])} keys, {_number(check['keys_different'])} different",
    ]
    lines += [f"{'NOT OK':20} {failure}" for failure in report["failures"]]
    if report["error"]:
        lines.append(f"{'stopped':20} {report['error']}")
    return "\n".join([*lines, "", textwrap.fill(report["data"]["terms"], 100)])


def _number(value: float | None, digits: int = 0, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"
