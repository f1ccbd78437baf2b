"""The base of every config section, and of every component's own `Config` class."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen config section; unknown keys are errors. A component's config class stands beside the component."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
