from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tidemill.clock import ManualClock
from tidemill.jobs.train import _record_failure
from tidemill.lineage.records import RunRecorder, RunStart, new_run_id
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.faulty_storage import FaultyStorage


def test_a_store_that_takes_no_record_does_not_hide_why_the_run_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = FaultyStorage(LocalStorage(tmp_path))
    recorder = RunRecorder(full, RunStart(new_run_id(), "train_daily", "20240101"), heartbeat_s=60.0, clock=ManualClock())
    full.fail_at(*range(full.num_operations + 1, 1000))
    logging.getLogger("tidemill").addHandler(caplog.handler)
    try:
        _record_failure(recorder, ValueError("why"))
    finally:
        logging.getLogger("tidemill").removeHandler(caplog.handler)
    assert "the run's record can't be written" in caplog.text
