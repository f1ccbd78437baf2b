"""What an operator does to a root's lineages by hand: promote, roll back, retire; each is checked against what is stored first.

Every call may be repeated: what already holds is left as it is.
"""

from __future__ import annotations

import uuid

from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import Deployment, LineageRecord
from tidemill.contracts.release import ReleaseManifest
from tidemill.errors import CorruptError, DeadlineError, LineageError, NotFoundError
from tidemill.lineage.deployments import (
    Pin,
    deploy,
    deployments,
    lineage_date,
    live_statuses,
    newest_deployment,
    serving_statuses,
)
from tidemill.lineage.liveness import Liveness, LivenessTracker
from tidemill.lineage.records import Retirement, new_run_id, read_lineage, retire, run_records, snapshot_digest
from tidemill.lineage.terms import open_term
from tidemill.logs import log
from tidemill.storage.base import Storage
from tidemill.storage.numbered import newest_number, numbers
from tidemill.storage.open import open_storage

WATCH_S = 10.0
"""A heartbeat that doesn't move for so long is dead: five of a run's."""

_POLL_S = 0.5


def lineage_dates(root: Storage) -> list[str]:
    """The dates of all lineages of a root, ascending."""
    keys = (info.key.split("/") for info in root.list("lineages/"))
    return sorted({parts[1] for parts in keys if len(parts) > 2})


def has_retired(root: Storage, date: str) -> bool:
    """Whether a lineage's record says that it has retired."""
    record = read_lineage(root, prefix=layout.lineage(date))
    return record is not None and record.status == "retired"


def promote(root: Storage, date: str, reason: str, *, clock: Clock | None = None) -> Deployment:
    """Deploy a lineage, following its head. Raises LineageError without its snapshot, or if a newer date is deployed."""
    return deploy(root, layout.lineage(date), _digest(root, date), reason, clock=clock)


def roll_back(
    root: Storage, reason: str, *, date: str | None = None, sequence: int | None = None, clock: Clock | None = None
) -> Deployment:
    """Serve an earlier state, frozen: a new deployment with a pin.

    `date`: by default the lineage that was served before the one deployed last without a pin. `sequence`: the last release to
    serve, 0 for the snapshot alone; by default the newest good one, or the pin that stands if that lineage is pinned already.
    Raises LineageError if there is nothing to go back to, or the release can't be served.
    """
    date = _date_before(root) if date is None else date
    lineage, digest = layout.lineage(date), _digest(root, date)
    newest = newest_deployment(root)
    if sequence is not None:
        pin = named_release(root, lineage, sequence)
    elif newest is not None and newest.lineage == lineage and newest.snapshot_digest == digest and newest.pin_sequence is not None:
        return newest
    else:
        pin = newest_good_release(root, lineage)
    return deploy(root, lineage, digest, reason, pin, clock=clock)


def _date_before(root: Storage) -> str:
    followed = [deployment for deployment in deployments(root) if deployment.pin_sequence is None]
    earlier = [deployment.lineage for deployment in followed if deployment.lineage < followed[-1].lineage]
    if not earlier:
        raise LineageError(
            f"{root.url}: no earlier lineage was deployed, so there is none to roll back to: name a date and a release"
        )
    return lineage_date(earlier[-1])


def _digest(root: Storage, date: str) -> str:
    try:
        return snapshot_digest(root, layout.lineage(date))
    except NotFoundError:
        known = ", ".join(lineage_dates(root)) or "none"
        raise LineageError(f"{root.url}: {layout.lineage(date)} has no snapshot; lineages of this root: {known}") from None


def newest_good_release(root: Storage, lineage: str) -> Pin:
    """The newest release that a server can load: no number missing before it, its manifest and all its files there.

    (0, 0), the snapshot itself, if there is none. What is passed over is logged.
    """
    found = numbers(root, "releases", layout.release_sequence, base=lineage)
    whole = [sequence for place, sequence in enumerate(found, start=1) if sequence == place]
    for sequence in reversed(whole):
        try:
            return named_release(root, lineage, sequence)
        except LineageError as error:
            log.warning("passed over: %s", error)
    return Pin(0, 0)


