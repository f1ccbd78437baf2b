from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from tests.demo.conftest import RootWriter
from tidemill.contracts import layout
from tidemill.contracts.lineage import LineageRecord
from tidemill.contracts.progress import ProgressReport
from tidemill.contracts.serving import ServingStatus
from tidemill.demo.playlog import IMPRESSION_SCHEMA, IMPRESSIONS, ArrowLog, PlayStatus, write_status
from tidemill.demo.state import DemoState, LineageState
from tidemill.demo.watch import Watcher
from tidemill.lineage.orchestrators.children import Children

OLD = "lineages/20260302"


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    children = Children(tmp_path / "logs")
    yield children
    children.close()


def test_the_state_follows_the_documents(root: RootWriter, children: Children, tmp_path: Path) -> None:
    state = DemoState(speed=100.0, lineages={OLD: LineageState(OLD)})
    write_status(tmp_path, PlayStatus(started_at=1.0, event_time=1000.0, requests=12, failed=1, last_error="503"))
    progress = ProgressReport(data_ts=900.0, step=7, released_watermark=800.0, metrics={"auc": 0.7})
    root.storage.write(f"{OLD}/{layout.PROGRESS}", progress.to_bytes())
    served = ServingStatus(
        server="s",
        url="http://127.0.0.1:1",
        heartbeat=1,
        ready=True,
        deployment=1,
        lineage=OLD,
        snapshot_digest=None,
        term=1,
        sequence=5,
        step=7,
        watermark=750.0,
        swapped_at=None,
        updated_at=0.0,
    )
    root.storage.write(layout.serving_status("s"), served.to_bytes())
    log = ArrowLog(tmp_path / IMPRESSIONS, IMPRESSION_SCHEMA)
    log.append([{"is_random": n % 2, "click": int(n == 1), "served_score": float(n == 1)} for n in range(4)])
    watcher = Watcher(state, root.storage, children, tmp_path)
    watcher.scorer = lambda rows: np.asarray(pc.subtract(1.0, rows["served_score"]))
    watcher.start()
    try:
        lineage = state.lineages[OLD]
        eventually(lambda: state.auc_served is not None and lineage.lag_s is not None and bool(state.samples))
        assert (state.requests, state.failed, state.last_error) == (12, 1, "503")
        assert (lineage.step, lineage.watermark, lineage.released_watermark, lineage.lag_s) == (7, 900.0, 800.0, 100.0)
        assert lineage.metrics == {"auc": 0.7}
        assert (state.server.ready, state.server.sequence, state.server.behind_s) == (True, 5, 2.5)
        # On the random rows only, which the model ranked rightly and its opposite wrongly.
        assert (state.auc_served, state.auc_frozen) == (1.0, 0.0)
        assert "12 requests, 1 failed" in state.line()
        retired = LineageRecord(status="retired", successor="lineages/20260303")
        root.storage.write(f"{OLD}/{layout.LINEAGE}", retired.to_bytes())
        eventually(lambda: lineage.status == "retired")
    finally:
        watcher.stop()
        log.close()
