"""The base of every config section, and of every component's own `Config` class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

# What numpy, torch and the client libraries can hold.
_LARGEST = 2**63 - 1

Unsigned = Annotated[int, Field(ge=0, le=_LARGEST)]
Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Config(BaseModel):
    """A frozen config section; unknown keys are errors. A component's config class stands beside the component.

    Repeated fields are `tuple[X, ...]`, maps `dict[str, X]`, sub-messages other Config classes, enums `Literal`s. A docstring
    below a field is its description in `config explain` and in the reference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    oneofs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Group -> fields of which at most one may be given."""

    kind_family: ClassVar[str] = ""
    """Non-empty: one key that is no field of the class is the kind of a component of this family, and its value that
    component's config. Such a class has the fields `kind` and `config`."""

    idle_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and have no effect yet, like those declared by `later`."""

    def one_of(self, group: str) -> tuple[str, Any] | None:
        """The (name, value) of the member of a oneof group that is given, or None."""
        for name in self.oneofs[group]:
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None


IDLE = "accepted, has no effect yet"
NOT_YET = "not there yet; using it is an error"


def not_there(name: str, instead: Iterable[str] = ()) -> str:
    """What is said of a name of tzrec that has no function here yet."""
    known = ", ".join(instead)
    return f"tidemill doesn't have {name} yet" + (f"; it has {known}" if known else "")


Resolver = Callable[[str, str], type[Config]]
"""(family, kind) -> the component's Config class. Raises ConfigError for an unknown kind."""


def later(default: Any = None) -> Any:
    """A field that is accepted, whose function comes later: using it is reported as a warning."""
    return Field(default=default, json_schema_extra={"effect": IDLE})


def not_yet(default: Any = None) -> Any:
    """A field that is known, and refused if used: without its function the job would do something else than it says."""
    return Field(default=default, json_schema_extra={"effect": NOT_YET})


def without_effect(why: str, default: Any = None) -> Any:
    """A field that is accepted and never has an effect here; `why` says what to use instead."""
    return Field(default=default, json_schema_extra={"effect": f"accepted, has no effect: {why}"})


def secret(default: Any = None) -> Any:
    """A field that no saved config, log or error shows."""
    return Field(default=default, repr=False, json_schema_extra={"secret": True})


def is_secret_field(cls: type[Config], attribute: str) -> bool:
    """Whether a field was declared by `secret`."""
    extra = cls.model_fields[attribute].json_schema_extra
    return isinstance(extra, dict) and extra.get("secret") is True
