"""One request as the handlers see it, and the log of requests that tests look into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from tidemill.testing.maxcompute.faults import Operation
from tidemill.testing.maxcompute.replies import ApiError, invalid_argument


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request; `parts` are what the route's pattern found in the path, header names are lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    parts: Mapping[str, str]

    def number(self, name: str, default: int) -> int:
        """A whole number of the query. Raises ApiError for anything else."""
        try:
            return int(self.query.get(name, default))
        except ValueError:
            raise invalid_argument(f"{name} must be a whole number, not {self.query[name]!r}") from None

    def needed(self, name: str) -> str:
        """A part of the query that must be there. Raises ApiError."""
        try:
            return self.query[name]
        except KeyError:
            raise ApiError(400, "MissingArgument", f"the query lacks {name}") from None


class LoggedRequest(BaseModel):
    """What tests can ask about a request: `body` is its text when that is JSON or XML; `status` 0 means no answer was sent.

    `at` is Unix seconds of the emulator's clock. No header is kept: they hold credentials.
    """

    model_config = ConfigDict(frozen=True)

    operation: Operation
    method: str
    path: str
    query: dict[str, str]
    body: str
    status: int
    at: float
