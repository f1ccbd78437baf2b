"""`python -m tidemill.testing.broker OPTIONS`: the process that DevelopmentBroker starts. People use `tidemill broker`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from tidemill.errors import TidemillError
from tidemill.testing.broker.server import run_broker
from tidemill.testing.broker.state import BrokerOptions


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fields = json.loads(sys.argv[1])
    try:
        run_broker(BrokerOptions(**{**fields, "directory": Path(fields["directory"])}))
    except TidemillError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
