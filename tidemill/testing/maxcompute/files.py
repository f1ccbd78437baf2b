"""Small files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.testing.maxcompute.replies import new_id


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step, so that a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{new_id()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
