"""Many simulated stories, on all cores."""

from __future__ import annotations

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tidemill.testing.simulation.story import SimulationFigures, StoryError, play


def play_many(first: int, stories: int) -> dict[str, object]:
    """Play so many stories from a seed on, on all cores; prints what went wrong, and returns the figures."""
    began = time.monotonic()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        played = list(pool.map(_play, range(first, first + stories), chunksize=16))
    done = [one for one in played if isinstance(one, SimulationFigures)]
    broken = sorted(one for one in played if isinstance(one, tuple))
    for seed, error in broken[:3]:
        print(f"story {seed} broke: {error[-4000:]}", file=sys.stderr)
    return {
        "seed": first,
        "stories": stories,
        "broken": [seed for seed, _ in broken],
        "runs": sum(one.runs for one in done),
        "kills": sum(one.kills for one in done),
        "freezes": sum(one.freezes for one in done),
        "faults": sum(one.faults for one in done),
        "ids": sum(one.ids for one in done),
        "simulated_s": round(sum(one.simulated_s for one in done)),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _play(seed: int) -> SimulationFigures | tuple[int, str]:
    try:
        return play(seed)
    except StoryError as error:
        return seed, str(error)
