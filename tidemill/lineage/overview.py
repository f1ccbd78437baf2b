"""A root at a glance, in lines for people: its lineages, what is deployed, what servers say."""

from __future__ import annotations

from datetime import UTC, datetime

from tidemill.contracts import layout
from tidemill.errors import LineageError
from tidemill.lineage.by_hand import lineage_dates
from tidemill.lineage.deployments import is_deployed, newest_deployment, serving_statuses
from tidemill.lineage.records import read_lineage, run_records
from tidemill.storage.base import Storage
from tidemill.storage.numbered import newest_number


def lineage_lines(root: Storage, date: str | None = None) -> list[str]:
    """One line a lineage, oldest first. Raises LineageError if `date` is given and has none."""
    dates = lineage_dates(root)
    if date is not None and date not in dates:
        raise LineageError(f"{root.url}: there is no lineage of {date}; lineages of this root: {', '.join(dates) or 'none'}")
    lines = [_lineage_line(root, each) for each in dates if date in (None, each)]
    return lines or ["no lineages"]


def _lineage_line(root: Storage, date: str) -> str:
    lineage = layout.lineage(date)
    record = read_lineage(root, prefix=lineage)
    has_snapshot = bool(root.list(f"{lineage}/{layout.SNAPSHOT}"))
    parts = ["" if has_snapshot else "no snapshot", "deployed" if is_deployed(root, lineage) else "never deployed"]
    newest = newest_number(root, "releases", layout.release_sequence, base=lineage)
    parts.append(f"release {newest}" if newest else "no release")
    if record is not None and record.status == "retired":
        parts.append(f"in favour of {record.successor}" if record.successor else "by hand")
    runs = run_records(root, prefix=lineage)
    if runs:
        last = runs[-1]
        at = "" if last.watermark is None else f" at {datetime.fromtimestamp(last.watermark, UTC):%Y-%m-%d %H:%M:%S}Z"
        parts.append(f"run {last.run_id} {last.status}{at}{f': {last.error}' if last.error else ''}")
    status = record.status if record is not None else "new"
    return f"{lineage:<18} {status:<8} {', '.join(part for part in parts if part)}"


def deployment_line(root: Storage) -> str:
    """What the servers should serve, and why."""
    newest = newest_deployment(root)
    if newest is None:
        return "nothing is deployed"
    pin = f", pinned to release {newest.pin_sequence}" if newest.pin_sequence is not None else ""
    return f"deployment {newest.number}: {newest.lineage}{pin}, deployed because: {newest.reason}"


def server_lines(root: Storage) -> list[str]:
    """What every server last said it serves."""
    lines = []
    for server in serving_statuses(root):
        state = f"{server.lineage} release {server.sequence}" if server.ready else "not ready"
        lines.append(f"server {server.server}: {state}{f'; {server.error}' if server.error else ''}")
    return lines
