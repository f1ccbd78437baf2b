"""What a server should serve: the newest deployment of a root, or the one folder that it was given."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.contracts import layout
from tidemill.contracts.lineage import Deployment
from tidemill.errors import CorruptError, NotFoundError
from tidemill.serving.loader import LineageFolder, Position
from tidemill.storage.base import Storage
from tidemill.storage.numbered import numbers


@dataclass(frozen=True, slots=True)
class Target:
    """A lineage's folder, and how far to follow its releases."""

    deployment: int | None
    folder: LineageFolder
    digest: str | None
    """The snapshot's digest must be this; None: any."""
    up_to: Position | None
    """The last release to serve; None: follow the head."""


def newest_deployment(storage: Storage, *, at_least: int) -> tuple[Target | None, str | None]:
    """The newest readable deployment numbered `at_least` or higher, and what is wrong with a newer one that can't be read."""
    torn: str | None = None
    for number in reversed(numbers(storage, "deployments", layout.deployment_number)):
        if number < at_least:
            break
        try:
            return _target(storage, number), torn
        except (CorruptError, NotFoundError) as error:
            torn = torn or str(error)
    return None, torn


def folder_target(storage: Storage) -> Target | None:
    """The store's own root as a lineage's or snapshot's folder; None if it holds no snapshot."""
    folder = LineageFolder(storage, "")
    try:
        folder.read(layout.SNAPSHOT)
    except NotFoundError:
        return None
    return Target(deployment=None, folder=folder, digest=None, up_to=None)


def _target(storage: Storage, number: int) -> Target:
    key = layout.deployment(number)
    deployment = Deployment.parse(storage.read(key), where=key)
    if deployment.number != number:
        raise CorruptError(f"{key}: says that it is deployment {deployment.number}")
    pin = (deployment.pin_term, deployment.pin_sequence)
    up_to = (pin[0], pin[1]) if pin[0] is not None and pin[1] is not None else None
    if up_to is None and pin != (None, None):
        raise CorruptError(f"{key}: a pin needs both pin_term and pin_sequence, not {pin}")
    return Target(number, LineageFolder(storage, deployment.lineage), deployment.snapshot_digest, up_to)
