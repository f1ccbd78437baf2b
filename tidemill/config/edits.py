"""`--edit_config_json`: `{"path": value, ...}`, applied to the tree before it is checked.

A path is dotted field names; after a repeated field `[i]`, `[a:b]`, `[:]` or `[field.path OP value]` (OP one of >= <= > < =)
selects elements. Several paths separated by `;` take a list of as many values, or a text with as many parts separated by `;`.
With one path the value is taken as it is. A value is converted by the type of its field; a section takes a JSON object or
protobuf text, a repeated field a list, or its protobuf text.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tidemill.config import proto_syntax
from tidemill.config.base import Config
from tidemill.config.build import Builder
from tidemill.config.schema import Shape, shapes
from tidemill.config.tree import ConfigSyntaxError, Finding, Node, Origin, did_you_mean, from_plain

_PART = re.compile(r"(\w+)((?:\[[^\[\]]*\])*)")
_SELECTOR = re.compile(r"\[([^\[\]]*)\]")
_CONDITION = re.compile(r"\s*([\w.]+)\s*(>=|<=|>|<|=)\s*(.*?)\s*$")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}


class EditError(Exception):
    """What is wrong with one edit."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A value in the tree: its node, and the class (of a section) or the shape (of a field) it follows."""

    node: Node
    cls: type[Config] | None
    shape: Shape | None


def apply_edits(editor: Editor, text: str) -> None:
    """Applies the JSON of --edit_config_json in its order; what is wrong becomes findings that name the path."""
    origin = Origin("edit_config_json")
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        editor.builder.findings.append(Finding(origin, "", f"not JSON: {error.msg.lower()} at character {error.pos}"))
        return
    except (RecursionError, ValueError) as error:
        # Lists in lists without end; an integer of thousands of digits.
        editor.builder.findings.append(Finding(origin, "", f"not JSON that can be read: {error}"))
        return
    if not isinstance(pairs, _Pairs):
        editor.builder.findings.append(Finding(origin, "", "must be a JSON object of path: value"))
        return
    for keys, value in pairs.items:
        try:
            for path, one in _zipped(keys, value.plain() if isinstance(value, _Pairs) else _unpaired(value)):
                editor.set(path, from_plain(one, origin))
        except (EditError, ConfigSyntaxError) as error:
            editor.builder.findings.append(Finding(origin, keys, str(error)))


class _Pairs:
    """A JSON object as its pairs, so that a path may be given twice."""

    def __init__(self, items: list[tuple[str, object]]) -> None:
        self.items = items

    def plain(self) -> dict[str, object]:
        return {key: _unpaired(value) for key, value in self.items}


def _unpaired(value: object) -> object:
    if isinstance(value, _Pairs):
        return value.plain()
    return [_unpaired(item) for item in value] if isinstance(value, list) else value


def _zipped(keys: str, value: object) -> list[tuple[str, object]]:
    paths = [path.strip() for path in _split(keys, ";")]
    if len(paths) == 1:
        return [(paths[0], value)]
    values = value.split(";") if isinstance(value, str) else value
    if not isinstance(values, list) or len(values) != len(paths):
        raise EditError(f"{len(paths)} paths need {len(paths)} values")
    return list(zip(paths, values, strict=True))


