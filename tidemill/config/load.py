"""Loading a pipeline config: syntax, environment, flags, edits, schema, rules; all findings at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidemill.config import json_syntax, proto_syntax, yaml_syntax
from tidemill.config.base import Resolver
from tidemill.config.build import Builder
from tidemill.config.check import cross_check
from tidemill.config.edits import Editor, apply_edits
from tidemill.config.env import SUCCESSOR_DIR, config_values
from tidemill.config.pipeline import PipelineConfig
from tidemill.config.tree import ConfigSyntaxError, Finding, Node, Origin, from_plain
from tidemill.errors import ConfigError

Format = Literal["yaml", "json", "proto"]

_PARSERS: dict[Format, Callable[[str, str], Node]] = {
    "yaml": yaml_syntax.parse,
    "json": json_syntax.parse,
    "proto": proto_syntax.parse,
}
_SUFFIXES: dict[str, Format] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".pbtxt": "proto",
    ".prototxt": "proto",
    ".textproto": "proto",
}
_PROTO_MESSAGE = re.compile(r"^[ \t]*[A-Za-z_]\w*[ \t]*[{<][ \t]*(#.*)?$", re.MULTILINE)
_PROTO_INLINE = re.compile(r"^[ \t]*[A-Za-z_]\w*[ \t]*\{.*\}[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """The text that a config was read from."""

    name: str
    format: Format
    text: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked config and what was said about it."""

    config: PipelineConfig
    warnings: tuple[Finding, ...]
    source: Source
    root: Node
    """The tree that the config was built from, with the lines of its fields."""


def load_pipeline(
    path_or_text: str | Path,
    resolver: Resolver,
    *,
    format: Format | None = None,  # noqa: A002
    edits: str | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Reads and checks a pipeline config.

    A string that holds a line break or a brace is the text itself, any other one is a path. Precedence: file, then the
    environment, then `overrides` (field path -> value; None leaves the field alone), then `edits` (the JSON of
    `--edit_config_json`). Raises ConfigError with one line for each error: `file:line: field: what is wrong`.
    """
    source = _read(path_or_text, format)
    try:
        root = _PARSERS[source.format](source.text, source.name)
    except ConfigSyntaxError as failure:
        raise ConfigError(str(failure.finding)) from None
    builder = Builder(resolver)
    builder.normalise(PipelineConfig, root, ())
    editor = Editor(builder, PipelineConfig, root)
    _apply_environment(editor, environ)
    for path, value in (overrides or {}).items():
        if value is not None:
            editor.set(path, from_plain(value, Origin(f"--{path.rpartition('.')[2]}")))
    if edits:
        apply_edits(editor, edits)
    config = builder.build_anyway(PipelineConfig, root)
    assert isinstance(config, PipelineConfig)
    findings = builder.findings + _beside(builder, cross_check(config, root))
    return _conclude(config, findings, source, root)


def _beside(builder: Builder, more: list[Finding]) -> list[Finding]:
    """Leaves out what only follows from an error that has been found: a misspelt field seems to be missing, a wrong one has its
    default's value, and the section around it is not what it will be."""
    wrong = [finding.path for finding in builder.findings if finding.level == "error"]
    return [
        finding
        for finding in more
        if finding.path not in builder.meant and not any(_one_in_other(path, finding.path) for path in wrong)
    ]


def _one_in_other(one: str, other: str) -> bool:
    return one == other or one.startswith((f"{other}.", f"{other}[")) or other.startswith((f"{one}.", f"{one}["))


def _conclude(config: PipelineConfig, findings: list[Finding], source: Source, root: Node) -> Loaded:
    findings.sort(key=lambda finding: (finding.origin.name != source.name, finding.origin.line or 0))
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    return Loaded(config, tuple(findings), source, root)


def _apply_environment(editor: Editor, environ: Mapping[str, str] | None) -> None:
    for value in config_values(environ):
        if value.variable == SUCCESSOR_DIR and not editor.has("train_config.handover"):
            # The variable alone means what it means to tzrec: retire once the successor has caught up.
            editor.set("train_config.handover.policy", Node("caught_up", Origin(value.variable)))
        editor.set(value.path, Node(value.value, Origin(value.variable)))


def _read(path_or_text: str | Path, format: Format | None) -> Source:  # noqa: A002
    if isinstance(path_or_text, str) and ("\n" in path_or_text or "{" in path_or_text):
        return Source("<text>", format or detect_format("", path_or_text), path_or_text)
    path = Path(path_or_text)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't read this config: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    return Source(str(path), format or detect_format(path.name, text), text)


def detect_format(name: str, text: str) -> Format:
    """By the name's suffix; `.config` and others by their text."""
    known = _SUFFIXES.get(Path(name).suffix.lower())
    if known is not None:
        return known
    if text.lstrip()[:1] == "{":
        return "json"
    is_proto = _PROTO_MESSAGE.search(text) or _PROTO_INLINE.search(text)
    return "proto" if is_proto else "yaml"
