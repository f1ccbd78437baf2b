"""`scripts/chaos --cycle`: every fault of the daily cycle once, in random order; a table, then the figures as one JSON object."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np

from tests.chaos.cycle_faults import FAULTS
from tests.chaos.cycle_stories import CycleFigures, head, play, row
from tidemill.testing.broker import DevelopmentBroker


def run(seed: int, minutes: float | None, only: str | None) -> int:
    """Exit code 0 if every story ended as it must. `minutes`: go on with the next seeds; no story begins after that."""
    # Whoever ends this ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="tidemill-cycle-"))
    until = None if minutes is None else time.monotonic() + 60 * minutes
    figures: list[CycleFigures] = []
    broken: list[str] = []
    print(f"seed {seed}", head(), sep="\n", flush=True)
    for fault, number in _stories(seed, only):
        if number > seed if until is None else time.monotonic() > until:
            break
        name = f"{fault}-{number}"
        try:
            # A broker of its own: stories kill it.
            with DevelopmentBroker(folder / f"{name}-broker") as broker:
                found = play(fault, number, folder / name, broker)
        except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
            broken.append(name)
            print(f"{name} broke (--seed {number} --only {fault}):\n{error}", flush=True)
            continue
        figures.append(found)
        print(row(found), flush=True)
        if found.is_clean:
            shutil.rmtree(folder / name)
            shutil.rmtree(folder / f"{name}-broker")
        else:
            broken.append(name)
            print(f"{name} isn't clean (--seed {number} --only {fault}):\n{found.story}", flush=True)
    if broken:
        print(f"what broken stories left behind is in {folder}")
    else:
        shutil.rmtree(folder)
    print(json.dumps({"clean": not broken, "seed": seed, "broken": broken, "stories": [asdict(one) for one in figures]}))
    return 1 if broken else 0


def _stories(seed: int, only: str | None) -> Iterator[tuple[str, int]]:
    """(fault, seed): all faults in an order of each seed's own, seed after seed."""
    for number in count(seed):
        order = np.random.default_rng([number, 5]).permutation(list(FAULTS)).tolist()
        yield from ((fault, number) for fault in order if only in (None, fault))
