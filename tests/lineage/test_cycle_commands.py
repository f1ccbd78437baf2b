"""`tidemill cycle plan` and `status`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.cycle import app
from tidemill.lineage.deployments import Pin, deploy
from tidemill.storage.backends.local import LocalStorage


@pytest.fixture
def cycle(tmp_path: Path) -> Path:
    path = tmp_path / "cycle.yaml"
    path.write_text(
        "root: root\npipeline_config: p.yaml\ndaily: {input_path: '${bizdate}.parquet'}\nstream: {input_path: 'kafka://h:1/t?group.id=g'}\n"
    )
    return path


def test_plan_shows_the_steps_and_the_commands_that_are_left(cycle: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(cycle), "--date", "20240102"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith(" ")] == [
        ["train_daily", "next"],
        ["full_export", "waiting"],
        ["train_stream", "waiting"],
        ["deploy", "waiting"],
    ]
    assert "20240102.parquet" in result.output


def test_status_tells_what_is_deployed(cycle: Path) -> None:
    assert "nothing is deployed" in CliRunner().invoke(app, ["status", str(cycle)]).output
    deploy(LocalStorage(cycle.parent / "root"), "lineages/20240102", "d", "by hand", Pin(1, 7))
    output = CliRunner().invoke(app, ["status", str(cycle)]).output
    assert "deployment 1: lineages/20240102, pinned to release 7, deployed because: by hand" in output


@pytest.mark.parametrize("arguments", [["plan", "nowhere.yaml", "--date", "20240102"], ["status", "nowhere.yaml"]])
def test_a_bad_config_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output


def test_a_bad_date_exits_with_2(cycle: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(cycle), "--date", "2024-01-02"])
    assert result.exit_code == 2
    assert "YYYYMMDD" in result.output
