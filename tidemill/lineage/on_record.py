"""What a root's records say of a date, of all due dates, and of a date's parent."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.contracts import layout
from tidemill.lineage.cycle import CycleRecords, is_date
from tidemill.lineage.deployments import deployments, is_deployed, lineage_date, newest_deployment
from tidemill.lineage.records import read_lineage, run_records
from tidemill.lineage.schedule import Standing
from tidemill.storage.base import Storage


def read_records(root: Storage, date: str) -> CycleRecords:
    """What is on record of a date."""
    lineage = layout.lineage(date)
    return CycleRecords(
        daily=run_records(root, prefix=layout.daily(date)),
        cycle=run_records(root, prefix=layout.cycle(date)),
        has_snapshot=bool(root.list(f"{lineage}/{layout.SNAPSHOT}")),
        lineage=read_lineage(root, prefix=lineage),
        streams=run_records(root, prefix=lineage),
        is_deployed=is_deployed(root, lineage),
        newest=newest_deployment(root),
        parent=_parent(root, date),
    )


def standings(root: Storage, due: Sequence[str]) -> dict[str, Standing]:
    """What is on record of due dates, and of later ones that were run by hand; dates before the newest deployed one are settled,
    so their runs aren't read."""
    deployed = {lineage_date(deployment.lineage) for deployment in deployments(root)}
    daily = {info.key.split("/")[1] for info in root.list("daily/")}
    open_dates = {date for date in daily if date > max(deployed, default="")}
    trained = {date for date in open_dates if is_trained(root, date)}
    return {date: Standing(date in trained, date in deployed) for date in {*due, *deployed, *trained}}


def is_trained(root: Storage, date: str) -> bool:
    """Whether a date's daily job is complete."""
    return any(run.status == "completed" for run in run_records(root, prefix=layout.daily(date)))


def stream_is_over(root: Storage, date: str) -> bool:
    """Whether the records say that a date's stream must not be started (again)."""
    lineage = read_lineage(root, prefix=layout.lineage(date))
    if lineage is not None and lineage.status == "retired":
        return True
    runs = run_records(root, prefix=layout.lineage(date))
    return bool(runs) and runs[-1].status in ("completed", "retired")


def _parent(root: Storage, date: str) -> str | None:
    """The newest earlier date whose daily job is complete."""
    dates = {info.key.split("/")[1] for info in root.list("daily/")}
    earlier = sorted((name for name in dates if is_date(name) and name < date), reverse=True)
    return next((name for name in earlier if is_trained(root, name)), None)
