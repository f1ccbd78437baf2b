"""Simulated stories from a seed on: `python -m tests.simulation --stories 5000 --seed 0`; what broke, then figures."""

from __future__ import annotations

import argparse
import json

from tests.simulation.many import play_many


def main() -> int:
    """Exit code 0 if every story ended as it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--stories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first story; the next ones count on")
    options = parser.parse_args()
    figures = play_many(options.seed, options.stories)
    print(json.dumps(figures))
    return 1 if figures["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
