"""The report on one screen."""

from __future__ import annotations

from typing import Any

from tidemill.demo.freshness import STAGES


def summary(report: dict[str, Any]) -> str:
    """A report as text of some 20 lines."""
    requests, auc, fresh = report["requests"], report["auc"], report["freshness_s"]
    handover, rows, check = report["handover"], report["rows"], report["verify"]
    stages = fresh.get("stages") or {}
    waterfall = ", ".join(f"{name} {_number(stages[name]['p50'], 2)}" for name in STAGES if name in stages)
    lines = [
        f"{'tidemill demo':20} {'OK' if report['ok'] else 'NOT OK'}, {report['wall_s']:.0f} s, seed {report['seed']}",
        f"{'speed':20} 1 s plays {report['speed']:.0f} s of event time; tolerance {report['tolerance_s']:.0f} s of event time"
        f" ({report['tolerance_wall_s']:g} s)",
        "",
        f"{'requests':20} {requests['total']}, failed {requests['failed']}, during the switch {_number(requests['during_switch'])};"
        f" least {_number(requests['min_per_s'])} per second",
        f"{'':20} p50 {_number(requests['p50_ms'], 1)} ms, p99 {_number(requests['p99_ms'], 1)} ms",
        f"{'AUC on day T':20} frozen {_number(auc['frozen'], 4)}, served {_number(auc['served'], 4)},"
        f" online {_number(auc['online'], 4)}, best possible {_number(auc['best_possible'], 4)}",
        f"{'':20} on {auc['random_impressions']} random impressions; online closes {_percent(report['share_closed'])}"
        " of the distance",
        f"{'event to served':20} p50 {_number(fresh['p50'], 2)} s, p99 {_number(fresh['p99'], 2)} s",
        f"{'':20} {waterfall}",
        f"{'hand-over':20} {handover['retired']} -> {handover['successor']}, lag {_number(handover['lag_s'])} s of event time",
        f"{'':20} {_restart(handover)}",
        f"{'rows':20} {_number(rows.get('in_stream'))} played, trained once {_number(rows.get('trained_once'))},"
        f" lost {_number(rows.get('lost'))}, doubled {_number(rows.get('doubled'))}",
        f"{'verify':20} {_number(check['keys_compared'])} keys, {_number(check['keys_different'])} different;"
        f" {_number(check['dense_compared'])} dense weights, {_number(check['dense_different'])} different",
        f"{'training':20} {_number(report['train']['examples_per_s'])} examples/s; trainer killed {len(report['kills'])} times",
    ]
    lines += [f"{'NOT OK':20} {failure}" for failure in report["failures"]]
    if report["error"]:
        lines.append(f"{'stopped':20} {report['error']}")
    return "\n".join(lines)


def _restart(handover: dict[str, Any]) -> str:
    if handover["restart_exit_code"] is None:
        return "no lineage has retired and been started again"
    return f"the retired lineage {'refuses' if handover['refuses_restart'] else 'does not refuse'} to start again"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
