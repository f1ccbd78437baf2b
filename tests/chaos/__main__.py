"""`scripts/chaos`: random stories until time is up; tables, then the figures as one JSON object."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from tests.chaos import cycle_main, row_stories, stories
from tests.chaos.cycle_faults import FAULTS
from tests.e2e.stream import small_base
from tidemill.testing.broker import DevelopmentBroker

Play = Callable[[Path], Any]
SIMULATED = 1000
"""How many stories are simulated before the first real one."""


def main() -> int:
    """Exit code 0 if every story ended as it must."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, help="no story begins after that (default: 10; with --cycle: each fault once)")
    parser.add_argument("--seed", type=int, default=0, help="of the first stories; the next ones count on")
    parser.add_argument("--cycle", action="store_true", help="stories of the daily cycle instead: three days and one fault each")
    kinds = ["simulation", "stream", *row_stories.KINDS]
    parser.add_argument("--only", choices=[*kinds, *FAULTS], help="stories of one kind; with --cycle: of one fault")
    options = parser.parse_args()
    if options.only is not None and (options.only in FAULTS) != options.cycle:
        parser.error(
            f"--only {options.only} is {'a story of the cycle: add' if options.only in FAULTS else 'not a fault of'} --cycle"
        )
    if options.cycle:
        return cycle_main.run(options.seed, options.minutes, options.only)
    simulated = _simulate(options.seed) if options.only in (None, "simulation") else {"broken": []}
    if options.only == "simulation":
        print(json.dumps(simulated))
        return 1 if simulated["broken"] else 0
    folder = Path(tempfile.mkdtemp(prefix="tidemill-chaos-"))
    until = time.monotonic() + 60 * (10.0 if options.minutes is None else options.minutes)
    figures: list[Any] = []
    broken: list[str] = []
    print("validating trainer: ", row_stories.head(), "real trainer: ", stories.head(), sep="\n", flush=True)
    with DevelopmentBroker(folder / "broker") as broker:
        for name, play in _stories(options.seed, options.only, folder, broker):
            if time.monotonic() > until:
                break
            try:
                found = play(folder / name)
            except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
                broken.append(name)
                print(f"{name} broke: {str(error)[-3000:]}", flush=True)
                continue
            figures.append(found)
            print(stories.row(found) if isinstance(found, stories.Figures) else row_stories.row(found), flush=True)
            if found.is_clean:
                shutil.rmtree(folder / name)
    clean = not (broken or simulated["broken"]) and all(one.is_clean for one in figures)
    if clean:
        shutil.rmtree(folder)
    else:
        print(f"what broken stories left behind is in {folder}")
    real = [one for one in figures if isinstance(one, stories.Figures)]
    kills = {"real": sum(one.kills for one in real), "all": sum(one.kills for one in figures)}
    told = [asdict(one) for one in figures]
    print(json.dumps({"clean": clean, "broken": broken, "kills": kills, "simulation": simulated, "stories": told}))
    return 0 if clean else 1


def _simulate(seed: int) -> dict[str, Any]:
    """The figures of simulated stories, which take seconds: others for each seed. What broke is on stderr."""
    command = [sys.executable, "-m", "tests.simulation", "--stories", str(SIMULATED), "--seed", str(seed * SIMULATED)]
    played = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=600)
    figures: dict[str, Any] = json.loads(played.stdout)
    print("simulated: ", figures, flush=True)
    return figures


def _stories(seed: int, only: str | None, folder: Path, broker: DevelopmentBroker) -> Iterator[tuple[str, Play]]:
    """(name, what plays it in a folder): of each kind in turn, with the next seed each round."""
    for number in count(seed):
        for kind in (*row_stories.KINDS, "stream"):
            if only in (None, kind):
                yield f"{kind}-{number}", _player(kind, number, folder, broker)


def _player(kind: str, seed: int, folder: Path, broker: DevelopmentBroker) -> Play:
    if kind == "stream":
        return lambda place: stories.play(seed, place, small_base(folder / "base"), broker)
    return lambda place: row_stories.play(seed, place, kind, broker)


if __name__ == "__main__":
    raise SystemExit(main())
