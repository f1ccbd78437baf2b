"""Waits until a date's table is complete."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.clock import Clock
from tidemill.errors import DeadlineError, StorageError
from tidemill.lineage.cycle import DailyConfig
from tidemill.lineage.dates import dated
from tidemill.logs import log

# Between two looks at a table that isn't complete.
_LOOK_S = 5.0


def table_lacks(daily: DailyConfig, date: str) -> str:
    """What the daily table of a date lacks, a store that can't be asked included; "" if it is complete. Raises ConfigError."""
    # Arrow takes half a second to load, which the help of a command has no use for.
    from tidemill.lineage.tables import missing

    try:
        return missing(dated(daily.input_path, date), dated(daily.complete.marker, date))
    except StorageError as error:
        return str(error)


def wait_for_table(daily: DailyConfig, date: str, pause: Callable[[float], bool], clock: Clock) -> bool:
    """Wait until a date's table is complete, at most `daily.complete.wait_s`. False: `pause(seconds)` says that it is given up.

    Raises DeadlineError that says what the table lacks.
    """
    wait_s = daily.complete.wait_s
    until, told = clock.monotonic() + wait_s, ""
    while lacks := table_lacks(daily, date):
        if clock.monotonic() >= until:
            raise DeadlineError(f"the daily table of {date} isn't complete after {wait_s:g} s: {lacks}")
        if lacks != told:
            log.info("waiting for the daily table of %s: %s", date, lacks)
            told = lacks
        if pause(min(_LOOK_S, wait_s)):
            return False
    return True
