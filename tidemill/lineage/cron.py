"""Cron expressions: minute, hour, day of month, month, day of week; each `*`, numbers, ranges, steps, and lists of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tidemill.errors import ConfigError

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of month", 1, 31), ("month", 1, 12), ("day of week", 0, 7))
# Every day that can occur, 29 February of a day of the week included, comes within 28 years, but for years like 2100.
_MAX_DAYS = 366 * 40


@dataclass(frozen=True, slots=True)
class Cron:
    """A parsed expression. As in cron, if day of month and day of week are both restricted, either is enough."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 to 6 from Sunday."""
    either: bool

    def next_at(self, at: float, utc_offset_hours: float = 0.0) -> float:
        """The first time, in Unix seconds, at or after `at`; in a time zone that is always so far from UTC."""
        offset = timedelta(hours=utc_offset_hours)
        local = datetime.fromtimestamp(at, UTC) + offset
        first = local.replace(second=0, microsecond=0)
        if first < local:
            first += timedelta(minutes=1)
        midnight = first.replace(hour=0, minute=0)
        for day in range(_MAX_DAYS):
            date = midnight + timedelta(days=day)
            found = next((time for time in self._times(date) if time >= first), None) if self._has(date) else None
            if found is not None:
                return (found - offset).timestamp()
        raise ConfigError("this cron expression never comes")

    def _times(self, date: datetime) -> list[datetime]:
        return [date.replace(hour=hour, minute=minute) for hour in self.hours for minute in self.minutes]

    def _has(self, date: datetime) -> bool:
        if date.month not in self.months:
            return False
        by_day, by_weekday = date.day in self.days, date.isoweekday() % 7 in self.weekdays
        return by_day or by_weekday if self.either else by_day and by_weekday


def parse_cron(text: str) -> Cron:
    """Parse an expression. Raises ConfigError that names the field and what is wrong with it."""
    words = text.split()
    if len(words) != len(_FIELDS):
        raise ConfigError(f"{text!r} isn't a cron expression: needs 5 fields (minute hour day month weekday), has {len(words)}")
    minutes, hours, days, months, weekdays = (_field(word, *field) for word, field in zip(words, _FIELDS, strict=True))
    cron = Cron(
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=days,
        months=months,
        weekdays=frozenset(day % 7 for day in weekdays),
        either=not words[2].startswith("*") and not words[4].startswith("*"),
    )
    try:
        cron.next_at(0.0)
    except ConfigError:
        raise ConfigError(f"{text!r}: this date never comes") from None
    return cron


def _field(word: str, name: str, low: int, high: int) -> frozenset[int]:
    found: set[int] = set()
    for part in word.split(","):
        span, slash, step = part.partition("/")
        start, dash, stop = span.partition("-")
        try:
            first, last = (low, high) if span == "*" else (_number(start), _number(stop) if dash else _number(start))
            by = _number(step) if slash else 1
        except ValueError:
            raise ConfigError(f"cron field {name}: {part!r} isn't *, a number, a range or one of them with a step") from None
        if slash and span != "*" and not dash:
            last = high
        if not low <= first <= last <= high or by < 1:
            raise ConfigError(f"cron field {name}: {part!r} isn't within {low} to {high}")
        found.update(range(first, last + 1, by))
    return frozenset(found)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
