"""Where a folder stands in a root, and what a checkpoint path means."""

from __future__ import annotations

import re
from dataclasses import dataclass

_IN_ROOT = re.compile(r"^(?P<root>.*)/(?P<key>(?:daily|lineages)/(?P<date>[^/]+))/?$")
_CHECKPOINT = re.compile(r"^(?P<folder>.*?)/?model\.ckpt-(?P<step>\d+)/?$")


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of a root: ROOT/daily/<date> or ROOT/lineages/<date>."""

    root: str
    key: str
    date: str


def place_of(folder: str) -> Place | None:
    """Where a model folder stands in a root; None if it stands alone."""
    match = _IN_ROOT.match(folder)
    return Place(match["root"], match["key"], match["date"]) if match else None


def checkpoint_path(path: str) -> tuple[str, int | None]:
    """(folder, step) of a path to a checkpoint ("x/model.ckpt-100"), or to a folder of checkpoints (step None: its newest).

    Only a last part named model.ckpt-N means a checkpoint: a run may live in a folder below one.
    """
    match = _CHECKPOINT.match(path)
    return (match["folder"] or ".", int(match["step"])) if match else (path, None)
