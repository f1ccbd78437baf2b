"""The twenty behaviours of reading, training, saving and going on: each is shown by tests that cite it as "DCL 9.n".

docs/explanation/exactly_once.md lists them with the files of those tests; it says just what is cited.
`UPDATE_GOLDEN=1` writes its table anew.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "explanation" / "exactly_once.md"
_CITATION = re.compile(r"DCL ((?:9\.\d+(?:, )?)+)")
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)


def cited() -> dict[int, list[str]]:
    """Behaviour -> the test files that cite it, from the tests' root."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__):
            for numbers in _CITATION.findall(path.read_text()):
                for number in re.findall(r"9\.(\d+)", numbers):
                    found[int(number)].add(path.relative_to(TESTS.parent).as_posix())
    return {number: sorted(files) for number, files in found.items()}


@pytest.mark.parametrize("number", range(1, 21))
def test_each_behaviour_is_shown_by_a_test(number):
    assert cited().get(number), f"no test cites DCL 9.{number}"


def test_no_other_behaviour_is_cited():
    assert set(cited()) <= set(range(1, 21))


def test_the_page_lists_the_tests_of_each_behaviour():
    text = PAGE.read_text()
    files = cited()

    def row(match: re.Match[str]) -> str:
        listed = ", ".join(f"`{file}`" for file in files.get(int(match[1]), []))
        return f"| {match[1]} | {match[2]} | {listed} |"

    assert [int(number) for number, _, _ in _ROW.findall(text)] == list(range(1, 21))
    expected = _ROW.sub(row, text)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected, "run `UPDATE_GOLDEN=1 pytest tests/test_acceptance.py`"
