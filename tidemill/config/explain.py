"""What a field means: type, default, description."""

from __future__ import annotations

import json
import re
from typing import Any

from tidemill.config.base import Config, Resolver
from tidemill.config.dump import to_plain
from tidemill.config.pipeline import PipelineConfig
from tidemill.config.schema import Shape, shapes
from tidemill.config.tree import did_you_mean
from tidemill.errors import ConfigError


def explain(key: str, resolver: Resolver | None = None) -> str:
    """A field by its dotted path (`train_config.publish.interval_s`; indices are left out), or all fields of a section.

    `feature_configs.KIND` and `model_config.KIND` need a resolver. Raises ConfigError naming the nearest field.
    """
    cls: type[Config] | None = PipelineConfig
    shape: Shape | None = None
    seen: list[str] = []
    for part in re.sub(r"\[[^\]]*\]", "", key).split("."):
        if cls is None:
            raise ConfigError(f"{key}: {'.'.join(seen)} has no fields")
        cls, shape = _step(cls, part, resolver, key)
        seen.append(part)
    lines = _describe(key, shape) if shape is not None else [key]
    if cls is not None:
        lines += ["", *_section(cls)]
    return "\n".join(lines)


def _step(cls: type[Config], part: str, resolver: Resolver | None, key: str) -> tuple[type[Config] | None, Shape | None]:
    shape = shapes(cls).get(part)
    if shape is not None:
        return shape.message, shape
    if cls.kind_family and resolver is not None and not did_you_mean(part, shapes(cls)):
        return resolver(cls.kind_family, part), None
    raise ConfigError(f"{key}: unknown field {part!r}{did_you_mean(part, shapes(cls))}")


def _describe(key: str, shape: Shape) -> list[str]:
    lines = [key, f"  type     {shape.type_text()}", f"  default  {default_text(shape)}"]
    if shape.doc:
        lines.append(f"  meaning  {shape.doc}")
    if shape.effect:
        lines.append(f"  effect   {shape.effect}")
    return lines


def _section(cls: type[Config]) -> list[str]:
    known = shapes(cls).values()
    width = max((len(shape.name) for shape in known), default=0)
    lines = ["  fields"] if known else ["  (no fields)"]
    lines += [f"    {shape.name:<{width}}  {shape.type_text()} = {default_text(shape)}" for shape in known]
    if cls.kind_family:
        lines.append(f"    and one section whose name is the kind of the {cls.kind_family}")
    return lines


def default_text(shape: Shape) -> str:
    """The default as JSON, or what its absence means."""
    if shape.required:
        return "required"
    if shape.default is None:
        return "not set"
    if isinstance(shape.default, Config):
        return "its own defaults"
    return json.dumps(_jsonable(shape.default), ensure_ascii=True)


def _jsonable(value: Any) -> Any:
    return to_plain(value) if isinstance(value, Config) else list(value) if isinstance(value, tuple) else value
