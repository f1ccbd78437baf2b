"""The JSON bodies that the client sends, checked."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_pascal

from tidemill.testing.maxcompute.replies import invalid_argument
from tidemill.testing.maxcompute.splits import SplitMode

Body = TypeVar("Body", bound="Request")


class Request(BaseModel):
    """A body with names such as `RequiredDataColumns`; names that aren't known are an error, so that nothing is ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_pascal)


class SplitOptions(Request):
    split_mode: SplitMode = SplitMode.SIZE
    split_number: int | None = None
    cross_partition: bool = True


class ArrowOptions(Request):
    timestamp_unit: str = "nano"
    datetime_unit: str = "milli"


class ReadSessionRequest(Request):
    required_data_columns: list[str] = []
    required_partition_columns: list[str] = []
    required_partitions: list[str] = []
    required_bucket_ids: list[int] = []
    split_options: SplitOptions = SplitOptions()
    arrow_options: ArrowOptions = ArrowOptions()
    filter_predicate: str = ""
    enable_estimate_stats: bool = False


class DynamicPartitionOptions(Request):
    invalid_strategy: str = "Exception"
    invalid_limit: int = 1
    dynamic_partition_limit: int = 512


class WriteSessionRequest(Request):
    partition_spec: str = ""
    overwrite: bool = True
    arrow_options: ArrowOptions = ArrowOptions()
    dynamic_partition_options: DynamicPartitionOptions = DynamicPartitionOptions()
    support_write_cluster: bool = False
    enhance_write_check: bool = True


class CommitRequest(Request):
    commit_messages: list[str]
    wait_flying_writers_timeout_seconds: int | None = Field(default=None, ge=0)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """A body as `kind`. Raises ApiError that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise invalid_argument(f"{where}: {first['msg']}") from error
