"""A client of Confluent-style schema registries: schemas by the number that messages carry."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tidemill.config.dump import redact_address
from tidemill.config.messages import SchemaRegistryConfig
from tidemill.errors import ConfigError, DataError, DeadlineError
from tidemill.logs import log

HEADER_BYTES = 5
"""A zero byte and the schema's number, 4 bytes, big end first."""

_CALL_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MOST_UNKNOWN = 10_000
_MOST_REFERENCES = 1000


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema's text, its kind (AVRO, PROTOBUF, JSON), and the schemas that it refers to: name -> schema, each before those
    that refer to it."""

    kind: str
    text: str
    references: dict[str, RegisteredSchema]


class SchemaRegistry:
    """Each schema is fetched once. `serialized`: Protobuf schemas come as file descriptors in base 64. `interrupted`: once it is
    set, a question that gets no answer isn't asked again. For one thread."""

    def __init__(
        self, config: SchemaRegistryConfig, *, serialized: bool = False, interrupted: threading.Event | None = None
    ) -> None:
        self._config = config
        self._interrupted = interrupted or threading.Event()
        self._name = redact_address(config.url)
        self._query = {"format": "serialized"} if serialized else {}
        self._schemas: dict[int, RegisteredSchema] = {}
        self._unknown: set[int] = set()

    def schema(self, number: int) -> RegisteredSchema | None:
        """The schema of a number; None if the registry doesn't know it.

        Raises DeadlineError if it gives no answer in time, ConfigError if it refuses us, DataError if its answer makes no sense.
        """
        if number not in self._schemas and number not in self._unknown:
            found = self._get(f"/schemas/ids/{number}")
            if found is None:
                if len(self._unknown) < _MOST_UNKNOWN:
                    self._unknown.add(number)
                return None
            self._schemas[number] = self._with_references(found, f"schema {number}", {})
        return self._schemas.get(number)

    def _open(self) -> httpx.Client:
        """A client for one answer: the next one may be hours away."""
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if self._config.token:
            headers["Authorization"] = f"Bearer {self._config.token}"
        auth = httpx.BasicAuth(self._config.user, self._config.password) if self._config.user else None
        return httpx.Client(auth=auth, headers=headers, timeout=_CALL_TIMEOUT_S)

    def _with_references(self, found: dict[str, Any], what: str, seen: dict[str, RegisteredSchema]) -> RegisteredSchema:
        if not isinstance(found.get("schema"), str):
            raise DataError(f"schema registry {self._name}: {what}: the answer holds no schema")
        references: dict[str, RegisteredSchema] = {}
        for reference in found.get("references") or []:
            name = reference["name"]
            if name not in seen:
                if len(seen) >= _MOST_REFERENCES:
                    raise DataError(f"schema registry {self._name}: {what}: more than {_MOST_REFERENCES} references")
                path = f"/subjects/{reference['subject']}/versions/{reference['version']}"
                other = self._get(path)
                if other is None:
                    raise DataError(f"schema registry {self._name}: {what} refers to {name!r}, which isn't there ({path})")
                seen[name] = self._with_references(other, f"{what}, {name!r}", seen)
            references |= {**seen[name].references, name: seen[name]}
        return RegisteredSchema(found.get("schemaType", "AVRO"), found["schema"], references)

    def _get(self, path: str) -> dict[str, Any] | None:
        """The answer's JSON object; None for one that isn't there."""
        until = time.monotonic() + self._config.timeout_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                with self._open() as client:
                    response = client.get(self._config.url + path, params=self._query)
                if response.status_code < 500 and response.status_code not in (408, 429):
                    return self._answer(response, path)
                why = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            if time.monotonic() + pause > until:
                raise DeadlineError(f"schema registry {self._name}{path}: no answer within {self._config.timeout_s:g} s ({why})")
            log.warning("schema registry %s%s: %s; trying again", self._name, path, why)
            if self._interrupted.wait(pause):
                raise DeadlineError(f"schema registry {self._name}{path}: given up, since the run ends ({why})")
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _answer(self, response: httpx.Response, path: str) -> dict[str, Any] | None:
        if response.status_code == 404:
            return None
        if response.status_code in (401, 403):
            check = "check kafka.schema_registry's user and password, or its token"
            raise ConfigError(f"schema registry {self._name}{path}: HTTP {response.status_code}; {check}")
        try:
            found = response.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise DataError(f"schema registry {self._name}{path}: HTTP {response.status_code} without a JSON object")
        return found
