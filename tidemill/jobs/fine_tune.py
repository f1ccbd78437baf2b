"""Starts a model from another run's checkpoint, whether or not it was the same model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import fsspec

from tidemill import logs
from tidemill.checkpoint.discovery import read_arrays_of, read_pipeline
from tidemill.checkpoint.fine_tune import Coverage, Shapes, cover, parse_parameter_map
from tidemill.checkpoint.restore import dense_tensors, restore_tables
from tidemill.config.load import load_pipeline
from tidemill.config.train import TrainConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import ConfigError
from tidemill.jobs.learner import DENSE, Learner
from tidemill.logs import log
from tidemill.registry import component_config
from tidemill.storage.base import Storage

SPARSE_OPTIMIZER, DENSE_OPTIMIZER = "sparse_optimizer", "dense_optimizer"
_MOST_NAMED = 20
"""How many parameters a line of the log names."""


def read_parameter_map(path: str) -> dict[str, str]:
    """The file of fine_tune_ckpt_param_map, or nothing if there is none. Raises ConfigError naming it."""
    if not path:
        return {}
    try:
        with fsspec.open(path, "r", encoding="utf-8") as file:
            return parse_parameter_map(file.read(), where=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"train_config.fine_tune_ckpt_param_map: {path} can't be read: {error}") from None


def start_from(learner: Learner, storage: Storage, manifest: CheckpointManifest, config: TrainConfig) -> Coverage:
    """Take weights, optimizers and schedules of a checkpoint, as far as they fit; say what doesn't. Every rank calls.

    A model of the same parameters takes everything. Raises CheckpointError if nothing fits, ConfigError for a bad parameter map.
    """
    renamed = read_parameter_map(config.fine_tune_ckpt_param_map)
    coverage = cover(_shapes_of(learner), _shapes_in(storage, manifest), renamed)
    anew = _other_optimizers(storage, manifest, config)
    if coverage.is_exact and not anew:
        learner.restore(storage, manifest)
    else:
        if coverage.dense.keys() != learner.model.dense_state().keys():
            anew.add(DENSE_OPTIMIZER)
        _take(learner, storage, manifest, coverage, anew)
    _tell(storage, manifest, coverage, anew)
    return coverage


def _take(learner: Learner, storage: Storage, manifest: CheckpointManifest, coverage: Coverage, anew: Collection[str]) -> None:
    """Take what fits. The dense optimizer's state is taken as a whole or not at all, since it steps all parameters together."""
    for shard in learner.model.local_shards():
        if shard.table in coverage.tables:
            theirs = replace(shard, table=coverage.tables[shard.table])
            restore_tables(storage, manifest, [theirs], optimizer=SPARSE_OPTIMIZER not in anew)
    saved = dense_tensors(storage, manifest, DENSE)
    learner.model.load_dense_state(learner.model.dense_state() | {new: saved[old] for new, old in coverage.dense.items()})
    if DENSE_OPTIMIZER not in anew:
        names = {old: new for new, old in coverage.dense.items()}
        state = {path.rpartition("/"): array for path, array in read_arrays_of(storage, manifest, "dense_optimizer").items()}
        taken = {f"{names[name]}/{key}": array for (name, _, key), array in state.items() if name in names}
        learner.optimizers.load_dense_optimizer_state(taken)
    learner.step.load_state(manifest.state["schedule"])


def _other_optimizers(storage: Storage, manifest: CheckpointManifest, config: TrainConfig) -> set[str]:
    """Which optimizers are of another kind than those that the checkpoint was trained with: their state means something else."""
    text = read_pipeline(storage, manifest)
    try:
        before = load_pipeline(text, component_config, format="yaml", environ={}).config.train_config
    except ConfigError as error:
        log.warning("the config of step %d can't be read, so both optimizers begin anew: %s", manifest.step, error)
        return {SPARSE_OPTIMIZER, DENSE_OPTIMIZER}
    names = {
        SPARSE_OPTIMIZER: (before.sparse_optimizer, config.sparse_optimizer),
        DENSE_OPTIMIZER: (before.dense_optimizer, config.dense_optimizer),
    }
    return {name for name, (old, new) in names.items() if old.optimizer[0] != new.optimizer[0]}


def _shapes_of(learner: Learner) -> Shapes:
    tables = {table.name: (table.num_embeddings, table.embedding_dim) for table in learner.tables}
    return Shapes(tables, {name: tuple(tensor.shape) for name, tensor in learner.model.dense_state().items()})


def _shapes_in(storage: Storage, manifest: CheckpointManifest) -> Shapes:
    tables = {table.name: (table.num_embeddings, table.embedding_dim) for table in manifest.tables}
    return Shapes(tables, {name: tuple(tensor.shape) for name, tensor in dense_tensors(storage, manifest, DENSE).items()})


def _tell(storage: Storage, manifest: CheckpointManifest, coverage: Coverage, anew: Collection[str]) -> None:
    log.info("starting from %s, step %d: %.4g %% of the model", storage.url, manifest.step, 100 * coverage.share)
    for names, what in (
        (coverage.missing, "not in the checkpoint, so they begin anew"),
        (coverage.unfit, "of another shape in the checkpoint, so they begin anew"),
        (coverage.unused, "in the checkpoint, and not in the model"),
    ):
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            log.warning("%d parameters %s: %s%s", len(names), what, ", ".join(names[:_MOST_NAMED]), more)
    for name in sorted(anew):
        log.warning("the state of %s isn't taken: the optimizer, or what it steps, is another", name)
    logs.event(
        "train.started_from",
        url=storage.url,
        step=manifest.step,
        share=coverage.share,
        renamed={new: old for new, old in (*coverage.tables.items(), *coverage.dense.items()) if new != old},
        missing=coverage.missing,
        unfit=coverage.unfit,
        unused=coverage.unused,
        anew=sorted(anew),
    )
