"""The report's plots, as PNG. Each function draws one figure from report.json or series.json; nothing else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.dates as mdates
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tidemill.demo.freshness import STAGES

Json = dict[str, Any]

# One colour a thing, in every plot. Told apart also by people who see few colours (after Okabe and Ito), and never by colour alone.
_INK, _QUIET, _GRID = "#1f2430", "#6b7280", "#e3e6ea"
_SERVED, _ONLINE, _FROZEN, _BEST = "#0072b2", "#009e73", "#d55e00", "#8a8f98"
_PREDECESSOR, _SUCCESSOR, _FAILED = "#8f5aa8", "#0072b2", "#c1121f"
_STAGE_COLOURS = ("#cfd8e3", "#9db8d2", "#5b92c0", "#2a6f97", "#e9c46a", "#f4a261", "#e07a5f", "#9b5de5")
_DPI = 150
_STYLE: Any = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.color": _INK,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
}


def draw(report: Json, series: Json, folder: Path) -> list[Path]:
    """Write every plot that there are figures for; their paths, in the order in which a report shows them."""
    plots: tuple[tuple[str, Callable[[Json, Json], Figure | None]], ...] = (
        ("auc.png", auc_by_event_time),
        ("movielens.png", auc_by_block),
        ("freshness.png", freshness_waterfall),
        ("handover.png", handover_timeline),
    )
    paths = []
    with matplotlib.rc_context(_STYLE):
        for name, plot in plots:
            figure = plot(report, series)
            if figure is not None:
                paths.append(folder / name)
                # Nothing in the file that depends on the moment or the machine.
                figure.savefig(paths[-1], dpi=_DPI, metadata={"Software": None})
    return paths


def auc_by_event_time(report: Json, series: Json) -> Figure | None:
    """AUC of the model as served, of the trainer before it trained on the row, of the frozen snapshot, and the best possible."""
    points = series.get("auc") or []
    if not points:
        return None
    figure, axes = _figure(4.6)
    times = [_utc(point["event_time"]) for point in points]
    lines = (
        ("best_possible", "best possible (true probability)", _BEST, ":", 1.6),
        ("online", "progressive (before training on the row)", _ONLINE, "-", 1.6),
        ("served", "as served", _SERVED, "-", 2.4),
        ("frozen", "frozen snapshot of day T-1", _FROZEN, "--", 1.8),
    )
    for name, label, colour, style, width in lines:
        values = [float("nan") if point[name] is None else point[name] for point in points]
        axes.plot(times, values, style, color=colour, linewidth=width, label=label)
    _mark(axes, _event_marks(series))
    axes.set_title("What learning by the second is worth", pad=20)
    axes.set_ylabel(f"AUC on random impressions ({series['window_s'] / 3600:.0f} h windows)")
    axes.set_xlabel(f"event time (UTC); 1 s of the demo plays {series['speed'] / 60:.0f} min")
    _hours(axes)
    axes.margins(x=0.01)
    _legend_below(figure, axes, 2)
    return figure


def freshness_waterfall(report: Json, series: Json) -> Figure | None:
    """Where the time from an event to the first answer that reflects it goes: a bar of stages for p50 and one for p99.

    Each has an axis of its own, since one killed trainer makes the p99 many times the p50.
    """
    fresh = report.get("freshness_s") or {}
    stages = fresh.get("stages") or {}
    if fresh.get("p50") is None or not stages:
        return None
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, quantile in zip(figure.subplots(2, 1), ("p50", "p99"), strict=True):
        left = 0.0
        for name, colour in zip(STAGES, _STAGE_COLOURS, strict=True):
            seconds = stages[name][quantile] or 0.0
            label = f"{name}  {_seconds(stages[name]['p50'])} / {_seconds(stages[name]['p99'])}"
            axes.barh(0, seconds, 0.6, left=left, color=colour, edgecolor="white", linewidth=0.8, label=label)
            left += seconds
        axes.plot([fresh[quantile]] * 2, [-0.42, 0.42], color=_INK, linewidth=2)
        axes.annotate(_seconds(fresh[quantile]), (fresh[quantile], 0.42), ha="center", va="bottom", fontsize=10, weight="bold")
        axes.set_yticks([0], [quantile])
        axes.set_ylim(-0.5, 0.75)
        axes.set_xlim(0, 1.06 * max(left, fresh[quantile]))
        axes.grid(visible=False, axis="y")
    figure.suptitle("From an event to the first answer that reflects it", x=0.02, ha="left", weight="bold", fontsize=12)
    axes.set_xlabel(
        f"seconds, {fresh['events']:,} events; black: the whole. Each stage's own quantile, so a bar's length isn't the whole's"
    )
    _legend_below(figure, axes, 4, title="stage  p50 / p99")
    return figure


def handover_timeline(report: Json, series: Json) -> Figure | None:
    """Both lineages' lag over time with the moments of the hand-over, and below what the server answered meanwhile."""
    samples = series.get("lineages") or []
    if not samples:
        return None
    origin = series.get("play_started_at") or series["started_at"]
    figure = Figure(figsize=(9, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _lags(upper, samples, origin, series["speed"])
    _requests(lower, series.get("requests") or [], origin)
    marks = [(point["at"] - origin, point["moment"]) for point in series["handover"]]
    _mark(upper, marks, numbered=True)
    for at, _ in marks:
        lower.axvline(at, color=_QUIET, linewidth=0.8, linestyle=":")
    for number, kill in enumerate(series.get("kills") or []):
        upper.plot(kill["at"] - origin, 0, "x", color=_FAILED, markersize=9, mew=2.2, clip_on=False, zorder=5)
        if not number:
            upper.plot([], [], "x", color=_FAILED, mew=2.2, label="SIGKILL to the trainer")
    upper.set_title("The hand-over: the old line serves until the new one has taken over", pad=20)
    upper.legend(loc="upper left", fontsize=9)
    lower.set_xlabel("seconds since the first request")
    key = "   ".join(f"{number} {moment} ({at:.0f} s)" for number, (at, moment) in enumerate(marks, start=1))
    figure.supxlabel(_wrapped(key, 110), x=0.02, ha="left", fontsize=8.5, color=_QUIET)
    return figure


def auc_by_block(report: Json, series: Json) -> Figure | None:
    """MovieLens: the online and the frozen model's AUC block by block, and their difference over all of them."""
    found = report.get("movielens")
    blocks = (found or {}).get("blocks") or []
    if found is None or not blocks:
        return None
    figure, axes = _figure(4.4)
    numbers = [block["block"] for block in blocks]
    lines = (
        ("auc_online", "online, before it trained on the row", _ONLINE, "o-"),
        ("auc_frozen", "frozen daily model", _FROZEN, "s--"),
    )
    for name, label, colour, style in lines:
        axes.plot(numbers, [block[name] for block in blocks], style, color=colour, linewidth=2, markersize=6, label=label)
    low, high = found["interval_95"]
    axes.set_title(f"MovieLens-100k: online minus frozen {found['difference']:+.4f}  (95 %: {low:+.4f} to {high:+.4f})")
    axes.set_ylabel("AUC (rating of 4 or 5)")
    axes.set_xlabel("block of interactions in time order; the frozen model has seen all blocks before it")
    axes.set_xticks(numbers)
    _legend_below(figure, axes, 2)
    return figure


def _lags(axes: Axes, samples: list[Json], origin: float, speed: float) -> None:
    names = sorted({sample["lineage"] for sample in samples})
    colours = (_PREDECESSOR, _SUCCESSOR) * len(names)
    for name, colour in zip(names, colours, strict=False):
        mine = [sample for sample in samples if sample["lineage"] == name and sample["lag_s"] is not None]
        times, lags = [s["at"] - origin for s in mine], [s["lag_s"] / speed for s in mine]
        # More than two follow one another in two colours: naming each would hide what the plot shows.
        axes.plot(times, lags, color=colour, linewidth=2, label=name if len(names) <= 2 else None)
        if mine:
            axes.plot(times[-1], lags[-1], "o", color=colour, markersize=5)
    if len(names) > 2:
        axes.plot([], [], color=_PREDECESSOR, linewidth=2, label=f"{len(names)} lineages, one after the other")
    axes.set_ylabel("watermark behind the players\n(seconds of wall time, log)")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _requests(axes: Axes, points: list[Json], origin: float) -> None:
    times, failed = [point["at"] - origin for point in points], sum(point["failed"] for point in points)
    axes.fill_between(times, [point["answered"] for point in points], step="post", color=_SERVED, alpha=0.25, linewidth=0)
    axes.step(times, [point["answered"] for point in points], where="post", color=_SERVED, linewidth=1.2, label="answered")
    axes.step(
        times, [point["failed"] for point in points], where="post", color=_FAILED, linewidth=1.6, label=f"failed ({failed} in all)"
    )
    axes.set_ylabel("requests/s")
    axes.margins(x=0.01)
    axes.set_ylim(0, 1.3 * max(point["answered"] for point in points) if points else 1)
    axes.legend(loc="upper left", fontsize=9, ncols=2)


def _event_marks(series: Json) -> list[tuple[float, str]]:
    """Midnight and the switch, in event time."""
    marks = [(_utc(series["midnight_event_time"]), "midnight")]
    if series.get("switch_event_time") is not None:
        marks.append((_utc(series["switch_event_time"]), "switch"))
    return marks


def _mark(axes: Axes, marks: Iterable[tuple[float, str]], *, numbered: bool = False) -> None:
    """Vertical lines with their names, or numbers, above the plot."""
    ordered = [(at, str(number) if numbered else name) for number, (at, name) in enumerate(marks, start=1)]
    for at, _ in ordered:
        axes.axvline(at, color=_QUIET, linewidth=0.9, linestyle=":")
    left, right = axes.get_xlim()
    for group in _groups(ordered, 0.025 * (right - left)):
        text = group[0][1] if len(group) == 1 else f"{group[0][1]}-{group[-1][1]}"
        middle = (group[0][0] + group[-1][0]) / 2
        axes.text(middle, 1.02, text, transform=axes.get_xaxis_transform(), ha="center", fontsize=9, color=_INK)


def _groups(marks: list[tuple[float, str]], distance: float) -> list[list[tuple[float, str]]]:
    """Marks whose names would run into each other, together."""
    groups: list[list[tuple[float, str]]] = []
    for mark in marks:
        if groups and mark[0] - groups[-1][-1][0] < distance:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots()


def _legend_below(figure: Figure, axes: Axes, columns: int, title: str | None = None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, fontsize=9, title=title, title_fontsize=9, alignment="left"
    )


def _hours(axes: Axes) -> None:
    locator = mdates.AutoDateLocator(tz=UTC, minticks=4, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator, tz=UTC))


def _utc(seconds: float) -> float:
    """Unix seconds as matplotlib counts time: days since 1970."""
    return seconds / 86400


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for part in text.split("   "):
        lines = [*lines[:-1], f"{lines[-1]}   {part}".strip()] if len(lines[-1]) + len(part) < width else [*lines, part]
    return "\n".join(lines)
