"""MaxCompute's type texts (`bigint`, `array<string>`, `map<string,double>`) and their Arrow types."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidemill.testing.maxcompute.replies import invalid_argument

_SIMPLE = {
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
}
_UNITS = {"second": "s", "milli": "ms", "micro": "us", "nano": "ns"}
# What MaxCompute takes for a decimal without precision.
_DEFAULT_DECIMAL = (38, 18)


@dataclass(frozen=True, slots=True)
class TimeUnits:
    """Arrow units of times in a stream, as Arrow writes them ("s", "ms", "us", "ns"); the defaults are the client's."""

    timestamp: str = "ns"
    datetime: str = "ms"


DEFAULT_UNITS = TimeUnits()


def time_units(timestamp: str, datetime: str) -> TimeUnits:
    """Units from a request's ArrowOptions ("second", "milli", "micro", "nano"). Raises ApiError for others."""
    for unit in (timestamp, datetime):
        if unit not in _UNITS:
            raise invalid_argument(f"ArrowOptions: unknown unit {unit!r}; known: {', '.join(_UNITS)}")
    return TimeUnits(_UNITS[timestamp], _UNITS[datetime])


def arrow_type(text: str, units: TimeUnits = DEFAULT_UNITS) -> Any:
    """The Arrow type of a column of type `text` in a stream. Raises ApiError for a type that isn't known."""
    name, arguments = _parse(text)
    if name in _SIMPLE:
        return _SIMPLE[name]
    match name, arguments:
        case "datetime", []:
            return pa.timestamp(units.datetime)
        case (("timestamp" | "timestamp_ntz"), []):
            return pa.timestamp(units.timestamp)
        case (("char" | "varchar"), [_]):
            return pa.string()
        case "decimal", []:
            return pa.decimal128(*_DEFAULT_DECIMAL)
        case "decimal", [precision, *scale]:
            return pa.decimal128(int(precision), int(scale[0]) if scale else 0)
        case "array", [element]:
            return pa.list_(arrow_type(element, units))
        case "map", [key, value]:
            return pa.map_(arrow_type(key, units), arrow_type(value, units))
        case "struct", [_, *_]:
            pairs = [field.split(":", 1) for field in arguments]
            return pa.struct([(pair[0].strip(), arrow_type(pair[1], units)) for pair in pairs])
    raise invalid_argument(f"unknown column type {text!r}")


def column_type(kind: Any) -> str:
    """The type text of a column that holds Arrow values of type `kind`. Raises ApiError if MaxCompute has none."""
    for text, simple in _SIMPLE.items():
        if kind == simple:
            return text
    types = pa.types
    if types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    if types.is_large_binary(kind):
        return "binary"
    if types.is_timestamp(kind):
        return "timestamp" if kind.unit in {"ns", "us"} else "datetime"
    if types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"array<{column_type(kind.value_type)}>"
    if types.is_map(kind):
        return f"map<{column_type(kind.key_type)},{column_type(kind.item_type)}>"
    if types.is_struct(kind):
        return "struct<" + ",".join(f"{field.name}:{column_type(field.type)}" for field in kind) + ">"
    raise invalid_argument(f"no MaxCompute type for Arrow's {kind}")


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """The parts of `text` between separators that stand in no brackets: "a,map<b,c>" -> ["a", "map<b,c>"]."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "<(") - (character in ">)")
        if character == separator and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def _parse(text: str) -> tuple[str, list[str]]:
    """A type's name in lower case and its arguments: "DECIMAL(10,2)" -> ("decimal", ["10", "2"])."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:[<(](.*)[>)])?\s*", text, re.DOTALL)
    if match is None:
        raise invalid_argument(f"not a column type: {text!r}")
    return match[1].lower(), split_outside_brackets(match[2] or "")
