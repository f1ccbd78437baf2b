"""tzrec's `kafka://host:port[,host:port]/topic?group.id=G&k=v` addresses."""

from __future__ import annotations

from urllib.parse import unquote

from tidemill.config.data import KafkaConfig


def parse_kafka_uri(uri: str) -> KafkaConfig:
    """The section that an address means. Messages are Arrow, as tzrec's are.

    Values are percent-decoded and otherwise taken as they are (a "+" too: passwords hold them). Raises ValueError that says what is
    missing or wrong; it never repeats the values of client settings, which may be secrets.
    """
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
    group = options.pop("group.id", "")
    if not group:
        raise ValueError("has no group.id")
    start = options.pop("start.timestamp.ms", None)
    if start is not None and not (start.isascii() and start.isdigit()):
        raise ValueError(f"start.timestamp.ms must be an integer >= 0, got {start!r}")
    return KafkaConfig(
        brokers=brokers,
        topic=(unquote(topic),),
        group_id=group,
        start_timestamp_ms=int(start) if start is not None else None,
        message_format="arrow",
        client=dict(options),
    )
