"""Slices of the rows, by the values of declared features; so many values of each, and no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from tidemill.errors import ConfigError
from tidemill.features.batch import Batch

SliceKey = tuple[str, str]
"""(feature, value)"""
WHOLE: SliceKey = ("", "")
"""Stands for all rows."""
OTHER, NONE = "other", "none"
"""The values beyond the allowed number; rows without a value, or with several."""


class Counted(Protocol):
    """Something with a number of rows."""

    rows: int


CountedT = TypeVar("CountedT", bound=Counted)


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a run: id features, each by its values as the model sees them (ids, after hashing).

    Of each feature a rank tells the first `num_values` values of a window apart, and of those that all ranks have told apart the
    ones with most rows are shown.
    """

    features: Sequence[str] = ()
    num_values: int = 20

    def of(self, batch: Batch) -> dict[str, np.ndarray]:
        """Feature -> the value of each real row, text. Raises ConfigError for a feature that has no pooled ids."""
        return {feature: _values(batch, feature) for feature in self.features}

    def named(self, known: Collection[str], values: np.ndarray) -> np.ndarray:
        """The values, with `OTHER` for those that neither are among the known ones nor have room beside them."""
        names, first = np.unique(values, return_index=True)
        new = [str(name) for name in names[np.argsort(first)] if name not in known and name != NONE]
        room = self.num_values - sum(name not in (OTHER, NONE) for name in known)
        return np.where(np.isin(values, [*known, *new[: max(room, 0)], NONE]), values, OTHER)

    def shown(self, tallies: Mapping[SliceKey, CountedT]) -> list[tuple[SliceKey, CountedT]]:
        """The slices of a window, of each feature those with most rows first."""
        found: list[tuple[SliceKey, CountedT]] = []
        for feature in self.features:
            of_feature = [(key, tally) for key, tally in tallies.items() if key[0] == feature]
            ordered = sorted(of_feature, key=lambda item: (-item[1].rows, item[0]))
            found += [item for item in ordered if item[0][1] in (OTHER, NONE)]
            found += [item for item in ordered if item[0][1] not in (OTHER, NONE)][: self.num_values]
        return found


def _values(batch: Batch, feature: str) -> np.ndarray:
    if feature not in batch.ids.keys:
        known = ", ".join(batch.ids.keys)
        raise ConfigError(f"train_config.progressive_slices: {feature!r} isn't an id feature of the model; known: {known}")
    column = batch.ids.select([feature])
    lengths = column.lengths[: batch.num_rows].cpu().numpy()
    ids = column.values.cpu().numpy()
    starts = np.cumsum(lengths) - lengths
    single = lengths == 1
    values = np.full(batch.num_rows, NONE, dtype="<U20")
    values[single] = ids[starts[single]].astype("<U20")
    return values
