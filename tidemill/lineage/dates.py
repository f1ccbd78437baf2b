"""Business dates inside texts: `${bizdate}` stands for one."""

from __future__ import annotations

from typing import Any

BIZDATE = "${bizdate}"


def dated(value: Any, date: str) -> Any:
    """Put the date for `${bizdate}` into every text inside a value."""
    if isinstance(value, str):
        return value.replace(BIZDATE, date)
    if isinstance(value, dict):
        return {key: dated(item, date) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [dated(item, date) for item in value]
    return value
