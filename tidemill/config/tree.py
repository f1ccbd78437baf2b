"""What the three syntaxes parse to: a tree that remembers where everything was written; and what is said about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

Scalar = str | int | float | bool | None
Path = tuple[str | int, ...]
_TOLD = 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written: a file (or flag, edit, environment variable) and its line there, from 1."""

    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(slots=True)
class Node:
    """One value. `bare`: an unquoted word, or a message, of protobuf text. `occurrences`: a list made of one field that was
    written several times."""

    value: Scalar | list[Node] | dict[str, Node]
    origin: Origin
    bare: bool = False
    occurrences: bool = False
    keys: dict[str, Origin] = field(default_factory=dict)
    """Of a message: where each key was written."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong (or worth a warning) with a config."""

    origin: Origin
    path: str
    message: str
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        place = f"{self.origin}: {self.path}" if self.path else str(self.origin)
        return f"{place}: {self.message}"


class ConfigSyntaxError(Exception):
    """A text isn't of its syntax; carries the finding."""

    def __init__(self, origin: Origin, message: str, path: str = "") -> None:
        super().__init__(message)
        self.finding = Finding(origin, path, message)


@contextmanager
def within_limits(name: str) -> Iterator[None]:
    """Around a parser: what Python refuses to take (nesting without end, integers of thousands of digits) is a syntax error."""
    try:
        yield
    except RecursionError:
        raise ConfigSyntaxError(Origin(name), "nested too deeply") from None
    except ValueError as error:
        raise ConfigSyntaxError(Origin(name), f"a number that can't be read: {error}") from None


def path_text(path: Path) -> str:
    """`("feature_configs", 2, "id_feature")` -> `feature_configs[2].id_feature`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def locate(root: Node, path: Path) -> Origin:
    """Where the value at `path` was written; where its nearest ancestor was, if it wasn't."""
    node, origin = root, root.origin
    for part in path:
        if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
            origin = node.keys.get(part, node.value[part].origin)
            node = node.value[part]
        elif isinstance(node.value, list) and isinstance(part, int) and 0 <= part < len(node.value):
            node = node.value[part]
            origin = node.origin
        else:
            break
    return origin


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant, it seems."""
    return next(iter(get_close_matches(name, sorted(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known name is near."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def instead(name: str, known: Iterable[str]) -> str:
    """As `did_you_mean`; if no known name is near, all of them are told, as long as they are few."""
    names = sorted(known)
    told = ", ".join(names[:_TOLD]) + (", ..." if len(names) > _TOLD else "")
    return did_you_mean(name, names) or (f"; known: {told}" if names else "")


def plain(node: Node) -> object:
    """The tree as dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {name: plain(child) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def from_plain(value: object, origin: Origin) -> Node:
    """The reverse of `plain`, all of it written at `origin`."""
    if isinstance(value, dict):
        children = {str(name): from_plain(child, origin) for name, child in value.items()}
        return Node(children, origin, keys=dict.fromkeys(children, origin))
    if isinstance(value, list | tuple):
        return Node([from_plain(child, origin) for child in value], origin)
    if value is None or isinstance(value, str | int | float | bool):
        return Node(value, origin)
    raise ConfigSyntaxError(origin, f"can't use a {type(value).__name__} as a config value")
