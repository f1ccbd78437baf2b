"""How a training run starts: its term, and the checkpoint that it goes on from, decided by rank 0 and shared."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill import errors
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.checkpoint.leases import held_checkpoint
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest, ParentCheckpoint
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.errors import ConfigError, LineageError, NotFoundError, TidemillError
from tidemill.jobs.place import checkpoint_path
from tidemill.lineage.records import new_run_id, require_open
from tidemill.lineage.terms import Writer, open_term, require_unfenced
from tidemill.storage.base import Storage
from tidemill.storage.commit import probe_exclusive_create
from tidemill.storage.open import open_storage


@dataclass(frozen=True, slots=True)
class Start:
    """Who the run is, and where it starts. At most one of `own` and `parent` gives the weights; `own` wins.

    `own`: the folder's newest checkpoint, when the run goes on. `parent`: the checkpoint that the line comes from, if any.
    `continue_train`: whether the run is to go on where the one before stopped.
    """

    writer: Writer
    own: CheckpointManifest | None
    parent_storage: Storage | None
    parent: CheckpointManifest | None
    snapshot: SnapshotManifest | None
    continue_train: bool = False

    @property
    def parent_record(self) -> ParentCheckpoint | None:
        """What this run's checkpoints say of their parent."""
        if self.parent is None or self.parent_storage is None:
            return self.own.parent if self.own else None
        digest = self.parent.digest()
        return ParentCheckpoint(url=self.parent_storage.url, step=self.parent.step, digest=digest, examples=self.parent.examples)


class Sharing(Protocol):
    """What hands a value of rank 0 to every rank (`distributed.agreement.Agreement`)."""

    def share(self, value: Any) -> Any: ...


def from_rank_zero(agreement: Sharing, rank: int, compute: Callable[[], Any]) -> Any:
    """What `compute` gives on rank 0 (JSON), on every rank; an error of it is raised on every rank. Collective."""
    answer: dict[str, Any] = {}
    if rank == 0:
        try:
            answer = {"value": compute()}
        except TidemillError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
    answer = agreement.share(answer)
    if "error" in answer:
        raise getattr(errors, answer["error"], TidemillError)(answer["message"])
    return answer["value"]


def start_run(
    storage: Storage,
    agreement: Sharing,
    resources: ExitStack,
    *,
    rank: int,
    world_size: int,
    continue_train: bool,
    fine_tune_checkpoint: str,
) -> Start:
    """Open a term and find the checkpoint to go on from; a parent's stays at least until `resources` are closed. Collective.

    Raises RetiredError for a retired lineage, FencedError if a newer run has taken over meanwhile and saved, ConfigError if the
    folder holds a checkpoint and the run isn't to go on from it, CheckpointError if the parent's isn't there, LineageError if the
    folder's snapshot comes from another checkpoint.
    """

    def decide() -> dict[str, Any]:
        require_open(storage)
        probe_exclusive_create(storage)
        run_id = new_run_id()
        term = open_term(storage, run_id=run_id, nonce=uuid.uuid4().hex)
        own = latest_checkpoint(storage)
        if own is not None and own[1].term > term:
            # It slept since it took its term, and what it found is its successor's: no record may say that it went on from there.
            require_unfenced(storage, term)
        if own is not None and not continue_train:
            raise ConfigError(
                f"{storage.url} holds {layout.checkpoint(own[1].step)} already: pass --continue_train to go on from it,"
                " or name an empty model_dir"
            )
        parent = None
        # Once there is an own checkpoint the parent may be gone.
        if fine_tune_checkpoint and own is None:
            folder, step = checkpoint_path(fine_tune_checkpoint)
            parent = resources.enter_context(held_checkpoint(open_storage(folder), step))[0]
        return {"run_id": run_id, "term": term, "own": own[0] if own else None, "parent": parent}

    decided = from_rank_zero(agreement, rank, decide)
    parent_storage = open_storage(checkpoint_path(fine_tune_checkpoint)[0]) if fine_tune_checkpoint else None
    start = Start(
        writer=Writer(decided["term"], decided["run_id"], rank, world_size),
        own=_manifest(storage, decided["own"]),
        parent_storage=parent_storage,
        parent=_manifest(parent_storage, decided["parent"]) if parent_storage else None,
        snapshot=read_snapshot(storage),
        continue_train=continue_train,
    )
    _check_base(storage, start)
    return start


def read_snapshot(storage: Storage) -> SnapshotManifest | None:
    """The folder's snapshot; None if nothing was exported there."""
    try:
        return SnapshotManifest.parse(storage.read(layout.SNAPSHOT), where=f"{storage.url}/{layout.SNAPSHOT}")
    except NotFoundError:
        return None


def _manifest(storage: Storage, key: str | None) -> CheckpointManifest | None:
    return None if key is None else CheckpointManifest.parse(storage.read(key), where=f"{storage.url}/{key}")


def _check_base(storage: Storage, start: Start) -> None:
    """A stream's releases build on its snapshot, so its weights must come from the checkpoint that the snapshot holds."""
    if start.snapshot is None:
        return
    line = start.own.parent if start.own else start.parent_record
    if line is None or line.digest != start.snapshot.checkpoint_digest:
        came_from = f"{line.url}, step {line.step}" if line else "no parent"
        raise LineageError(
            f"{storage.url}: its snapshot was exported from a checkpoint of step {start.snapshot.checkpoint_step}"
            f" ({start.snapshot.checkpoint_digest[:12]}), but this run would go on from {came_from};"
            " set train_config.fine_tune_checkpoint to the checkpoint that was exported"
        )
