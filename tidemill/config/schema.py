"""What a Config class accepts, read off its annotations: the names as files spell them, and the shape of each field."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tidemill.config.base import IDLE, Config


@dataclass(frozen=True, slots=True)
class Shape:
    """One field. `message` is set for sub-messages; `choices` for enums; `scalars` otherwise."""

    name: str
    attribute: str
    required: bool
    default: Any
    doc: str
    effect: str
    message: type[Config] | None = None
    repeated: bool = False
    mapping: bool = False
    choices: tuple[str, ...] = ()
    scalars: frozenset[type] = frozenset()

    def type_text(self) -> str:
        """As the reference spells it: `repeated string`, `Tower`, `one of DEEP, WIDE`."""
        if self.message is not None:
            text = self.message.__qualname__.removesuffix(".Config")
        elif self.choices:
            text = "one of " + ", ".join(choice or '""' for choice in self.choices)
        else:
            words: dict[Any, str] = {Any: "anything", int: "integer", float: "number", bool: "true or false", str: "string"}
            text = " or ".join(sorted(words.get(kind, kind.__name__) for kind in self.scalars)) or "any"
        if self.mapping:
            return f"map from string to {text}"
        return f"repeated {text}" if self.repeated else text


@cache
def shapes(cls: type[Config]) -> dict[str, Shape]:
    """Name in the file -> shape, in the order of declaration. Leaves out `kind` and `config` of a kind wrapper."""
    found = {}
    for attribute, info in cls.model_fields.items():
        if cls.kind_family and attribute in ("kind", "config"):
            continue
        shape = _shape(attribute, info)
        idle = attribute in cls.idle_fields and not shape.effect
        found[shape.name] = replace(shape, effect=IDLE) if idle else shape
    return found


def _shape(attribute: str, info: FieldInfo) -> Shape:
    extra = info.json_schema_extra
    traits = _Traits()
    traits.read(info.annotation)
    return Shape(
        name=info.alias or attribute,
        attribute=attribute,
        required=info.is_required(),
        default=None if info.is_required() else info.get_default(call_default_factory=True, validated_data={}),
        doc=" ".join((info.description or "").split()),
        effect=str(extra.get("effect", "")) if isinstance(extra, dict) else "",
        message=traits.message,
        repeated=traits.repeated,
        mapping=traits.mapping,
        choices=traits.choices,
        scalars=frozenset(traits.scalars),
    )


class _Traits:
    """Collects what an annotation says, through Optional, Annotated, tuple, list and dict."""

    def __init__(self) -> None:
        self.message: type[Config] | None = None
        self.repeated = self.mapping = False
        self.choices: tuple[str, ...] = ()
        self.scalars: set[type] = set()

    def read(self, annotation: Any) -> None:
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            self.read(args[0])
        elif origin in (Union, types.UnionType):
            for part in args:
                self.read(part)
        elif origin in (tuple, list):
            self.repeated = True
            self.read(args[0])
        elif origin is dict:
            self.mapping = True
            self.read(args[1])
        elif origin is Literal:
            self.choices = tuple(str(choice) for choice in args)
        elif isinstance(annotation, type) and issubclass(annotation, Config):
            self.message = annotation
        elif isinstance(annotation, type) and annotation is not types.NoneType:
            self.scalars.add(annotation)
