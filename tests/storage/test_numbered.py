"""Objects that carry a number in their key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.contracts import layout
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.numbered import newest_number, numbers


@pytest.mark.parametrize("base", ["", "lineages/20240102"])
def test_numbers_ascend_and_other_keys_are_left_out(tmp_path: Path, base: str) -> None:
    storage = LocalStorage(tmp_path)
    for key in (
        layout.release(100_000_000),
        layout.release(9),
        layout.release(10),
        "releases/notes.txt",
        "releases.txt",
        layout.term(99),
    ):
        storage.write(f"{base}/{key}".lstrip("/"), b"x")
    assert numbers(storage, "releases", layout.release_sequence, base=base) == [9, 10, 100_000_000]
    assert newest_number(storage, "releases", layout.release_sequence, base=base) == 100_000_000


def test_without_objects_there_is_no_number(tmp_path: Path) -> None:
    assert newest_number(LocalStorage(tmp_path), "terms", layout.term_number) == 0
