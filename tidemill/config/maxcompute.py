"""How MaxCompute tables are read: what tzrec hides in environment variables and constants."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from tidemill.config.base import Config, Positive, Seconds
from tidemill.config.odps_uri import parse_odps_paths

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MaxComputeConfig(Config):
    """MaxCompute tables as the source of rows. Credentials aren't part of a config: see the guide."""

    tables: tuple[str, ...] = ()
    """Addresses of the training data (`odps://project/tables/[schema.]table/pt=a&pt=b`), instead of train_input_path."""
    tunnel_endpoint: str = ""
    """Address of the Storage API; empty: the service is asked."""
    readers: Positive = 2
    """How many ranges of rows each rank reads ahead at once."""
    rows_per_request: Positive = 200_000
    """Rows in a range: what one request asks for."""
    rows_per_batch: Annotated[int, Field(gt=0, le=20_000)] = 20_000
    """Rows that come at once; the service may give fewer."""
    session_timeout_s: PositiveSeconds = 600.0
    """Longest wait for the service to make a read session."""
    refresh_interval_s: PositiveSeconds = 600.0
    """How often the sessions that are read are refreshed; without it they end after about a day."""
    alarm_after_s: PositiveSeconds = 3600.0
    """An alarm is logged when a session couldn't be refreshed for so long."""
    outage_timeout_s: Seconds = 600.0
    """How long a range is tried again without a single new row."""

    @field_validator("tables")
    @classmethod
    def _addresses(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path.text for path in parse_odps_paths(tables)) if tables else tables
