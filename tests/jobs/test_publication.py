"""What the gate scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tidemill.contracts.release import ReleaseManifest
from tidemill.errors import StorageError
from tidemill.jobs.publication import CandidateScores
from tidemill.publish.gate import Candidate
from tidemill.publish.recovery import newest_sequence, read_release
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.arrays import read_arrays
from tidemill.storage.backends.local import LocalStorage


def candidate_of(storage: LocalStorage, release: ReleaseManifest) -> Candidate:
    dense = release.dense
    return Candidate(
        term=release.term,
        sequence=release.sequence,
        step=release.step,
        watermark=release.watermark,
        segments=[read_arrays(storage, entry.key) for entry in release.files if entry != dense],
        dense=None if dense is None else read_arrays(storage, dense.key),
    )


def served(storage: LocalStorage, release: ReleaseManifest) -> np.ndarray:
    generation = load_generation(storage, "", up_to=(release.term, release.sequence))
    assert generation.model.probes is not None
    return Predictor(generation).score_table(generation.model.probes)["probs"]


def test_a_candidate_is_scored_as_it_is_served_later(lineage: Path) -> None:
    storage = LocalStorage(lineage)
    newest = newest_sequence(storage)
    releases = [read_release(storage, sequence) for sequence in range(newest - 2, newest + 1)]
    assert not np.array_equal(served(storage, releases[0]), served(storage, releases[-1]))
    score = CandidateScores(storage)
    for release in releases:
        # Also the newest of its own run: what counted as failed may have been committed after all.
        assert np.array_equal(score(candidate_of(storage, release))["probs"], served(storage, release))


def test_releases_that_cannot_be_read_fail_a_candidate_and_not_the_start(lineage: Path) -> None:
    storage = LocalStorage(lineage)
    newest = read_release(storage, newest_sequence(storage))
    first = lineage / "releases" / "00000001.json"
    whole = first.read_bytes()
    first.write_bytes(whole[:10])
    score = CandidateScores(storage)
    with pytest.raises(StorageError):
        score(candidate_of(storage, newest))
    first.write_bytes(whole)
    assert np.array_equal(score(candidate_of(storage, newest))["probs"], served(storage, newest))
