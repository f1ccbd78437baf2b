"""Protobuf text format -> tree, without a schema.

Fields written several times become one list node marked `occurrences`; whether that's allowed is for the schema to say.
Source: https://protobuf.dev/reference/protobuf/textformat-spec/ (extensions and `Any` expansion are refused).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidemill.config.tree import ConfigSyntaxError, Node, Origin, Scalar, within_limits

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f\v]+|\#[^\n]*)
      | (?P<number>0[xX][0-9a-fA-F]+
          | (?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?[fF]?(?![\w.]))
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<sign>[-{}<>\[\]:;,])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\([abfnrtv?\\'\"]|[0-7]{1,3}|[xX][0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SIMPLE = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "?": 63, "\\": 92, "'": 39, '"': 34}
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("true", "True", "t"), True),
    **dict.fromkeys(("false", "False", "f"), False),
    **dict.fromkeys(("inf", "infinity"), float("inf")),
    "nan": float("nan"),
}
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def parse(text: str, name: str) -> Node:
    """Raises ConfigSyntaxError with the line of the first token that doesn't fit."""
    with within_limits(name):
        return _Parser(_tokens(text, name), name).message(Origin(name, 1), "")


def _tokens(text: str, name: str) -> list[_Token]:
    tokens: list[_Token] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ConfigSyntaxError(Origin(name, line), f"not protobuf text: unexpected {_word(text, at)!r}")
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    tokens.append(_Token("end", "", line))
    return tokens


def _word(text: str, at: int) -> str:
    return (text[at : at + 10].split() or [text[at]])[0]


class _Parser:
    def __init__(self, tokens: list[_Token], name: str) -> None:
        self.tokens, self.name, self.at = tokens, name, 0

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        token = self.next
        self.at += token.kind != "end"
        return token

    def skip(self, *signs: str) -> bool:
        if self.next.kind == "sign" and self.next.text in signs:
            self.at += 1
            return True
        return False

    def failure(self, token: _Token, expected: str) -> ConfigSyntaxError:
        found = repr(token.text) if token.kind != "end" else "the end of the text"
        return ConfigSyntaxError(Origin(self.name, token.line), f"not protobuf text: expected {expected}, found {found}")

    def message(self, origin: Origin, closing: str) -> Node:
        """The fields up to `closing` ("" = the end of the text), which is taken too."""
        node = Node({}, origin, bare=True)
        while not self.closed(closing):
            token = self.take()
            if token.kind != "word":
                raise self.failure(token, "a field name")
            at = Origin(self.name, token.line)
            colon = self.skip(":")
            if not colon and self.next.text not in ("{", "<", "["):
                raise self.failure(self.next, f"':' or '{{' after {token.text!r}")
            _add(node, token.text, self.value(), at)
            self.skip(",", ";")
        return node

    def closed(self, closing: str) -> bool:
        if closing and self.next.kind == "end":
            raise self.failure(self.next, f"{closing!r}")
        return self.skip(closing) if closing else self.next.kind == "end"

    def value(self) -> Node:
        token = self.take()
        origin = Origin(self.name, token.line)
        if token.kind == "sign" and token.text in _CLOSING:
            return self.message(origin, _CLOSING[token.text])
        if token.kind == "sign" and token.text == "[":
            return self.sequence(origin)
        if token.kind == "string":
            return Node(self.string(token), origin)
        if token.kind == "word":
            return Node(_WORDS.get(token.text, token.text), origin, bare=True)
        negative = token.kind == "sign" and token.text == "-"
        number = self.take() if negative else token
        if number.kind == "number":
            value = _number(number.text)
        elif negative and isinstance(_WORDS.get(number.text), float):
            value = float(number.text)
        else:
            raise self.failure(number, "a value")
        return Node(-value if negative else value, origin)

    def sequence(self, origin: Origin) -> Node:
        items: list[Node] = []
        while not self.skip("]"):
            if items and not self.skip(","):
                raise self.failure(self.next, "',' or ']'")
            items.append(self.value())
        return Node(items, origin)

    def string(self, first: _Token) -> str:
        data = self.unescape(first)
        while self.next.kind == "string":
            data += self.unescape(self.take())
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ConfigSyntaxError(Origin(self.name, first.line), "not protobuf text: a string that isn't UTF-8") from None

    def unescape(self, token: _Token) -> bytes:
        def one(match: re.Match[str]) -> str:
            code = match.group(1)
            if code in _SIMPLE:
                return chr(_SIMPLE[code])
            if code[0] in "xXuU" and len(code) > 1:
                value = int(code[1:], 16)
                return chr(value) if code[0] in "xX" else _surrogates(value)
            if code[0] in "01234567":
                return chr(int(code, 8) & 0xFF)
            raise ConfigSyntaxError(Origin(self.name, token.line), f"not protobuf text: unknown escape '\\{code}'")

        # Octal and hex escapes are bytes, everything else is text: both are put together as latin-1 code points.
        body = token.text[1:-1].encode().decode("latin-1")
        return _ESCAPE.sub(one, body).encode("latin-1")


def _surrogates(value: int) -> str:
    return chr(value).encode("utf-8", "surrogatepass").decode("latin-1")


def _number(text: str) -> int | float:
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    if text.isdigit():
        return int(text, 8) if text[0] == "0" and len(text) > 1 and not set(text) & set("89") else int(text)
    return float(text.rstrip("fF"))


def _add(node: Node, name: str, value: Node, at: Origin) -> None:
    assert isinstance(node.value, dict)
    known = node.value.get(name)
    if known is None:
        node.value[name], node.keys[name] = value, at
    elif known.occurrences and isinstance(known.value, list):
        known.value.append(value)
    else:
        node.value[name] = Node([known, value], known.origin, occurrences=True)
