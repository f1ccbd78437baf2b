"""`${bizdate}` over MaxCompute: the cycle's daily step of two dates, one process each, against the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_maxcompute_daily import CLICKS, ROWS, TODAY, YESTERDAY, assert_every_row_once, day
from tests.e2e.workshop import PIPELINE, Workshop
from tidemill.lineage.records import run_records
from tidemill.storage.open import open_storage
from tidemill.testing.maxcompute import MaxComputeProcess

CYCLE = """\
root: {root}
pipeline_config: pipeline.yaml
daily:
  input_path: {clicks}/dt=${{bizdate}}
  edits: {{data_config.dataset_type: OdpsDataset, data_config.is_orderby_partition: true}}
stream: {{input_path: "kafka://127.0.0.1:1/clicks?group.id=ol_${{bizdate}}"}}
"""


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MaxComputeProcess]:
    with MaxComputeProcess(tmp_path / "maxcompute") as running:
        credentials = tmp_path / "odps.ini"
        credentials.write_text(f"access_id=id\naccess_key=secret\nend_point={running.endpoint}\n")
        monkeypatch.setenv("ODPS_CONFIG_FILE_PATH", str(credentials))
        yield running


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_date_trains_on_its_own_partition_and_waits_for_it(tmp_path: Path, emulator: MaxComputeProcess) -> None:
    """Issue 5, B6: a day that isn't there yet ends with 75; the next one continues the day before and reads its own rows alone."""
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(PIPELINE.format(data=tmp_path, root=tmp_path / "root"))
    (tmp_path / "cycle.yaml").write_text(CYCLE.format(root=tmp_path / "root", clicks=CLICKS))
    workshop = Workshop(tmp_path, pipeline, tmp_path)

    def step(date: str, *, expect: int = 0) -> None:
        workshop.run("cycle", "step", str(tmp_path / "cycle.yaml"), "--date", date, "--step", "train_daily", expect=expect)

    emulator.add_table("prj", "clicks", {f"dt={YESTERDAY}": day(tmp_path, 1)})
    step(YESTERDAY)
    step(TODAY, expect=75)
    emulator.add_table("prj", "clicks", {f"dt={TODAY}": day(tmp_path, 2)})
    step(TODAY)
    step(TODAY)
    root = open_storage(tmp_path / "root")
    for date in (YESTERDAY, TODAY):
        assert_every_row_once(workshop.root / "daily" / date, date)
        (record,) = run_records(root, prefix=f"daily/{date}")
        assert (record.kind, record.status, record.date) == ("train_daily", "completed", date)
    assert record.examples == 2 * ROWS