def _split(text: str, separator: str) -> list[str]:
    """Split where the separator isn't inside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


class Editor:
    """Sets values by path in a normalised tree; what is wrong becomes findings of the builder."""

    def __init__(self, builder: Builder, cls: type[Config], root: Node) -> None:
        self.builder, self.cls, self.root = builder, cls, root

    def set(self, path: str, value: Node) -> None:
        """Sets every place that the path selects. The value is converted by the field's type."""
        try:
            *parents, last = _split(path, ".")
            places = [_Place(self.root, self.cls, None)]
            for part in parents:
                places = [found for place in places for found in self._step(place, part, value.origin)]
            for place in places:
                self._assign(place, last, value)
        except (EditError, ConfigSyntaxError) as error:
            self.builder.findings.append(Finding(value.origin, path, str(error)))

    def has(self, path: str) -> bool:
        """Whether the tree holds a value at this plain dotted path."""
        node = self.root
        for part in path.split("."):
            if not isinstance(node.value, dict) or part not in node.value:
                return False
            node = node.value[part]
        return True

    def _step(self, place: _Place, part: str, origin: Origin) -> Iterator[_Place]:
        name, selectors = _parse_part(part)
        child = self._child(place, name, origin)
        if not selectors:
            if isinstance(child.node.value, list):
                raise EditError(f"{name!r} is repeated; select elements with [i], [a:b], [:] or [field=value]")
            yield child
            return
        for item in self._select(child, selectors, name):
            yield _Place(item, child.cls, child.shape)

    def _child(self, place: _Place, name: str, origin: Origin) -> _Place:
        """The value of a field; a section that isn't there is made."""
        cls, shape = self._look_up(place, name)
        message = place.node.value
        assert isinstance(message, dict)
        if name not in message:
            repeated = shape is not None and shape.repeated
            message[name] = Node([] if repeated else {}, origin)
            place.node.keys[name] = origin
        node = message[name]
        if node.value is None:
            node.value = {}
        return _Place(node, cls, shape)

    def _look_up(self, place: _Place, name: str) -> tuple[type[Config] | None, Shape | None]:
        """(class of the sections below, shape of the field). Raises EditError for a field that can't be here."""
        if not isinstance(place.node.value, dict):
            raise EditError(f"{name!r} can't be set below a value")
        if place.cls is None:
            if place.shape is not None and place.shape.mapping:
                return None, None
            raise EditError(f"{name!r} can't be set below a value")
        shape = shapes(place.cls).get(name)
        if shape is not None:
            self._keep_oneof(place.cls, place.node.value, name)
            return shape.message, shape
        if not place.cls.kind_family:
            raise EditError(f"unknown field {name!r}{did_you_mean(name, shapes(place.cls))}")
        present = [key for key in place.node.value if key not in shapes(place.cls)]
        if present and name not in present:
            raise EditError(f"it is a {present[0]!r}, not a {name!r}")
        found = self.builder.kind_config(place.cls, name)
        if isinstance(found, str):
            raise EditError(found)
        return found, None

    def _keep_oneof(self, cls: type[Config], message: dict[str, Node], name: str) -> None:
        for members in cls.oneofs.values():
            present = [key for key in message if key in members]
            if name in members and present and name not in present:
                raise EditError(f"{present[0]!r} is given, so {name!r} can't be set; only one of them can be given")

    def _select(self, place: _Place, selectors: list[str], name: str) -> list[Node]:
        if len(selectors) > 1:
            raise EditError("only one [...] can follow a field")
        items = place.node.value
        if not isinstance(items, list):
            raise EditError(f"{name!r} isn't repeated; it takes no [...]")
        text = selectors[0].strip()
        if re.fullmatch(r"-?\d+", text):
            if not -len(items) <= int(text) < len(items):
                raise EditError(f"[{text}] is outside of {name!r}, which has {len(items)} elements")
            return [items[int(text)]]
        bounds = re.fullmatch(r"(-?\d*)\s*:\s*(-?\d*)", text)
        if bounds:
            low, high = (int(bound) if bound else None for bound in bounds.groups())
            selected = items[low:high]
        else:
            condition = _CONDITION.match(text)
            if condition is None:
                raise EditError(f"[{text}] is no index, range or condition")
            selected = [item for item in items if _holds(item, *condition.groups())]
        if not selected:
            raise EditError(f"[{text}] matches no element of {name!r}")
        return selected

    def _assign(self, place: _Place, part: str, value: Node) -> None:
        name, selectors = _parse_part(part)
        if selectors:
            child = self._child(place, name, value.origin)
            for item in self._select(child, selectors, name):
                new = self._converted(child, value, repeated=False)
                item.value, item.origin, item.keys = new.value, new.origin, new.keys
            return
        cls, shape = self._look_up(place, name)
        message = place.node.value
        assert isinstance(message, dict)
        new = self._converted(_Place(place.node, cls, shape), value, repeated=shape is not None and shape.repeated)
        message[name] = new
        place.node.keys[name] = value.origin

    def _converted(self, place: _Place, value: Node, repeated: bool) -> Node:
        given, shape = value.value, place.shape
        if place.cls is not None and isinstance(given, str):
            value = _proto_section(given, value.origin, repeated)
        elif repeated and isinstance(given, str):
            value = _proto_list(given, value.origin)
        elif shape is not None and place.cls is None and not shape.mapping and not isinstance(given, list | dict):
            value = Node(_scalar(given, shape), value.origin)
        copy = _copied(value)
        if place.cls is not None:
            for item in copy.value if isinstance(copy.value, list) else [copy]:
                self.builder.normalise(place.cls, item, ())
        return copy


