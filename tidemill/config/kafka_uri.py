"""tzrec's `kafka://host:port[,host:port]/topic?group.id=G&k=v` addresses."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from tidemill.config.data import KafkaConfig


def parse_kafka_uri(uri: str) -> KafkaConfig:
    """The section that an address means. Messages are Arrow, as tzrec's are. Raises ValueError that says what is missing."""
    parts = urlsplit(uri)
    topic = parts.path.strip("/")
    if parts.scheme != "kafka" or not parts.netloc or not topic:
        raise ValueError("not of the form kafka://host:port[,host:port]/topic?group.id=GROUP")
    if parts.fragment:
        raise ValueError("holds a '#'; write it as %23")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    group = options.pop("group.id", "")
    if not group:
        raise ValueError("has no group.id")
    start = options.pop("start.timestamp.ms", None)
    if start is not None and not start.isdecimal():
        raise ValueError(f"start.timestamp.ms must be an integer >= 0, got {start!r}")
    return KafkaConfig(
        brokers=parts.netloc,
        topic=topic,
        group_id=group,
        start_timestamp_ms=int(start) if start is not None else None,
        message_format="arrow",
        client=dict(options),
    )
