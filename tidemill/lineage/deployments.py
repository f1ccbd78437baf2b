"""Deployments: which lineage the servers of a root should serve, and what the servers say they do."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.lineage import Deployment
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import CorruptError, LineageError, NotFoundError, StorageError
from tidemill.lineage.handover import Confirmation
from tidemill.lineage.liveness import Liveness, LivenessTracker
from tidemill.logs import event, log
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.numbered import newest_number, numbers

_MAX_RACES = 64


class OvertakenError(LineageError):
    """What the cycle decided no longer holds: somebody deployed meanwhile. Nothing was written; decide again."""


_LINEAGE = re.compile(r"^lineages/([^/]+)$")


@dataclass(frozen=True, slots=True)
class Pin:
    """The last release to serve; (0, 0) is the snapshot itself."""

    term: int
    sequence: int


def lineage_date(lineage: str) -> str:
    """The date of a lineage's key ("lineages/20240102"). Raises LineageError for another key."""
    match = _LINEAGE.match(lineage)
    if match is None:
        raise LineageError(f"{lineage!r} isn't a lineage of a root: expected {layout.lineage('<date>')!r}")
    return match[1]


def newest_deployment(root: Storage) -> Deployment | None:
    """The deployment with the highest number; None if nothing has been deployed. Raises CorruptError if it can't be read."""
    number = _newest_number(root)
    return read_deployment(root, number) if number else None


def read_deployment(root: Storage, number: int) -> Deployment:
    """One deployment. Raises NotFoundError, CorruptError."""
    key = layout.deployment(number)
    deployment = Deployment.parse(root.read(key), where=f"{root.url}/{key}")
    if deployment.number != number:
        raise CorruptError(f"{root.url}/{key}: says that it is deployment {deployment.number}")
    return deployment


def deployments(root: Storage) -> list[Deployment]:
    """All deployments in order. Raises CorruptError if one can't be read."""
    return [read_deployment(root, number) for number in numbers(root, "deployments", layout.deployment_number)]


class DeploymentHistory:
    """All deployments of a root, each read once: they never change, and there may be years of them. Belongs to one thread."""

    def __init__(self, root: Storage) -> None:
        self._root = root
        self._known: dict[int, Deployment] = {}

    def read(self) -> list[Deployment]:
        """All deployments in order, up to now. Raises CorruptError if one can't be read."""
        for number in numbers(self._root, "deployments", layout.deployment_number):
            if number not in self._known:
                self._known[number] = read_deployment(self._root, number)
        return [self._known[number] for number in sorted(self._known)]


def is_deployed(root: Storage, lineage: str) -> bool:
    """Whether a lineage has ever been deployed, whatever is served now."""
    return any(deployment.lineage == lineage for deployment in deployments(root))


def _newest_number(root: Storage) -> int:
    return newest_number(root, "deployments", layout.deployment_number)


@dataclass(frozen=True, slots=True)
class Decided:
    """By what a deployment was decided: a run of the cycle, and the number of the newest deployment that it knew of (0: none)."""

    run_id: str
    number: int


def deploy(
    root: Storage,
    lineage: str,
    snapshot_digest: str,
    reason: str,
    pin: Pin | None = None,
    *,
    decided: Decided | None = None,
    clock: Clock | None = None,
) -> Deployment:
    """Point the servers at a lineage: take the next number exclusively, then write the hint active.json.

    Idempotent: if the newest deployment says the same, it is returned. Racing deployers never share a number, and each decides
    anew after a lost race. `decided` None: a person asks. Raises LineageError if a newer date is deployed and this isn't a pinned
    rollback, OvertakenError if something else was deployed since the cycle decided.
    """
    date = lineage_date(lineage)
    created_at, nonce = (clock or SystemClock()).time(), uuid.uuid4().hex
    for _ in range(_MAX_RACES):
        newest = newest_deployment(root)
        if newest is not None and _says(newest, lineage, snapshot_digest, pin):
            _write_hint(root)
            return newest
        _require_allowed(root, newest, date, pin, decided)
        deployment = Deployment(
            number=newest.number + 1 if newest else 1,
            lineage=lineage,
            snapshot_digest=snapshot_digest,
            pin_term=pin.term if pin else None,
            pin_sequence=pin.sequence if pin else None,
            created_at=created_at,
            nonce=nonce,
            reason=reason,
            run_id=decided.run_id if decided else None,
        )
        if create_once(root, layout.deployment(deployment.number), deployment.to_bytes(), clock=clock):
            _write_hint(root)
            log.info("deployment %d: %s (%s)", deployment.number, lineage, reason)
            event("lineage.deployed", number=deployment.number, lineage=lineage, reason=reason)
            return deployment
    raise StorageError(f"{root.url}: lost the race for a deployment number {_MAX_RACES} times; are many deployers running?")


