"""A stream whose parent checkpoint, and the snapshot of it, were written by an older tidemill."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack

import pytest

from tests.checkpoint.ranks import Ranks
from tests.contracts.examples import EXAMPLES
from tidemill.checkpoint.discovery import read_checkpoint
from tidemill.contracts import layout
from tidemill.contracts.base import canonical
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.errors import LineageError
from tidemill.jobs.start import start_run
from tidemill.storage.backends.local import LocalStorage


class Alone:
    def share(self, value):
        return value


def first_version(data: bytes) -> bytes:
    """A checkpoint's manifest as version 1 wrote it: without a seal and a count of increments."""
    body = json.loads(data) | {"schema": "tidemill.checkpoint/1"}
    return canonical({key: value for key, value in body.items() if key not in ("increments", "sha256")})


def begin(tmp_path):
    with ExitStack() as resources:
        return start_run(
            LocalStorage(tmp_path / "stream"),
            Alone(),
            resources,
            rank=0,
            world_size=1,
            continue_train=False,
            fine_tune_checkpoint=str(tmp_path / "daily" / "model.ckpt-5"),
        )


def test_the_snapshot_of_a_version_1_checkpoint_is_known_again(tmp_path):
    """D4: the digest that was exported is that of the bytes in the store, not of their upgraded form."""
    daily, stream = LocalStorage(tmp_path / "daily"), LocalStorage(tmp_path / "stream")
    ranks = Ranks(daily)
    assert ranks.save(5)
    ranks.close()
    key, _ = read_checkpoint(daily, 5)
    old = first_version(daily.read(key))
    daily.write(key, old)
    digest = hashlib.sha256(old).hexdigest()
    snapshot = next(one for one in EXAMPLES if isinstance(one, SnapshotManifest))
    stream.write(layout.SNAPSHOT, snapshot.model_copy(update={"checkpoint_digest": digest}).to_bytes())
    assert begin(tmp_path).parent_record.digest == digest
    daily.write(key, old.replace(b'"examples": 50', b'"examples": 51'))
    with pytest.raises(LineageError, match="fine_tune_checkpoint"):
        begin(tmp_path)
