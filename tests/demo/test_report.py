from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill.demo import analysis
from tidemill.demo.director import Director
from tidemill.demo.folder import claim
from tidemill.demo.plan import demo_plan
from tidemill.demo.summary import summary

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "demo.md"


@pytest.fixture
def nothing_played(tmp_path: Path) -> dict[str, Any]:
    """The report of a demo that was stopped before it began."""
    director = Director(demo_plan(fast=True, chaos=False), 1, claim(tmp_path), print)
    return analysis.report(director, analysis.analyse(director), wall_s=1.5, error="StopRequestedError: stopped on request")


def names(report: dict[str, Any]) -> Iterator[str]:
    for name, value in report.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def test_a_demo_that_was_stopped_before_it_began_has_a_report_too(nothing_played: dict[str, Any]) -> None:
    assert not nothing_played["ok"]
    assert nothing_played["failures"] == ["it was not played to its end"]
    assert nothing_played["requests"]["total"] == 0
    assert nothing_played["share_closed"] is None
    assert not nothing_played["handover"]["refuses_restart"]
    text = summary(nothing_played)
    assert "NOT OK" in text
    assert "stopped on request" in text


def test_every_field_of_a_report_is_documented(nothing_played: dict[str, Any]) -> None:
    documented = REFERENCE.read_text(encoding="utf-8")
    assert [name for name in names(nothing_played) if f"`{name}`" not in documented] == []


def test_the_reference_names_the_fields_that_only_a_whole_play_has() -> None:
    documented = REFERENCE.read_text(encoding="utf-8")
    parts = ("in_stream", "trained_once", "lost", "doubled", "first_table", "second_table", "stream", "retired")
    assert all(f"`rows.{name}`" in documented for name in parts)
