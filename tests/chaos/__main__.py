"""`scripts/chaos`: random stories until time is up; a table, then the figures as one JSON object."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.chaos.stories import Figures, head, play, row
from tests.e2e.stream import small_base
from tidemill.testing.broker import DevelopmentBroker


def main() -> int:
    """Exit code 0 if every story ended as it must."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="no story begins after that")
    parser.add_argument("--seed", type=int, default=0, help="of the first story; the next ones count on")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tidemill-chaos-"))
    until = time.monotonic() + 60 * options.minutes
    figures: list[Figures] = []
    broken: dict[int, str] = {}
    print(head(), flush=True)
    with DevelopmentBroker(folder / "broker") as broker:
        base = small_base(folder / "base")
        seed = options.seed
        while time.monotonic() < until:
            try:
                figures.append(play(seed, folder / f"story-{seed}", base, broker))
            except AssertionError as error:
                broken[seed] = str(error)[-2000:]
                print(f"story {seed} broke: {broken[seed]}", flush=True)
            else:
                print(row(figures[-1]), flush=True)
                if figures[-1].is_clean:
                    shutil.rmtree(folder / f"story-{seed}")
            seed += 1
    clean = not broken and all(one.is_clean for one in figures)
    if clean:
        shutil.rmtree(folder)
    else:
        print(f"what broken stories left behind is in {folder}")
    print(json.dumps({"clean": clean, "broken": sorted(broken), "stories": [asdict(one) for one in figures]}))
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
