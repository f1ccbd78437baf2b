"""MaxCompute positions as text: `{input_path}#{sess_idx}#{session_id}:{start}` -> the last trained row (B1).

These keys stand in `dataloader_state.json` only, where tzrec's users look for them. In memory positions are intervals of typed
splits; what each split's session is, its fingerprint says: `input_path`, `sess_idx`, `session`, `rows`. The functions here work
on split states as the document has them, JSON objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import CorruptError

MAXCOMPUTE = "maxcompute"
Split = Mapping[str, Any]
"""A split state of the document."""


@dataclass(frozen=True, slots=True)
class PositionKey:
    """Where a range of trained rows begins. `sess_idx` None: written by a version that didn't know it."""

    input_path: str
    sess_idx: int | None
    session: str
    start: int

    def __str__(self) -> str:
        place = "" if self.sess_idx is None else f"#{self.sess_idx}"
        return f"{self.input_path}{place}#{self.session}:{self.start}"


def parse_key(text: str) -> PositionKey | None:
    """The key in a text; None if it is none: a reserved key (B7), or another source's."""
    rest, colon, start = text.rpartition(":")
    path, mark, session = rest.rpartition("#")
    if not colon or not mark or not path or not session or not start.isdecimal():
        return None
    before, mark, index = path.rpartition("#")
    if mark and before and index.isdecimal():
        return PositionKey(before, int(index), session, int(start))
    return PositionKey(path, None, session, int(start))


def position_keys(splits: Iterable[Split]) -> dict[str, int]:
    """The keys of all MaxCompute splits, each with the last row of its range."""
    keys = {}
    for split in splits:
        if split["kind"] == MAXCOMPUTE and "session" in split["fingerprint"]:
            path, index, session = _session(split)
            for start, stop in split["intervals"]:
                keys[str(PositionKey(path, index, session, start))] = stop - 1
    return keys


def splits_with_keys(splits: Iterable[Split], keys: Mapping[str, Any], *, where: str) -> list[Split]:
    """Split states as a document's keys have them, in any order of the keys.

    Keys of a split that the document lists must say what its intervals say; others become splits of their own, which know no
    number of rows. Raises CorruptError naming the key or split.
    """
    found: dict[tuple[str, int | None, str], list[list[int]]] = {}
    for text, last in keys.items():
        key = parse_key(text)
        if key is None:
            continue
        if isinstance(last, bool) or not isinstance(last, int) or last < key.start:
            raise CorruptError(f"{where}: positions: {text!r}: {last!r} isn't a row at or after {key.start}")
        found.setdefault((key.input_path, key.sess_idx, key.session), []).append([key.start, last + 1])
    listed = list(splits)
    for split in listed:
        if split["kind"] == MAXCOMPUTE:
            said = sorted(found.pop(_session(split), []))
            if said != sorted(split["intervals"]):
                raise CorruptError(f"{where}: {split['split']}: positions say {said}, its intervals {split['intervals']}")
    return listed + [_from_keys(session, spans) for session, spans in sorted(found.items(), key=str)]


def _session(split: Split) -> tuple[str, int | None, str]:
    fingerprint = split["fingerprint"]
    return fingerprint.get("input_path", ""), fingerprint.get("sess_idx"), fingerprint.get("session", "")


def _from_keys(session: tuple[str, int | None, str], intervals: list[list[int]]) -> Split:
    input_path, index, session_id = session
    place = "" if index is None else f"#{index}"
    fingerprint: dict[str, Any] = {"input_path": input_path, "session": session_id}
    if index is not None:
        fingerprint["sess_idx"] = index
    return {
        "kind": MAXCOMPUTE,
        "split": f"{input_path}{place}#{session_id}",
        "intervals": sorted(intervals),
        "num_rows": None,
        "fingerprint": fingerprint,
        "max_event_time": None,
    }
