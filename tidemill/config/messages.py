"""What a topic's messages are, beyond their format: where their schemas come from, and where those go that can't be used."""

from __future__ import annotations

from pydantic import Field, field_validator

from tidemill.config.base import Config, Positive, Seconds, secret


class SchemaRegistryConfig(Config):
    """A Confluent-style schema registry: messages begin with a zero byte and the number of their schema."""

    url: str
    """Its address, by HTTP or HTTPS."""
    user: str = ""
    """User of basic authentication."""
    password: str = secret("")
    """Its password."""
    token: str = secret("")
    """A bearer token, instead of user and password."""
    timeout_s: Seconds = 30.0
    """How long to try to get a schema before the run fails."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("needs to begin with http:// or https://")
        return url.rstrip("/")


class DeadLetterConfig(Config):
    """Where messages and rows are kept that can't be used. By default in the run's folder, `dead-letters-<rank>.jsonl`."""

    topic: str = ""
    """A topic of the same cluster, instead of the file."""
    max_bytes: Positive = 64 << 20
    """Most bytes of a run's file; what comes then is counted and reported, but not kept."""
    max_payload_bytes: Positive = Field(default=256 << 10)
    """Longer messages are cut to this in the file."""
