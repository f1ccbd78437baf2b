"""The one folder that a demo writes, and what lies where."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import ConfigError

_MARKER = ".tidemill-demo"


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """Paths below the demo's folder."""

    path: Path

    @property
    def root(self) -> Path:
        """ROOT of the cycle."""
        return self.path / "root"

    @property
    def broker(self) -> Path:
        return self.path / "broker"

    @property
    def cycle(self) -> Path:
        return self.path / "cycle.yaml"

    @property
    def pipeline(self) -> Path:
        return self.path / "pipeline.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def serving_events(self) -> Path:
        """The server's events: swaps and load errors."""
        return self.logs / "serve-events.jsonl"

    @property
    def players(self) -> Path:
        """What the players write: options, status, impressions, requests."""
        return self.path / "players"

    def table(self, date: str) -> Path:
        """The Parquet files of a day."""
        return self.path / "data" / date


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Hold a folder, made if it's missing, against other demos; the kernel gives it back if this process dies.

    Raises ConfigError if another demo holds it, or it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {path}: isn't a folder, and can't be made one: {error.strerror}") from None
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--dir {path}: another demo plays there; stop it, or name another folder") from None
        yield
    finally:
        os.close(handle)


def claim(path: Path) -> DemoFolder:
    """Make the demo's folder, empty but for a marker. What an earlier demo left there is deleted.

    Raises ConfigError, and deletes nothing, for a folder with anything in it that no demo has made.
    """
    path = path.absolute()
    if path.exists():
        if not path.is_dir():
            raise ConfigError(f"--dir {path}: isn't a folder")
        if any(path.iterdir()) and not (path / _MARKER).is_file():
            raise ConfigError(f"--dir {path}: isn't empty, and no demo has made it; name another folder, or delete it yourself")
        for entry in path.iterdir():
            if entry.name == _MARKER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    path.mkdir(parents=True, exist_ok=True)
    (path / _MARKER).write_text("made by `tidemill demo`, which deletes what is in here when it runs again\n", encoding="utf-8")
    folder = DemoFolder(path)
    for made in (folder.root, folder.broker, folder.logs, folder.players):
        made.mkdir()
    return folder
