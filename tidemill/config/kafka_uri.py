"""tzrec's `kafka://host:port[,host:port]/topic?group.id=G&k=v` addresses."""

from __future__ import annotations

from urllib.parse import unquote

from tidemill.config.data import KafkaConfig


def _milliseconds(options: dict[str, str], key: str) -> int | None:
    text = options.pop(key, None)
    if text is not None and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{key} must be an integer >= 0, got {text!r}")
    return None if text is None else int(text)


def _offsets(options: dict[str, str], key: str) -> dict[str, int]:
    """`topic:partition:offset,...`."""
    offsets: dict[str, int] = {}
    for part in filter(None, options.pop(key, "").split(",")):
        split, _, offset = part.rpartition(":")
        if not split.rpartition(":")[2].isdigit() or not offset.isdigit():
            raise ValueError(f"{key} must be topic:partition:offset, several separated by commas, got {part!r}")
        offsets[split] = int(offset)
    return offsets


def parse_kafka_uri(uri: str) -> KafkaConfig:
    """The section that an address means. Messages are Arrow, as tzrec's are.

    Values are percent-decoded and otherwise taken as they are (a "+" too: passwords hold them). Raises ValueError that says what is
    missing or wrong; it never repeats the values of client settings, which may be secrets.
    """
    brokers, topic, options = split_kafka_uri(uri)
    group = options.pop("group.id", "")
    if not group:
        raise ValueError("has no group.id")
    start, end = _milliseconds(options, "start.timestamp.ms"), _milliseconds(options, "end.timestamp.ms")
    end_offsets = _offsets(options, "end.offsets")
    return KafkaConfig(
        brokers=brokers,
        topic=(topic,),
        group_id=group,
        start_timestamp_ms=start,
        end_timestamp_ms=end,
        end_offsets=end_offsets,
        message_format="arrow",
        client=dict(options),
    )


def split_kafka_uri(uri: str) -> tuple[str, str, dict[str, str]]:
    """Brokers, topic and options of an address, percent-decoded. Raises ValueError as `parse_kafka_uri` does."""
    scheme, _, rest = uri.partition("://")
    address, _, query = rest.partition("?")
    brokers, _, topic = address.partition("/")
    topic = topic.strip("/")
    if scheme != "kafka" or not brokers or not topic:
        raise ValueError("not of the form kafka://host:port[,host:port]/topic?group.id=GROUP")
    if "#" in uri:
        raise ValueError("holds a '#'; write it as %23")
    options: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{unquote(key)} has no value; write key=value")
        options[unquote(key)] = unquote(value)
    return brokers, unquote(topic), options
