"""The emulator as a process of its own, until a signal ends it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from tidemill.testing.maxcompute.emulator import MaxComputeEmulator
from tidemill.testing.maxcompute.files import write_whole

logger = logging.getLogger(__name__)

ADDRESS_FILE = Path(".emulator", "address.json")
_PARENT_POLL_S = 0.5


def run_emulator(folder: Path, port: int, parent: int | None = None) -> None:
    """Serve until SIGINT or SIGTERM, or until the process `parent`, which started this one, is gone. For the main thread.

    While it runs, `.emulator/address.json` in the folder says where it listens. Raises StorageError if another emulator works
    in the folder, ConfigError if the port is taken.
    """
    stop = threading.Event()
    # Before the address is told: whoever reads it may send a signal at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with MaxComputeEmulator(folder, port) as emulator:
        for table in emulator.adopted:
            logger.info("took up table %s", table)
        write_whole(folder / ADDRESS_FILE, json.dumps({"pid": os.getpid(), "endpoint": emulator.endpoint}).encode())
        logger.info("MaxCompute emulator on %s: %s", folder, emulator.endpoint)
        _wait(stop.wait, parent)
    (folder / ADDRESS_FILE).unlink(missing_ok=True)


def _wait(stopped: Callable[[float], bool], parent: int | None) -> None:
    while not stopped(_PARENT_POLL_S):
        if parent is not None and os.getppid() != parent:
            logger.info("process %d, which started this emulator, is gone", parent)
            return
