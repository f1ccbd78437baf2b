"""Objects that carry a number in their key: terms, releases, deployments."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.storage.base import Storage


def numbers(storage: Storage, folder: str, number_of: Callable[[str], int | None], *, base: str = "") -> list[int]:
    """The numbers of a folder's objects, ascending; what `number_of` doesn't know (None) is left out.

    `base`: the folder inside the store that keys are relative to, "" for the store's root.
    """
    base = f"{base}/" if base else ""
    found = (number_of(info.key.removeprefix(base)) for info in storage.list(f"{base}{folder}/"))
    return sorted(number for number in found if number is not None)


def newest_number(storage: Storage, folder: str, number_of: Callable[[str], int | None], *, base: str = "") -> int:
    """The highest number of a folder's objects; 0 if there is none."""
    return max(numbers(storage, folder, number_of, base=base), default=0)
