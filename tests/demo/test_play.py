"""The whole life, small: slow tests with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidemill.demo import analysis
from tidemill.demo.director import Director
from tidemill.demo.folder import claim
from tidemill.demo.plan import DemoPlan

REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def processes_below(folder: Path) -> list[str]:
    """Command lines of running processes that name a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in command:
                found.append(command)
    return found


def test_a_small_demo_with_chaos_loses_nothing(tmp_path: Path) -> None:
    plan = DemoPlan(
        first_day_rows=20_000,
        day_s=24.0,
        requests_per_s=25.0,
        candidates=32,
        best_shown=6,
        after_switch_s=1.0,
        tolerance_wall_s=6.0,
        kills=2,
    )
    director = Director(plan, 5, claim(tmp_path / "demo-run"), print)
    began = time.time()
    director.run()
    assert not processes_below(tmp_path)
    findings = analysis.analyse(director)
    report = analysis.report(director, findings, wall_s=time.time() - began, error=None)
    assert report["failures"] == []
    assert report["ok"]
    assert len(report["kills"]) == 2
    assert report["requests"]["failed"] == 0
    rows = report["rows"]
    assert (rows["lost"], rows["doubled"], rows["retired"]["lost"], rows["retired"]["doubled"]) == (0, 0, 0, 0)
    assert rows["in_stream"] == rows["trained_once"] == rows["second_table"]["in_stream"] + rows["stream"]["in_stream"]
    assert rows["stream"]["in_stream"] > 0
    assert report["verify"]["keys_compared"] > 0
    assert report["handover"]["restart_exit_code"] == 77
    assert sum(stage["p50"] for stage in report["freshness_s"]["stages"].values()) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_and_the_report_says_what_happened(tmp_path: Path, number: signal.Signals) -> None:
    folder, report = tmp_path / "demo-run", tmp_path / "report"
    argv = [sys.executable, "-m", "tidemill", "demo", "--fast", f"--dir={folder}", f"--report={report}"]
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, cwd=REPOSITORY, start_new_session=True)
    try:
        until = time.monotonic() + 120.0
        while "train_daily" not in "".join(processes_below(folder)) and "model_dir" not in "".join(processes_below(folder)):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60.0) == 130
        assert not processes_below(folder)
    finally:
        process.kill()
        process.wait()
    told = json.loads((report / "report.json").read_text())
    assert not told["ok"]
    assert "StopRequestedError" in told["error"]
    assert "stopped" in output.read_text()
