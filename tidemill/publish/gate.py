"""The gate: what a release must pass before it is committed (D6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.errors import PublishError

TOLERANCE = 1e-4
"""How far a score of the served program may lie from the trainer's: their lookups sum in different orders."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A release about to be committed, as read back from storage."""

    term: int
    sequence: int
    """The one it will get unless another writer is faster."""
    step: int
    watermark: float | None
    segments: Sequence[Mapping[str, np.ndarray]]
    """Arrays of each segment file: `<table>/ids` with `<table>/rows`, `<table>/deleted`."""
    dense: Mapping[str, np.ndarray] | None
    """All dense weights by name; None: unchanged."""


Score = Callable[[Candidate], Mapping[str, np.ndarray]]
"""Scores of the snapshot's probe rows, by output, as a server would give them with the candidate on top of all releases so far."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Everything finite, and the candidate scores the probe rows as the trainer does. `score` None: the first only."""

    score: Score | None = None
    tolerance: float = TOLERANCE

    def check(self, candidate: Candidate, expected: Mapping[str, np.ndarray] | None) -> None:
        """Raise PublishError naming table and id, tensor, or output and probe row, with the reason.

        `expected`: the trainer's scores by output; None: nothing to compare with.
        """
        check_finite(candidate)
        if expected is None or self.score is None:
            return
        try:
            scores = self.score(candidate)
        except Exception as error:  # plug-in call: whatever it raises, the candidate can't be served
            raise PublishError(f"the candidate can't score the probe rows: {type(error).__name__}: {error}") from error
        compare_scores(scores, expected, self.tolerance)


def check_finite(candidate: Candidate) -> None:
    """Raise PublishError for the first row or dense tensor that isn't finite."""
    for arrays in candidate.segments:
        for name, array in arrays.items():
            if name.endswith("/rows") and (bad := _first_bad(array)) is not None:
                table = name.removesuffix("/rows")
                raise PublishError(f"table {table!r}: the row of id {int(arrays[f'{table}/ids'][bad])} isn't finite")
    for name, array in (candidate.dense or {}).items():
        if _first_bad(array) is not None:
            raise PublishError(f"dense tensor {name!r} isn't finite")


def compare_scores(scores: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Raise PublishError naming output, probe row and difference unless all scores lie within the tolerance."""
    for output, wanted in expected.items():
        found = scores.get(output)
        if found is None or len(found) != len(wanted):
            rows = "no" if found is None else str(len(found))
            raise PublishError(f"output {output!r}: {rows} scores for {len(wanted)} probe rows")
        difference = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).reshape(len(wanted), -1)
        # NaN compares false, so it is bad too.
        bad = np.flatnonzero(~(difference <= tolerance).all(axis=1))
        if len(bad):
            row = int(bad[0])
            raise PublishError(
                f"output {output!r}: probe row {row} is {found[row]} as served and {wanted[row]} as trained, a difference of"
                f" {difference[row].max():.3g}, more than {tolerance:g} ({len(bad)} of {len(wanted)} rows differ)"
            )


def _first_bad(array: np.ndarray) -> int | None:
    """The first index along the first dimension that holds something not finite."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return None
    return int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0]) if array.ndim else 0
