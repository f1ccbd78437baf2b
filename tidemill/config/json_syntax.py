"""JSON -> tree, with line numbers; duplicate keys are errors."""

from __future__ import annotations

import json
import re

from tidemill.config.tree import ConfigSyntaxError, Node, Origin, within_limits

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse(text: str, name: str) -> Node:
    """Raises ConfigSyntaxError on a syntax error or a duplicate key."""
    with within_limits(name):
        return _Parser(text, name).document()


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.counted, self.line = 0, 1

    def document(self) -> Node:
        node = self.value()
        if self.peek():
            raise self.failure("text after the end of the document")
        return node

    def value(self) -> Node:
        start = self.peek()
        origin = self.origin()
        if start == "{":
            return self.message(origin)
        if start == "[":
            return self.sequence(origin)
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.failure(error.msg.lower()) from None
        return Node(value, origin)

    def message(self, origin: Origin) -> Node:
        node = Node({}, origin)
        assert isinstance(node.value, dict)
        self.expect("{")
        while self.peek() != "}":
            at = self.origin()
            if self.peek() != '"':
                raise self.failure("expected a key in double quotes")
            key = str(self.value().value)
            if key in node.value:
                raise ConfigSyntaxError(at, f"given twice, first on line {node.keys[key].line}", key)
            self.expect(":")
            node.value[key], node.keys[key] = self.value(), at
            self.separator("}")
        self.expect("}")
        return node

    def sequence(self, origin: Origin) -> Node:
        items: list[Node] = []
        self.expect("[")
        while self.peek() != "]":
            items.append(self.value())
            self.separator("]")
        self.expect("]")
        return Node(items, origin)

    def separator(self, end: str) -> None:
        if self.peek() == end:
            return
        self.expect(",")
        if self.peek() == end:
            raise self.failure(f"a comma before {end!r}")

    def peek(self) -> str:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.text[self.at : self.at + 1]

    def expect(self, char: str) -> None:
        found = self.peek()
        if found != char:
            raise self.failure(f"expected {char!r}, found {found!r}" if found else f"expected {char!r}, found the end")
        self.at += 1

    def origin(self) -> Origin:
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return Origin(self.name, self.line)

    def failure(self, problem: str) -> ConfigSyntaxError:
        return ConfigSyntaxError(self.origin(), f"not JSON: {problem}")
