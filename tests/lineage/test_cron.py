"""Cron expressions against dates worked out by hand, and against a plain walk over minutes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.errors import ConfigError
from tidemill.lineage.cron import parse_cron


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("* * * * *", "2026-03-02T10:20:00", "2026-03-02T10:20:00"),
        ("* * * * *", "2026-03-02T10:20:01", "2026-03-02T10:21:00"),
        ("30 1 * * *", "2026-03-02T01:30:00", "2026-03-02T01:30:00"),
        ("30 1 * * *", "2026-03-02T01:30:00.5", "2026-03-03T01:30:00"),
        ("30 1 * * *", "2026-12-31T02:00:00", "2027-01-01T01:30:00"),
        ("*/15 8-10 * * *", "2026-03-02T08:46:00", "2026-03-02T09:00:00"),
        ("5/20 0 * * *", "2026-03-02T00:26:00", "2026-03-02T00:45:00"),
        ("0 0 1,15 * *", "2026-03-02T00:00:00", "2026-03-15T00:00:00"),
        ("0 0 * * 1", "2026-03-03T00:00:00", "2026-03-09T00:00:00"),
        ("0 0 * * 7", "2026-03-03T00:00:00", "2026-03-08T00:00:00"),
        ("0 0 13 * 5", "2026-03-01T00:00:00", "2026-03-06T00:00:00"),
        ("0 0 29 2 *", "2026-03-01T00:00:00", "2028-02-29T00:00:00"),
    ],
)
def test_the_next_time(expression: str, after: str, expected: str) -> None:
    assert parse_cron(expression).next_at(at(after)) == at(expected)


def test_time_zones() -> None:
    cron = parse_cron("0 2 * * *")
    assert cron.next_at(at("2026-03-02T17:00:00"), 8.0) == at("2026-03-02T18:00:00")
    assert cron.next_at(at("2026-03-02T18:00:01"), 8.0) == at("2026-03-03T18:00:00")
    assert cron.next_at(at("2026-03-02T00:00:00"), -3.5) == at("2026-03-02T05:30:00")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("0 1 * *", "needs 5 fields .* has 4"),
        ("", "has 0"),
        ("60 * * * *", "minute: '60' isn't within 0 to 59"),
        ("0 24 * * *", "hour: '24'"),
        ("0 0 0 * *", "day of month: '0'"),
        ("0 0 * 5-3 *", "month: '5-3'"),
        ("*/0 * * * *", r"minute: '\*/0'"),
        ("a * * * *", "minute: 'a' isn't"),
        ("1,,2 * * * *", "minute: '' isn't"),
        ("-1 * * * *", "minute: '-1' isn't"),
        ("0 0 * * MON", "day of week: 'MON' isn't"),
        ("0 0 31 2 *", "never comes"),
    ],
)
def test_mistakes_are_named(expression: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cron(expression)


FIELD = {
    "minute": st.one_of(st.just("*"), st.integers(0, 59).map(str), st.integers(1, 40).map(lambda n: f"*/{n}")),
    "hour": st.one_of(st.just("*"), st.integers(0, 23).map(str), st.integers(0, 22).map(lambda n: f"{n}-23")),
    "weekday": st.one_of(st.just("*"), st.integers(0, 7).map(str)),
}


@settings(deadline=None, max_examples=60)
@given(FIELD["minute"], FIELD["hour"], FIELD["weekday"], st.integers(1_700_000_000, 1_900_000_000))
def test_it_is_the_first_minute_that_matches(minute: str, hour: str, weekday: str, after: int) -> None:
    found = parse_cron(f"{minute} {hour} * * {weekday}").next_at(after)

    def matches(word: str, value: int) -> bool:
        if word.startswith("*/"):
            return value % int(word[2:]) == 0
        return word == "*" or (value >= int(word[:-3]) if word.endswith("-23") else value == int(word))

    moment = datetime.fromtimestamp(after, UTC)
    moment = moment.replace(second=0) + timedelta(minutes=1 if moment.second else 0)
    while True:
        day = moment.isoweekday() % 7
        if matches(minute, moment.minute) and matches(hour, moment.hour) and weekday in ("*", str(day), "7" if day == 0 else ""):
            break
        moment += timedelta(minutes=1)
    assert found == moment.timestamp()
