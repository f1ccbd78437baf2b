"""Which dates a schedule has made due, and what is left to do for them: pure functions of the clock and the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill.errors import ConfigError
from tidemill.lineage.cron import parse_cron
from tidemill.lineage.cycle import CycleConfig, boundary, next_date


def due_dates(config: CycleConfig, now: float) -> list[str]:
    """All dates from the schedule's first that are due, but for those that it skips, in order.

    A date is due at the schedule's first time at or after its boundary. Raises ConfigError without a schedule.
    """
    schedule = config.schedule
    if schedule is None:
        raise ConfigError("schedule: the cycle's config needs this section to run without --date")
    cron, found, date = parse_cron(schedule.cron), [], schedule.first_date
    while cron.next_at(boundary(config, date), config.boundary.utc_offset_hours) <= now:
        if date not in schedule.skip:
            found.append(date)
        date = next_date(date)
    return found


@dataclass(frozen=True, slots=True)
class Standing:
    """What is on record of a date: whether its daily job is complete, and whether it was ever deployed."""

    is_trained: bool = False
    is_deployed: bool = False


@dataclass(frozen=True, slots=True)
class DateAction:
    """What to do for a date. `train_daily`: only that; `run`: all steps, and keep the stream running."""

    date: str
    kind: Literal["train_daily", "run"]


def actions(due: Sequence[str], standings: Mapping[str, Standing]) -> list[DateAction]:
    """What is left for the due dates, in the order in which it is to be done.

    Only the newest date gets a stream: one for a date before it would be retired at once. A date whose day came too late, after
    a later one was trained or deployed, is left out: the daily line doesn't go back.
    """
    if not due:
        return []
    trained = [date for date, standing in standings.items() if standing.is_trained or standing.is_deployed]
    newest_trained = max(trained, default="")
    left = [DateAction(date, "train_daily") for date in due[:-1] if date > newest_trained]
    last = due[-1]
    if last < newest_trained or standings.get(last, Standing()).is_deployed:
        return left
    return [*left, DateAction(last, "run")]
