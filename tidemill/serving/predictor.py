"""Scores of one generation: raw columns in, outputs by name. The server, predict, verify and the release gate all use it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch

from tidemill.features.batch import Batch
from tidemill.serving.generation import Generation
from tidemill.serving.inputs import program_inputs

TABLE_ROWS = 4096
"""Rows that `score_table` scores at once."""


class Predictor:
    """Scores with one generation. Threading: any number of threads may score."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def score(self, columns: Mapping[str, pa.Array], num_rows: int) -> dict[str, np.ndarray]:
        """Every output, each with `num_rows` rows. A column of length 1 stands for all rows.

        Raises DataError (naming feature and row) for values that the feature set can't read.
        """
        return self.score_batch(self.generation.model.features.transform_columns(columns, num_rows))

    def score_batch(self, batch: Batch) -> dict[str, np.ndarray]:
        """Every output for the batch's real rows."""
        model = self.generation.model.manifest
        with torch.inference_mode():
            outputs = self.generation.program(program_inputs(model.inputs, self.generation.tables, batch))
            return {name: outputs[name][: batch.num_rows].numpy() for name in model.outputs}

    def score_table(self, table: pa.Table) -> dict[str, np.ndarray]:
        """Every output for all rows of a table, scored in blocks."""
        blocks = [self._score_block(table.slice(at, TABLE_ROWS)) for at in range(0, table.num_rows, TABLE_ROWS)]
        if not blocks:
            return {name: np.empty(0, np.float32) for name in self.generation.model.manifest.outputs}
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _score_block(self, block: pa.Table) -> dict[str, np.ndarray]:
        columns = {name: column.combine_chunks() for name, column in zip(block.column_names, block.columns, strict=True)}
        return self.score(columns, block.num_rows)
