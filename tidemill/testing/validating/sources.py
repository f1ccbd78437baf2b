"""Sources of a validating trainer, by kind, from plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tidemill.data.source import Source
from tidemill.registry import resolve


def make_source(
    spec: Mapping[str, Any], columns: Mapping[str, str], *, event_time_column: str | None, boundary: float | None
) -> Source:
    """The source that `kind` names, with the rest of `spec` as its config. `columns`: name -> Arrow type of what is read."""
    kind = spec["kind"]
    fields = {name: value for name, value in spec.items() if name != "kind"}
    types = {name: pa.type_for_alias(alias) for name, alias in columns.items()}
    cls: Any = resolve("source", kind)
    if kind == "folder":
        path = fields.pop("path")
        return cls(cls.Config.model_validate(fields), path, types, event_time_column=event_time_column)
    if kind == "kafka":
        return cls(cls.Config.model_validate(fields), types, event_time_column=event_time_column, start_at=boundary)
    config = cls.Config.model_validate({**fields, "event_time_column": event_time_column})
    return cls(config, types if kind == "csv" else list(types))