def _parse_part(part: str) -> tuple[str, list[str]]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        raise EditError(f"{part!r} isn't a field name, with or without [...]")
    return match.group(1), _SELECTOR.findall(match.group(2))


def _holds(item: Node, path: str, sign: str, wanted: str) -> bool:
    node = item
    for part in path.split("."):
        if not isinstance(node.value, dict) or part not in node.value:
            return False
        node = node.value[part]
    if isinstance(node.value, dict | list) or node.value is None:
        return False
    wanted = wanted[1:-1] if len(wanted) > 1 and wanted[0] == wanted[-1] and wanted[0] in "'\"" else wanted
    if isinstance(node.value, bool):
        return _OPERATORS[sign](str(node.value).lower(), wanted.lower())
    if isinstance(node.value, int | float):
        try:
            return _OPERATORS[sign](float(node.value), float(wanted))
        except ValueError:
            return False
    return _OPERATORS[sign](node.value, wanted)


def _scalar(given: object, shape: Shape) -> str | int | float | bool | None:
    """A JSON scalar as the field's type, where that is plain; the rest is left to the check that follows."""
    if shape.scalars == {bool} and isinstance(given, str):
        words = {"true": True, "True": True, "false": False, "False": False}
        if given not in words:
            raise EditError(f"expected true or false, got {given!r}")
        return words[given]
    if (shape.choices or shape.scalars == {str}) and isinstance(given, int | float) and not isinstance(given, bool):
        return str(given)
    assert given is None or isinstance(given, str | int | float | bool)
    return given


def _proto_section(text: str, origin: Origin, repeated: bool) -> Node:
    body = text.strip()
    if body.startswith("[") and body.endswith("]"):
        return _proto_list(text, origin)
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    section = _moved(proto_syntax.parse(body, origin.name), origin)
    return Node([section], origin) if repeated else section


def _proto_list(text: str, origin: Origin) -> Node:
    node = proto_syntax.parse(f"value: {text}", origin.name)
    assert isinstance(node.value, dict)
    if set(node.value) != {"value"}:
        raise EditError(f"{text!r} isn't a list")
    found = _moved(node.value["value"], origin)
    return found if isinstance(found.value, list) else Node([found], origin)


def _moved(node: Node, origin: Origin) -> Node:
    """The same value, said to be written at `origin`."""
    copy = _copied(node)
    pending = [copy]
    while pending:
        one = pending.pop()
        one.origin, one.keys = origin, dict.fromkeys(one.keys, origin)
        if isinstance(one.value, dict | list):
            pending.extend(one.value.values() if isinstance(one.value, dict) else one.value)
    return copy


def _copied(node: Node) -> Node:
    """A copy that shares no node, since one value may go to several places."""
    value = node.value
    if isinstance(value, dict):
        value = {name: _copied(child) for name, child in value.items()}
    elif isinstance(value, list):
        value = [_copied(child) for child in value]
    return Node(value, node.origin, node.bare, node.occurrences, dict(node.keys))
