"""What the emulator answers: replies, and errors in the form that the client turns into its exception classes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tidemill.errors import TidemillError


class ApiError(TidemillError):
    """A refusal of the service: an HTTP status, a code (the client raises the class of that name) and a message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `stream` takes the place of `body`: its pieces are sent as they come, each as one chunk."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Iterator[bytes] | None = None


def invalid_argument(message: str) -> ApiError:
    return ApiError(400, "InvalidArgument", message)


def no_such_table(project: str, schema: str, table: str) -> ApiError:
    return ApiError(404, "NoSuchTable", f"table {project}.{schema}.{table} doesn't exist")


def no_such_partition(table: str, spec: str) -> ApiError:
    return ApiError(404, "NoSuchPartition", f"the specified partition {spec!r} of {table} doesn't exist")


def no_such_object(what: str) -> ApiError:
    return ApiError(404, "NoSuchObject", f"{what} doesn't exist")


def json_reply(document: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(document).encode())


def xml_reply(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, f'<?xml version="1.0"?>{text}'.encode(), "application/xml", headers or {})


def error_reply(error: ApiError) -> Reply:
    document = {"Code": error.code, "Message": error.message, "RequestId": new_id(), "HostId": "emulator"}
    return json_reply(document, error.status)


def new_id() -> str:
    """An identifier nobody else has: 32 hexadecimal digits."""
    return uuid.uuid4().hex
