"""A small report.json and series.json, as a demo leaves them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

STAGES = ("queue", "batch", "train", "cut", "write", "gate", "poll", "swap")

REPORT: dict[str, Any] = {
    "ok": True,
    "error": None,
    "failures": [],
    "requests": {
        "total": 5126,
        "failed": 0,
        "during_switch": 328,
        "failed_during_switch": 0,
        "min_per_s": 22.4,
        "min_in_one_s": 8,
        "p50_ms": 34.4,
        "p99_ms": 292.9,
        "max_ms": 400.0,
    },
    "auc": {"served": 0.7339, "online": 0.7383, "frozen": 0.6689, "best_possible": 0.7942, "random_impressions": 26000},
    "share_closed": 0.55,
    "freshness_s": {
        "p50": 1.06,
        "p99": 2.47,
        "events": 1000,
        "not_served": 3,
        "stages": {name: {"p50": 0.05 * (n + 1), "p99": 0.1 * (n + 1)} for n, name in enumerate(STAGES)},
    },
    "handover": {
        "retired": "lineages/20260302",
        "successor": "lineages/20260303",
        "lag_s": 648.0,
        "refuses_restart": True,
        "restart_exit_code": 77,
        "timeline": [],
    },
    "rows": {"in_stream": 133276, "trained_once": 133276, "lost": 0, "doubled": 0, "undelivered": 0},
    "verify": {"keys_compared": 60130, "keys_different": 0, "keys_excluded": 0, "dense_compared": 12, "dense_different": 0},
    "train": {"examples_per_s": 31882.0},
    "kills": [{"at_s": 40.0, "lineage": "lineages/20260302"}],
    "speed": 1728.0,
    "tolerance_s": 6912.0,
    "tolerance_wall_s": 4.0,
    "seed": 1,
    "wall_s": 169.0,
    "phases": [],
}

_DAY, _AT = 1772496000.0, 1796058220.0

SERIES: dict[str, Any] = {
    "auc": [
        {
            "event_time": _DAY + 1800 * n,
            "rows": 700,
            "served": 0.7,
            "online": 0.72,
            "frozen": None if n == 3 else 0.6,
            "best_possible": 0.8,
        }
        for n in range(60)
    ],
    "lineages": [
        {
            "at": _AT + n,
            "event_time": _DAY + 1728 * n,
            "lineage": f"lineages/2026030{line}",
            "lag_s": 900.0 + 300 * line,
            "watermark": _DAY,
        }
        for line in (2, 3)
        for n in range(0 if line == 2 else 50, 70)
    ],
    "requests": [{"at": int(_AT) + n, "answered": 40, "failed": int(n == 9), "p50_ms": 30.0, "p99_ms": 90.0} for n in range(70)],
    "freshness": {"event_time": [_DAY, _DAY + 60], "total_s": [1.0, 1.1]},
    "handover": [
        {"moment": "midnight", "at": _AT + 50},
        {"moment": "serving switched", "at": _AT + 60},
        {"moment": "confirmed: first answer", "at": _AT + 60.4},
    ],
    "kills": [{"at": _AT + 20, "lineage": "lineages/20260302"}],
    "started_at": _AT - 30,
    "play_started_at": _AT,
    "play_starts_event_time": _DAY,
    "midnight_event_time": _DAY + 86400,
    "switch_event_time": _DAY + 100000,
    "speed": 1728.0,
    "window_s": 10800.0,
}

MOVIELENS: dict[str, Any] = {
    "auc_online": 0.74,
    "auc_frozen": 0.70,
    "auc_served": 0.73,
    "difference": 0.04,
    "interval_95": [0.03, 0.05],
    "blocks": [{"block": n, "rows": 10000, "auc_online": 0.74, "auc_frozen": 0.7} for n in range(2, 11)],
}


def record(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write both files; the report with changes."""
    report = copy.deepcopy(REPORT) | changes
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (folder / "series.json").write_text(json.dumps(SERIES), encoding="utf-8")
    return report
