"""Where a training run goes on from: its own checkpoint, its parent's weights, or the beginning."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tidemill.cadence import Stateful
from tidemill.checkpoint.discovery import read_dataloader_state, read_pipeline, read_rank_states
from tidemill.config.compare import Verdict, compare
from tidemill.config.load import load_pipeline
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.data.assignment import AssignmentBase
from tidemill.data.source import Source
from tidemill.errors import ConfigError
from tidemill.jobs.fine_tune import start_from
from tidemill.jobs.learner import Learner
from tidemill.jobs.positions import Saved
from tidemill.jobs.run import Run
from tidemill.registry import component_config
from tidemill.storage.base import Storage

log = logging.getLogger(__name__)

RANDOM = "random"
"""Under which name a checkpoint holds each rank's random state."""


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What a run starts with besides weights and positions. `watermark` and `rank_states` come from an own checkpoint only."""

    step: int = 0
    examples: float = 0.0
    watermark: float | None = None
    rank_states: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def load(self, name: str, owner: Stateful) -> None:
        """Give `owner` what every rank had saved under its name."""
        owner.load_state([state[name] for state in self.rank_states if name in state])

    def load_own(self, name: str, owner: Stateful, run: Run) -> None:
        """Give `owner` what this rank had saved, if there were as many ranks."""
        if len(self.rank_states) == run.runtime.world_size and name in self.rank_states[run.rank]:
            owner.load_state([self.rank_states[run.rank][name]])


def restore(run: Run, learner: Learner) -> Restored:
    """Weights, optimizers, schedules and examples from the own checkpoint or the parent; the rest from the own one only.

    Of a parent whatever fits is taken, see `start_from`; but a stream's releases build on its parent's very weights.
    Collective. Raises CheckpointError if the model doesn't fit, ConfigError if the line can't go on under this config.
    """
    own, parent = run.start.own, run.start.parent
    if own is not None:
        check_config(run.storage, own, run.config)
        learner.restore(run.storage, own)
        return _restore_own(run, own)
    if parent is not None and run.start.parent_storage is not None:
        if run.start.snapshot is not None:
            learner.restore(run.start.parent_storage, parent)
            log.info("continuing from %s, step %d", run.start.parent_storage.url, parent.step)
        else:
            start_from(learner, run.start.parent_storage, parent, run.config.train_config)
        return Restored(examples=float(parent.examples))
    return Restored()


def check_config(storage: Storage, manifest: CheckpointManifest, config: PipelineConfig) -> None:
    """Log how the config differs from the one that the checkpoint was trained with.

    Raises ConfigError that names what has changed, if the line can't go on under this config.
    """
    text = read_pipeline(storage, manifest)
    try:
        before = load_pipeline(text, component_config, format="yaml", environ={}).config
    except ConfigError as error:
        log.warning("the config of step %d can't be compared with this one: %s", manifest.step, error)
        return
    found = compare(before, config)
    if found.verdict is not Verdict.COMPATIBLE:
        grave = [difference for difference in found.differences if difference.verdict is not Verdict.COMPATIBLE]
        advice = (
            "start a new lineage from this checkpoint (train_config.fine_tune_checkpoint, another model_dir)"
            if found.verdict is Verdict.NEW_LINEAGE
            else "take back the change, or train anew"
        )
        changes = "\n".join(map(str, grave))
        raise ConfigError(f"{storage.url}: step {manifest.step} can't go on under this config; {advice}:\n{changes}")
    for difference in found.differences:
        log.warning("the config has changed since step %d: %s", manifest.step, difference)


def _restore_own(run: Run, manifest: CheckpointManifest) -> Restored:
    rank_states = read_rank_states(run.storage, manifest)
    _restore_random(run, manifest, rank_states)
    log.info("resuming at step %d", manifest.step)
    return Restored(
        step=manifest.step,
        examples=float(manifest.examples),
        watermark=manifest.watermark,
        rank_states=rank_states,
    )


def saved_positions(run: Run, source: Source) -> Saved | None:
    """What the run's data goes on behind: the own checkpoint, or, for a source that does so, the parent's with --continue_train."""
    own, parent, storage = run.start.own, run.start.parent, run.start.parent_storage
    if own is not None:
        return Saved(read_dataloader_state(run.storage, own), AssignmentBase.from_json(own.state["assignment"]))
    if parent is None or storage is None or not (run.start.continue_train and source.continues_parent):
        return None
    state = read_dataloader_state(storage, parent)
    return Saved(state.model_copy(update={"splits": [split for split in state.splits if split.kind == source.kind]}), None)


def _restore_random(run: Run, manifest: CheckpointManifest, rank_states: list[dict[str, dict[str, Any]]]) -> None:
    """Each rank's own random state; new ones if there are more or fewer ranks, not those that the line began with."""
    if len(rank_states) != run.runtime.world_size:
        torch.manual_seed((run.config.train_config.runtime.seed + run.rank) ^ (manifest.step << 20))
        return
    saved = rank_states[run.rank][RANDOM]
    torch.set_rng_state(torch.from_numpy(np.array(saved["torch"])))
    if run.runtime.device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(torch.from_numpy(np.array(saved["cuda"])), run.runtime.device)


def random_state(device: torch.device) -> dict[str, Any]:
    """This rank's random state, as `restore` takes it back: torch's on the CPU, and on the device."""
    state = {"torch": torch.get_rng_state().numpy().copy()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().copy()
    return state
