"""The documentation's pages, and what stands in them: fenced blocks, directives, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
_DIRECTIVE = re.compile(r"^<!-- (?P<text>.*) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the `name=value` marks behind it, its text, and the page and line where it begins."""

    language: str
    marks: dict[str, str]
    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Directive:
    """A comment on a line of its own: what a reader does with hands."""

    text: str
    where: str


def pages() -> list[Path]:
    """README and all of docs."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def parts(page: Path) -> Iterator[Block | Directive]:
    """Blocks and directives of a page, in order."""
    name = page.relative_to(REPOSITORY).as_posix()
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        directive, fence = _DIRECTIVE.match(line), _FENCE.match(line)
        if directive is not None:
            yield Directive(directive["text"], f"{name}:{number}")
        if fence is not None:
            language, *marks = fence["info"].split() or [""]
            body = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                body.append(inner.removeprefix(fence["indent"]))
            else:
                raise AssertionError(f"{name}:{number}: this fence isn't closed")
            yield Block(language, dict(mark.split("=", 1) for mark in marks), "\n".join(body), f"{name}:{number}")


def blocks(page: Path, *languages: str) -> list[Block]:
    return [part for part in parts(page) if isinstance(part, Block) and part.language in languages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)
