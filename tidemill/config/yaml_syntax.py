"""YAML -> tree. Scalars follow YAML 1.2 where 1.1 surprises: `yes`, `on`, `010`, `1:30` and dates are strings."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tidemill.config.tree import ConfigSyntaxError, Node, Origin, Scalar, within_limits

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_TAG = "tag:yaml.org,2002:"


def parse(text: str, name: str) -> Node:
    """Raises ConfigSyntaxError on a syntax error, a duplicate key, a key that isn't a string, a merge key or a cycle."""
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise ConfigSyntaxError(Origin(name, line), f"not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigSyntaxError(Origin(name), f"not YAML: {error}") from None
    if root is None:
        return Node({}, Origin(name, 1))
    with within_limits(name):
        return _convert(root, name, ())


def _convert(node: Any, name: str, inside: tuple[Any, ...]) -> Node:
    origin = Origin(name, node.start_mark.line + 1)
    if any(node is outer for outer in inside):
        raise ConfigSyntaxError(origin, "this alias contains itself")
    if isinstance(node, yaml.ScalarNode):
        return Node(_scalar(node), origin)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(item, name, (*inside, node)) for item in node.value], origin)
    return _mapping(node, name, (*inside, node))


def _mapping(node: Any, name: str, inside: tuple[Any, ...]) -> Node:
    message: dict[str, Node] = {}
    keys: dict[str, Origin] = {}
    for key, value in node.value:
        at = Origin(name, key.start_mark.line + 1)
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigSyntaxError(at, "a key must be a name")
        if key.tag == f"{_TAG}merge":
            raise ConfigSyntaxError(at, "merge keys (<<) aren't supported; write the fields out")
        if key.value in message:
            raise ConfigSyntaxError(at, f"given twice, first on line {keys[key.value].line}", key.value)
        message[key.value] = _convert(value, name, inside)
        keys[key.value] = at
    return Node(message, Origin(name, node.start_mark.line + 1), keys=keys)


def _scalar(node: Any) -> Scalar:
    text: str = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if node.tag == f"{_TAG}null":
        return None
    if node.tag == f"{_TAG}bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if node.tag == f"{_TAG}int" and _INTEGER.match(text):
        return int(text)
    if node.tag == f"{_TAG}float" and ":" not in text:
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
