"""What a message that can't be read looks like, so that a wrong `message_format` is told as such."""

from __future__ import annotations

import orjson

from tidemill.config.data import KafkaConfig

_ARROW = b"\xff\xff\xff\xff"
_FILES = {b"Obj\x01": "an Avro file", b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"\x1f\x8b": "gzip"}
_LONGEST = 1 << 20


def format_hint(config: KafkaConfig, message: bytes | None) -> str:
    """ " (it looks like ...)", to go behind the reason why a message can't be read; empty if it looks like nothing else."""
    if not message:
        return ""
    expected = config.message_format
    if expected != "arrow" and message.startswith(_ARROW):
        return _hint("an Arrow stream", "arrow", expected)
    if expected != "json" and _is_json(message):
        return _hint("JSON", "json", expected)
    if message[0] == 0 and len(message) > 5 and config.schema_registry is None and expected != "protobuf":
        return (
            f" (it looks as if it began with a schema registry's header, and message_format is {expected} without schema_registry)"
        )
    found = next((name for start, name in _FILES.items() if message.startswith(start)), None)
    return f" (it looks like {found}, which no message_format is)" if found else ""


def _hint(found: str, right: str, expected: str) -> str:
    return f" (it looks like {found}: kafka.message_format is {expected}; set it to {right} if the topic holds that)"


def _is_json(message: bytes) -> bool:
    if len(message) > _LONGEST or message.lstrip()[:1] not in (b"{", b"["):
        return False
    try:
        orjson.loads(message)
    except ValueError:
        return False
    return True
