"""The command `tidemill`: one small file a command, imported when it is called."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

import typer

from tidemill import logs
from tidemill.cli import config, cycle, lineage
from tidemill.cli.broker import broker
from tidemill.cli.demo import demo
from tidemill.cli.evaluate import evaluate
from tidemill.cli.export import export
from tidemill.cli.inspect import inspect
from tidemill.cli.maxcompute_emulator import maxcompute_emulator
from tidemill.cli.options import EITHER_SPELLING, hyphens
from tidemill.cli.predict import predict
from tidemill.cli.serve import serve
from tidemill.cli.trace import trace
from tidemill.cli.train import train
from tidemill.cli.verify import verify
from tidemill.errors import TidemillError

app = typer.Typer(
    help="Online learning for recommendation models, from event stream to served model.",
    epilog=EITHER_SPELLING,
    context_settings={"token_normalize_func": hyphens},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(epilog=EITHER_SPELLING)(train)
app.command("eval", epilog=EITHER_SPELLING)(evaluate)
app.command(epilog=EITHER_SPELLING)(export)
app.command(epilog=EITHER_SPELLING)(predict)
app.command()(serve)
app.command()(broker)
app.command()(maxcompute_emulator)
app.command()(inspect)
app.command()(verify)
app.command()(trace)
app.command()(demo)
app.add_typer(config.app, name="config", help="Check and explain pipeline configs.")
app.add_typer(cycle.app, name="cycle", help="Run the daily cycle.")
app.add_typer(lineage.app, name="lineage", help="Show, promote, roll back and retire lineages.")


def main() -> None:
    """Run the command line; errors raised on purpose become one message and their exit code."""
    logs.set_up()
    try:
        app()
    except TidemillError as error:
        print(f"error: {error}", file=sys.stderr)
        _exit(error.exit_code)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            _exit(ended.code)
        raise


def _exit(code: int) -> NoReturn:
    """End the process, at once if a thread is left behind: a save that was given up, a store that hangs.

    An interpreter that ends tears such a thread out of whatever native code it is in, and that may abort the process (SIGABRT).
    """
    if any(thread.is_alive() for thread in threading.enumerate() if thread is not threading.main_thread()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
