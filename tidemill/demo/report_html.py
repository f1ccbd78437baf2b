"""demo-report/: the plots, and one page that holds them and every figure, with no resource outside itself."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import orjson

from tidemill.demo.freshness import STAGES
from tidemill.errors import NotFoundError

Json = dict[str, Any]

REPORT, SERIES, PAGE = "report.json", "series.json", "report.html"

_CAPTIONS = {
    "auc.png": "All four scores rank the same rows: impressions that were shown at random. From midnight on, the progressive score"
    " is the successor's.",
    "movielens.png": "Each block is scored by the model that has learned from all interactions before each one, and by the model as"
    " it stood at the end of the block before.",
    "freshness.png": "Every event is followed from its production through the broker, its training step, the release that holds it"
    " and the server's swap to the first answer of that release or a later one.",
    "handover.png": "Above, how far each lineage's watermark trails the players; below, what the server answered in each second.",
}


@dataclass(frozen=True, slots=True)
class _Figure:
    """A row of the table. `path`: where it stands in report.json."""

    path: str
    show: Callable[[Any], str]
    how: str


def _count(value: Any) -> str:
    return f"{value:,.0f}"


def _auc(value: Any) -> str:
    return f"{value:.4f}"


def _gain(value: Any) -> str:
    return f"{value:+.4f}"


def _seconds(value: Any) -> str:
    return f"{value:.2f} s"


def _milliseconds(value: Any) -> str:
    return f"{value:.1f} ms"


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %"


def _interval(value: Any) -> str:
    return f"{value[0]:+.4f} to {value[1]:+.4f}"


_FIGURES = (
    _Figure(
        "movielens.auc_online",
        _auc,
        "Mean over the blocks of the AUC of the streams' scores, each taken before the row was trained.",
    ),
    _Figure("movielens.auc_frozen", _auc, "The same rows, scored by the snapshot of the daily job that ended before the block."),
    _Figure(
        "movielens.auc_served", _auc, "The rows of the blocks that were played live, by the scores that the server answered with."
    ),
    _Figure("movielens.difference", _gain, "Online minus frozen: the mean of the blocks' differences, weighted by their rows."),
    _Figure(
        "movielens.interval_95",
        _interval,
        "95 % bootstrap interval of that difference. Users are drawn with replacement, with all their rows: one user's ratings come"
        " in one sitting and hang together, and there are too few blocks to draw from.",
    ),
    _Figure(
        "requests.total", _count, "Requests that the players sent, each by the clock, whether or not earlier ones were answered."
    ),
    _Figure("requests.failed", _count, "Answers other than 200, and requests without an answer."),
    _Figure(
        "requests.during_switch",
        _count,
        "Requests sent between the successor's first progress.json and the predecessor's retired record.",
    ),
    _Figure("requests.min_per_s", _count, "Least answers per second over any five seconds."),
    _Figure("requests.p50_ms", _milliseconds, "Median time from sending a request to having read its answer, seen by the players."),
    _Figure("requests.p99_ms", _milliseconds, "99th percentile of the same."),
    _Figure("auc.served", _auc, "AUC on day T's random impressions of the scores that the server ranked them with."),
    _Figure(
        "auc.online",
        _auc,
        "The same rows by the stream trainer's score before it trained on each of them (progressive validation).",
    ),
    _Figure("auc.frozen", _auc, "The same rows, scored by day T-1's snapshot with the server's own code."),
    _Figure("auc.best_possible", _auc, "The same rows, ranked by the true click probability, which this world knows."),
    _Figure("auc.random_impressions", _count, "Rows in these AUCs: shown at random, so no model chose what it is measured on."),
    _Figure("share_closed", _percent, "(online - frozen) / (best possible - frozen)."),
    _Figure(
        "freshness_s.p50",
        _seconds,
        "Median over all events of the time from production to the first answer that reflects the event.",
    ),
    _Figure("freshness_s.p99", _seconds, "99th percentile of the same."),
    _Figure("freshness_s.events", _count, "Events that were followed to an answer."),
    _Figure("handover.retired", str, "The lineage whose record says retired."),
    _Figure("handover.successor", str, "The lineage that was deployed in its place."),
    _Figure("handover.lag_s", _seconds, "Event time by which the successor trailed when the predecessor retired."),
    _Figure(
        "handover.refuses_restart",
        lambda value: "yes" if value else "no",
        "The retired lineage's own command, run again, must refuse.",
    ),
    _Figure(
        "rows.in_stream", _count, "Rows that the producer lists for the surviving line: day T's table and the stream behind it."
    ),
    _Figure("rows.trained_once", _count, "Of these, rows that are in exactly one surviving training step."),
    _Figure("rows.lost", _count, "Of these, rows in no surviving step."),
    _Figure("rows.doubled", _count, "Rows in more than one surviving step."),
    _Figure("verify.keys_compared", _count, "Embedding rows of the served generation, held against the trainer's last checkpoint."),
    _Figure("verify.keys_different", _count, "Rows of these that aren't bitwise equal."),
    _Figure("train.examples_per_s", _count, "Median over the first daily job's own reports, everything included."),
    _Figure("tolerance_s", _seconds, "Event time by which the successor may trail, from the play's speed."),
    _Figure("speed", _count, "Seconds of event time that are played in one second."),
    _Figure("wall_s", _seconds, "From the start to the report."),
)

_TILES = (
    ("movielens.difference", _gain, "online minus frozen AUC"),
    ("requests.failed", _count, "requests failed"),
    ("share_closed", _percent, "of the distance from frozen to best possible closed"),
    ("auc.online", _auc, "AUC online"),
    ("auc.frozen", _auc, "AUC frozen"),
    ("freshness_s.p50", _seconds, "event to served, median"),
    ("rows.lost", _count, "rows lost"),
    ("rows.doubled", _count, "rows doubled"),
    ("verify.keys_different", _count, "served keys that differ from the trainer's"),
)


def render(report_dir: Path) -> Path:
    """Draw the plots and write report.html from the report.json and series.json in a folder; the page's path.

    Raises NotFoundError without them.
    """
    from tidemill.demo import plots

    report, series = _read(report_dir / REPORT), _read(report_dir / SERIES)
    images = plots.draw(report, series, report_dir)
    page = report_dir / PAGE
    page.write_text(build_page(report, images), encoding="utf-8")
    return page


def build_page(report: Json, images: Iterable[Path]) -> str:
    """The page as text; the images become part of it."""
    good = bool(report.get("ok"))
    problems = "; ".join([*report.get("failures", []), *([report["error"]] if report.get("error") else [])])
    template = Template(resources.files("tidemill.demo").joinpath(PAGE).read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(report.get("title") or "Two days in the life of a model"),
        verdict="Everything is as it must be." if good else escape(f"Not as it must be: {problems}"),
        verdict_class="good" if good else "bad",
        subtitle=escape(_subtitle(report)),
        tiles="".join(_tile(report, *tile) for tile in _TILES),
        figures="".join(_image(path) for path in images),
        rows="".join([_row(report, figure) for figure in _FIGURES] + [_stage(report, name) for name in STAGES]),
        terms=_terms(report),
    )


def _subtitle(report: Json) -> str:
    parts = [f"{report['wall_s']:.0f} s on this machine"]
    if report.get("seed") is not None:
        parts.append(f"seed {report['seed']}")
    if report.get("speed") is not None:
        parts.append(f"1 s plays {report['speed']:,.0f} s of event time")
    kills = len(report.get("kills") or [])
    if kills:
        parts.append(f"the stream trainer was killed {kills} {'time' if kills == 1 else 'times'}")
    return "; ".join([*parts, *([report["played"]] if report.get("played") else [])])


def _tile(report: Json, path: str, show: Callable[[Any], str], label: str) -> str:
    value = _value(report, path)
    return "" if value is None else f'<div class="tile"><b>{escape(show(value))}</b><span>{escape(label)}</span></div>'


def _row(report: Json, figure: _Figure) -> str:
    value = _value(report, figure.path)
    return "" if value is None else _cells(figure.path, figure.show(value), figure.how)


def _stage(report: Json, name: str) -> str:
    found = ((report.get("freshness_s") or {}).get("stages") or {}).get(name)
    if not found or found["p50"] is None:
        return ""
    return _cells(
        f"freshness_s.stages.{name}", f"{_seconds(found['p50'])} / {_seconds(found['p99'])}", f"p50 / p99. {_STAGE_ENDS[name]}"
    )


_STAGE_ENDS = {
    "queue": "From production until the broker has acknowledged the event.",
    "batch": "Until the batch with it enters a training step.",
    "train": "Until that step has ended.",
    "cut": "Until the next release is cut.",
    "write": "Until the release's files are written.",
    "gate": "Until the release has passed its gate and is committed.",
    "poll": "Until the server has found it.",
    "swap": "Until it is loaded and a first answer names it, or a later one.",
}


def _cells(name: str, value: str, how: str) -> str:
    return f'<tr><th>{escape(name)}</th><td class="value">{escape(value)}</td><td class="how">{escape(how)}</td></tr>\n'


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    caption = escape(_CAPTIONS[path.name])
    return f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>\n'


def _terms(report: Json) -> str:
    terms = (report.get("data") or {}).get("terms")
    return f"<h2>The data</h2><p>{escape(terms)}</p>" if terms else ""


def _value(report: Json, path: str) -> Any:
    value: Any = report
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _read(path: Path) -> Json:
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFoundError(f"{path}: not there; a demo writes it at its end") from None