def _require_allowed(root: Storage, newest: Deployment | None, date: str, pin: Pin | None, decided: Decided | None) -> None:
    number = newest.number if newest else 0
    if decided is not None and number != decided.number:
        raise OvertakenError(
            f"{root.url}: deployment {number} has come since the cycle looked (at {decided.number}): it looks again"
        )
    if newest is not None and pin is None and lineage_date(newest.lineage) > date:
        message = f"{root.url}: {newest.lineage} is deployed (number {number}), so the older {layout.lineage(date)} can't be"
        raise LineageError(f"{message}: roll back to one of its releases instead")


def _says(deployment: Deployment, lineage: str, digest: str, pin: Pin | None) -> bool:
    given = (pin.term, pin.sequence) if pin else (None, None)
    pinned = (deployment.pin_term, deployment.pin_sequence)
    return deployment.lineage == lineage and deployment.snapshot_digest == digest and pinned == given


def _write_hint(root: Storage) -> None:
    """Copy the newest deployment to active.json. Readers go by the numbers, so a failure costs nothing."""
    try:
        newest = newest_deployment(root)
        if newest is not None:
            root.write(layout.ACTIVE, newest.to_bytes())
    except StorageError as error:
        log.warning("%s isn't up to date: %s", layout.ACTIVE, error)


def serving_statuses(root: Storage) -> list[ServingStatus]:
    """What every server last said; what can't be read is logged and left out."""
    statuses = []
    for info in root.list("serving/"):
        try:
            statuses.append(ServingStatus.parse(root.read(info.key), where=f"{root.url}/{info.key}"))
        except NotFoundError:
            continue
        except CorruptError as error:
            log.warning("a server's status is left out: %s", error)
    return statuses


def live_statuses(statuses: Iterable[ServingStatus], tracker: LivenessTracker) -> tuple[list[ServingStatus], list[str]]:
    """The statuses of live servers, and the names of servers that have not been watched for long enough to tell."""
    live, unknown = [], []
    for status in statuses:
        state = tracker.observe(status.server, status.heartbeat)
        if state is Liveness.ALIVE:
            live.append(status)
        elif state is Liveness.UNKNOWN:
            unknown.append(status.server)
    return live, unknown


def confirmed(statuses: Iterable[ServingStatus], lineage: str, tracker: LivenessTracker) -> Confirmation:
    """Whether serving has switched: at least one live server, and all live ones serve `lineage` or a later one (D8).

    A server that isn't known to be dead counts against it: what it serves may still be the predecessor.
    """
    live, unknown = live_statuses(statuses, tracker)
    if unknown:
        return Confirmation(False, f"not known yet whether {_names(unknown)} is alive")
    if not live:
        return Confirmation(False, "no live server")
    behind = [status.server for status in live if not _serves(status, lineage)]
    if behind:
        return Confirmation(False, f"{_names(behind)} doesn't serve {lineage} yet")
    return Confirmation(True, f"all {len(live)} live servers serve {lineage} or a later one")


def _serves(status: ServingStatus, lineage: str) -> bool:
    if not status.ready or status.lineage is None or _LINEAGE.match(status.lineage) is None:
        return False
    return lineage_date(status.lineage) >= lineage_date(lineage)


def _names(servers: list[str]) -> str:
    return ", ".join(sorted(servers))


def served_watermark(statuses: Iterable[ServingStatus], tracker: LivenessTracker) -> float | None:
    """Event time that every live server has reached; None if there is none, or one of them has none."""
    live, _ = live_statuses(statuses, tracker)
    watermarks = [status.watermark for status in live]
    reached = [watermark for watermark in watermarks if watermark is not None]
    return min(reached) if reached and len(reached) == len(watermarks) else None