def named_release(root: Storage, lineage: str, sequence: int) -> Pin:
    """A release by its number; 0 is the snapshot itself. Raises LineageError if it isn't there, or not whole."""
    if sequence == 0:
        return Pin(0, 0)
    key = f"{lineage}/{layout.release(sequence)}"
    try:
        manifest = ReleaseManifest.parse(root.read(key), where=f"{root.url}/{key}")
    except NotFoundError:
        newest = newest_number(root, "releases", layout.release_sequence, base=lineage)
        raise LineageError(
            f"{root.url}: {lineage} has no release {sequence}; its newest is {newest or 'its snapshot (0)'}"
        ) from None
    except CorruptError as error:
        raise LineageError(str(error)) from None
    if manifest.snapshot_digest != snapshot_digest(root, lineage):
        raise LineageError(
            f"{root.url}/{key}: builds on snapshot {manifest.snapshot_digest[:12]}, which isn't the one of {lineage}"
        )
    folder = layout.segments(manifest.term, manifest.cut)
    sizes = {info.key.removeprefix(f"{lineage}/"): info.size for info in root.list(f"{lineage}/{folder}/")}
    for file in manifest.files:
        if sizes.get(file.key) != file.size:
            held = "isn't there" if file.key not in sizes else f"has {sizes[file.key]} bytes, not {file.size}"
            raise LineageError(f"{root.url}/{key}: can't be served: {file.key} {held}")
    return Pin(manifest.term, manifest.sequence)


def retire_by_hand(root: Storage, date: str, *, watch_s: float = WATCH_S, clock: Clock | None = None) -> LineageRecord:
    """Retire a lineage that nobody trains any more, for good: it never starts again. Idempotent.

    Opens a term first, so a run that was only stalled is fenced. Takes `watch_s` if a run is on record as running. Raises
    LineageError if a run is alive, or the servers follow this lineage.
    """
    lineage, clock = layout.lineage(date), clock or SystemClock()
    record = read_lineage(root, prefix=lineage)
    if date not in lineage_dates(root):
        raise LineageError(f"{root.url}: there is no {lineage}; lineages of this root: {', '.join(lineage_dates(root)) or 'none'}")
    if record is not None and record.status == "retired":
        return record
    newest = newest_deployment(root)
    if newest is not None and newest.lineage == lineage and newest.pin_sequence is None:
        raise LineageError(
            f"{root.url}: {lineage} is served and followed: promote another lineage, or roll back, before it retires"
        )
    _require_dead(root, lineage, watch_s, clock)
    folder = open_storage(f"{root.url.rstrip('/')}/{lineage}")
    run_id = new_run_id(clock)
    term = open_term(folder, run_id=run_id, nonce=uuid.uuid4().hex, clock=clock)
    successor = newest.lineage if newest is not None and newest.lineage > lineage else None
    last = newest_number(root, "releases", layout.release_sequence, base=lineage) or None
    return retire(folder, term, Retirement(successor, None, last), clock=clock)


def _require_dead(root: Storage, lineage: str, watch_s: float, clock: Clock) -> None:
    tracker = LivenessTracker(watch_s, clock)
    while True:
        runs = run_records(root, prefix=lineage)
        if not runs or runs[-1].ended_at is not None:
            return
        state = tracker.observe(lineage, runs[-1].heartbeat, writer=runs[-1].run_id)
        if state is Liveness.DEAD:
            return
        if state is Liveness.ALIVE:
            raise LineageError(f"{root.url}: run {runs[-1].run_id} trains {lineage}: stop it first, or let it hand over")
        clock.sleep(_POLL_S)


def wait_until_served(
    root: Storage, number: int, deadline_s: float, *, watch_s: float = WATCH_S, clock: Clock | None = None
) -> list[str]:
    """Wait until every live server serves a deployment, or a later one, and name them.

    Raises DeadlineError that names those that don't, or says that there is none.
    """
    clock = clock or SystemClock()
    tracker, until = LivenessTracker(watch_s, clock), clock.monotonic() + deadline_s
    while True:
        live, unknown = live_statuses(serving_statuses(root), tracker)
        by = sorted(status.server for status in live if status.ready and (status.deployment or 0) >= number)
        late = [f"{status.server} ({status.error or 'not yet'})" for status in live if status.server not in by]
        waiting = sorted(late + [f"{server} (not known yet whether it is alive)" for server in unknown])
        if by and not waiting:
            return by
        if clock.monotonic() >= until:
            who = ", ".join(waiting) or "no live server"
            raise DeadlineError(f"{root.url}: deployment {number} isn't served by all after {deadline_s:g} s: {who}")
        clock.sleep(_POLL_S)
