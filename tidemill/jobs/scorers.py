"""Who scores offline: a lineage's newest release as a server would, or a checkpoint's model on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from tidemill.checkpoint.leases import held_checkpoint
from tidemill.config.data import DataConfig
from tidemill.config.load import load_pipeline
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.distributed.runtime import Runtime
from tidemill.errors import ConfigError
from tidemill.features.batch import Batch
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.jobs.place import checkpoint_path
from tidemill.jobs.ranks import Ranks, lead, together
from tidemill.jobs.scoring import restored_step
from tidemill.registry import component_config
from tidemill.serving.generation import Generation
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.base import Storage
from tidemill.storage.files import read_file
from tidemill.storage.open import open_storage
from tidemill.training.step import TrainStep, padding_batch

B = TypeVar("B")

BATCH_ROWS = 4096
"""Rows that a lineage's release scores at once."""

_READING = (
    "delimiter",
    "with_header",
    "input_fields",
    "input_fields_str",
    "is_orderby_partition",
    "odps_data_quota_name",
    "odps_data_compression",
    "maxcompute",
)
"""Fields of data_config that say how rows are read, and nothing of what the model makes of them."""


class Scorer(Protocol[B]):
    """Scores batches. `name`: for people; `batch_rows`: how many rows at once; `config`: of the model, read when it's needed."""

    name: str
    features: FeatureSet
    batch_rows: int
    config: Callable[[], PipelineConfig]

    def prepare(self, rows: pa.Table) -> B:
        """What the model takes of the rows, at most `batch_rows`. Any thread may call."""
        ...

    def score(self, batch: B | None) -> Mapping[str, np.ndarray]:
        """Outputs by name, a value for each row. `batch` None: this rank has no rows now, but the others may need its part of the
        model. Collective."""
        ...


class ServedScorer:
    """A lineage's newest release; each rank has the whole model. Collective: rank 0 chooses the release."""

    def __init__(self, folder: str, ranks: Ranks, batch_rows: int | None, edits: str | None) -> None:
        """`edits`: changes to how rows are read; whatever else the exported config says is in the model."""
        storage = open_storage(folder)
        generation = _same_generation(storage, ranks)
        release = f"release {generation.sequence}" if generation.sequence else "the snapshot"
        self.name = f"{generation.lineage}, {release}"
        self.features = generation.model.features
        self.batch_rows = batch_rows or BATCH_ROWS
        self.config = lambda: _exported_config(storage, generation, edits)
        if edits:
            # What is wrong with them shall be told, also if nothing of the config is needed.
            self.config()
        self._predictor = Predictor(generation)

    def prepare(self, rows: pa.Table) -> pa.Table:
        return rows

    def score(self, batch: pa.Table | None) -> Mapping[str, np.ndarray]:
        return {} if batch is None else self._predictor.score_table(batch)


class TrainedScorer:
    """A checkpoint; its tables are spread over the ranks. Collective: rank 0 chooses the checkpoint."""

    def __init__(
        self, config: PipelineConfig, ranks: Ranks, runtime: Runtime, checkpoint: str | None, batch_rows: int | None
    ) -> None:
        folder, step = checkpoint_path(checkpoint or config.model_dir)
        storage = open_storage(folder)
        self.features = pipeline.feature_set(config)
        with ExitStack() as held:
            key = lead(ranks, lambda: held.enter_context(held_checkpoint(storage, step))[0])
            manifest = CheckpointManifest.parse(storage.read(key), where=f"{storage.url}/{key}")
            self._model: TrainStep = restored_step(config, self.features, runtime, storage, manifest)
            # All ranks have read it: only now may it go.
            together(ranks, lambda: None)
        self.name = f"{storage.url}, step {manifest.step}"
        self.batch_rows = batch_rows or config.data_config.eval_batch_size or config.data_config.batch_size
        self.config = lambda: config
        self._padding = padding_batch(self.features, (), self.batch_rows)

    def prepare(self, rows: pa.Table) -> Batch:
        return self.features.transform(rows.combine_chunks(), size=self.batch_rows, with_labels=False)

    def score(self, batch: Batch | None) -> Mapping[str, np.ndarray]:
        return self._model.scores(self._padding if batch is None else batch)


def _same_generation(storage: Storage, ranks: Ranks) -> Generation:
    """Rank 0's newest release, on every rank."""
    loaded: list[Generation] = []

    def newest() -> list[int]:
        loaded.append(load_generation(storage, ""))
        return list(loaded[0].position)

    term, sequence = lead(ranks, newest)

    def the_same() -> None:
        if not loaded:
            loaded.append(load_generation(storage, "", up_to=(term, sequence)))

    together(ranks, the_same)
    return loaded[0]


def _exported_config(storage: Storage, generation: Generation, edits: str | None) -> PipelineConfig:
    """The config that the snapshot was trained with, and edits to how rows are read. The environment changes nothing of it.

    Raises ConfigError for an edit of anything else.
    """
    text = read_file(storage, generation.model.manifest.pipeline).decode()
    exported = load_pipeline(text, component_config, environ={}).config
    if not edits:
        return exported
    edited = load_pipeline(text, component_config, environ={}, edits=edits).config
    allowed = exported.model_copy(update={"data_config": _reading_of(exported, edited)})
    if edited != allowed:
        names = ", ".join(f"data_config.{name}" for name in _READING)
        raise ConfigError(
            f"--edit_config_json: the exported model is as it is; of its config, only how rows are read counts: {names}"
        )
    return edited


def _reading_of(exported: PipelineConfig, edited: PipelineConfig) -> DataConfig:
    """The exported settings of data, with those of reading as edited."""
    return exported.data_config.model_copy(update={name: getattr(edited.data_config, name) for name in _READING})
