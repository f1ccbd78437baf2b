"""The model that stops learning: a day's snapshot, scored by the server's own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.data.click_world import FEATURE_FIELDS

CLICK_FEATURES = tuple(field.name for field in FEATURE_FIELDS)


class FrozenModel:
    """The snapshot in a lineage's folder, without any release. `load` once; then any thread may score."""

    def __init__(self, folder: Path, features: Sequence[str] = CLICK_FEATURES) -> None:
        self._folder = folder
        self._features = list(features)
        self._predictor: object = None

    @property
    def is_loaded(self) -> bool:
        return self._predictor is not None

    def load(self) -> None:
        """Read the snapshot. Slow the first time: it imports PyTorch."""
        import torch

        from tidemill.serving.loader import LineageFolder, load_snapshot
        from tidemill.serving.predictor import Predictor
        from tidemill.storage.open import open_storage

        torch.set_num_threads(1)
        self._predictor = Predictor(load_snapshot(LineageFolder(open_storage(self._folder), "")))

    def scores(self, rows: pa.Table) -> np.ndarray:
        """(rows,) float32: click probabilities of raw rows."""
        from tidemill.serving.predictor import Predictor

        assert isinstance(self._predictor, Predictor)
        return self._predictor.score_table(rows.select(self._features))["probs"].reshape(-1)
