"""The schedule: what is due when, and what is left to do, as a table of days that are late, missing, repeated or skipped."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tidemill.errors import ConfigError
from tidemill.lineage.cycle import CycleConfig
from tidemill.lineage.schedule import Standing, actions, due_dates

NEW, TRAINED, DEPLOYED = Standing(), Standing(is_trained=True), Standing(is_trained=True, is_deployed=True)


def config(**schedule: Any) -> CycleConfig:
    fields: dict[str, Any] = {
        "root": "root",
        "pipeline_config": "p.yaml",
        "daily": {"input_path": "${bizdate}"},
        "stream": {"input_path": "topic"},
        "boundary": {"utc_offset_hours": 8.0},
        "schedule": {"cron": "30 1 * * *", "first_date": "20260301", **schedule},
    }
    return CycleConfig.model_validate(fields)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("cron", "date", "due"),
    [
        pytest.param("30 1 * * *", "20260301", "2026-03-01T17:30:00", id="01:30 on 2 March, 8 hours ahead"),
        pytest.param("0 0 * * *", "20260301", "2026-03-01T16:00:00", id="at the boundary itself"),
        pytest.param("0 4 * * 1", "20260303", "2026-03-08T20:00:00", id="the next Monday"),
    ],
)
def test_a_date_is_due_at_the_first_time_after_its_end_in_the_boundarys_zone(cron: str, date: str, due: str) -> None:
    schedule = config(cron=cron, first_date=date)
    assert due_dates(schedule, at(due) - 1.0) == []
    assert due_dates(schedule, at(due))[0] == date


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2026-03-01T17:29:59", []),
        ("2026-03-01T17:30:00", ["20260301"]),
        ("2026-03-04T00:00:00", ["20260301", "20260302", "20260303"]),
    ],
)
def test_due_dates(now: str, expected: list[str]) -> None:
    assert due_dates(config(), at(now)) == expected


def test_skipped_dates_are_never_due() -> None:
    assert due_dates(config(skip=["20260302"]), at("2026-03-04T00:00:00")) == ["20260301", "20260303"]


def test_without_a_schedule_nothing_can_be_due() -> None:
    with pytest.raises(ConfigError, match="schedule: the cycle's config needs this section"):
        due_dates(config().model_copy(update={"schedule": None}), 0.0)


DAYS = ["20260301", "20260302", "20260303"]
TABLE = [
    pytest.param([], {}, "", id="nothing due"),
    pytest.param(DAYS[:1], {}, "01 run", id="the first day"),
    pytest.param(DAYS[:1], {DAYS[0]: DEPLOYED}, "", id="repeated: the day is done"),
    pytest.param(DAYS[:1], {DAYS[0]: TRAINED}, "01 run", id="resumed after the daily job"),
    pytest.param(DAYS[:2], {DAYS[0]: DEPLOYED}, "02 run", id="the next day"),
    pytest.param(DAYS[:2], {DAYS[0]: TRAINED}, "02 run", id="late: the day before has no stream, and gets none any more"),
    pytest.param(DAYS[:2], {}, "01 train_daily, 02 run", id="two days due at once"),
    pytest.param(DAYS, {}, "01 train_daily, 02 train_daily, 03 run", id="backfill: daily jobs in order, one stream"),
    pytest.param(DAYS, {DAYS[0]: DEPLOYED, DAYS[1]: TRAINED}, "03 run", id="backfill resumed"),
    pytest.param(DAYS, {DAYS[0]: DEPLOYED}, "02 train_daily, 03 run", id="missing: the day before must be trained first"),
    pytest.param([DAYS[0], DAYS[2]], {DAYS[0]: DEPLOYED}, "03 run", id="skipped: the next continues from the one before"),
    pytest.param(DAYS, {DAYS[2]: DEPLOYED}, "", id="too late: a later day was trained without them"),
    pytest.param(DAYS[:2], {DAYS[2]: DEPLOYED}, "", id="a later day was run by hand"),
    pytest.param(DAYS, {DAYS[1]: Standing(is_deployed=True)}, "03 run", id="deployed, its daily folder cleaned away"),
]


@pytest.mark.parametrize(("due", "standings", "expected"), TABLE)
def test_what_is_left(due: list[str], standings: dict[str, Standing], expected: str) -> None:
    assert ", ".join(f"{action.date[-2:]} {action.kind}" for action in actions(due, standings)) == expected


def test_a_week_of_backfill_ends_with_one_stream() -> None:
    days = [f"2026030{day}" for day in range(1, 8)]
    standings: dict[str, Standing] = {}
    done = []
    while left := actions(days, standings):
        done.append((left[0].date, left[0].kind))
        standings[left[0].date] = TRAINED if left[0].kind == "train_daily" else DEPLOYED
    assert done == [*((day, "train_daily") for day in days[:-1]), (days[-1], "run")]
