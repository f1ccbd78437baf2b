"""`python -m tidemill.testing.maxcompute DIR PORT PARENT`: what MaxComputeProcess starts. People use the `tidemill` command."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tidemill.errors import TidemillError
from tidemill.testing.maxcompute.run import run_emulator


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder, port, parent = sys.argv[1:]
    try:
        run_emulator(Path(folder), int(port), int(parent))
    except TidemillError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
