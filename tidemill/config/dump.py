"""A config back to text: every field with its resolved value, secrets left out."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import yaml

from tidemill.config.base import Config, is_secret_field
from tidemill.config.schema import shapes

REDACTED = "REDACTED"
HEADER = "# tidemill pipeline config, resolved (YAML)\n"

_SECRET = re.compile(
    r"passw|passphrase|secret|token|private|credential|signature|access_?key|api_?key|key\.pem|sasl\.jaas|oauthbearer\.config|^sig$",
    re.IGNORECASE,
)
_USER = re.compile(r"(://[^/?#@:,]*):[^/?#@]*@")
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_QUERY_PART = re.compile(r"([?&])([^=&]+)=([^&]*)")


def dump(config: Config) -> str:
    """YAML that `load_pipeline` reads again. Fields that aren't set are left out; secrets are the word REDACTED."""
    return HEADER + yaml.dump(to_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def to_plain(config: Config) -> dict[str, Any]:
    """The config under the names of the files, as dicts, lists and scalars; None is left out, secrets are redacted."""
    found: dict[str, Any] = {}
    for name, shape in shapes(type(config)).items():
        value = getattr(config, shape.attribute)
        if value is not None:
            found[name] = REDACTED if value and is_secret_field(type(config), shape.attribute) else _plain(value)
    if config.kind_family:
        kind: str = config.kind  # type: ignore[attr-defined]
        found[kind] = to_plain(config.config)  # type: ignore[attr-defined]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return to_plain(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        # Numbers aren't secrets, but the ids of a vocabulary, which may hold any word.
        return {key: REDACTED if isinstance(item, str) and is_secret(key) else _plain(item) for key, item in value.items()}
    return redact_address(value) if isinstance(value, str) and "://" in value else value


def is_secret(key: str) -> bool:
    """Whether a client setting of this name holds a secret."""
    return _SECRET.search(key) is not None


def redact_address(address: str) -> str:
    """An address without the secrets in its query, and without a password before its host."""

    def hide(match: re.Match[str]) -> str:
        sign, key, value = match.groups()
        return f"{sign}{key}={REDACTED if is_secret(unquote(key)) else value}"

    return _QUERY_PART.sub(hide, _USER.sub(rf"\1:{REDACTED}@", address))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Lists are indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    """Unicode's own line ends would be written as they are, and read back as a space; in double quotes they are escaped."""
    style = '"' if _LINE_ENDS.search(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
