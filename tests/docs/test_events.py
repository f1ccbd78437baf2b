"""The reference lists every event that the code writes, with its fields, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidemill
from tests.docs.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference" / "events.md"
PACKAGE = Path(tidemill.__file__).parent
_ROW = re.compile(r"^\| `(?P<name>[\w.]+)` \| (?P<rest>.*) \|$", re.MULTILINE)


def event_calls() -> Iterator[ast.Call]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix() != "logs.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("event", "logs.event"):
                    yield node


def written() -> dict[str, set[str]]:
    """Event -> the fields that are named where it is written."""
    found: dict[str, set[str]] = {}
    for call in event_calls():
        name = call.args[0]
        assert isinstance(name, ast.Constant), f"an event needs a literal name: {ast.unparse(call)}"
        found.setdefault(name.value, set()).update(keyword.arg for keyword in call.keywords if keyword.arg)
    return found


def documented() -> dict[str, str]:
    """Event -> the rest of its row."""
    return {match["name"]: match["rest"] for match in _ROW.finditer(PAGE.read_text(encoding="utf-8"))}


def test_events_are_found():
    assert len(written()) > 20


def test_the_reference_lists_the_events_that_are_written():
    assert set(documented()) == set(written())


@pytest.mark.parametrize("name", sorted(written()))
def test_the_reference_names_every_field(name: str):
    row = documented()[name]
    assert not {field for field in written()[name] if f"`{field}`" not in row}
