"""A schema registry for tests: Confluent's HTTP interface, as far as readers of messages use it, on the loopback."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_SCHEMA = re.compile(r"^/schemas/ids/(\d+)$")
_VERSIONS = re.compile(r"^/subjects/([^/]+)/versions$")
_VERSION = re.compile(r"^/subjects/([^/]+)/versions/(\d+|latest)$")


@dataclass(frozen=True, slots=True)
class Reference:
    """Another schema that a schema refers to by `name`."""

    name: str
    subject: str
    version: int = 1


@dataclass(frozen=True, slots=True)
class _Registered:
    number: int
    kind: str
    text: str
    references: tuple[Reference, ...]

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = {"schema": self.text}
        if self.kind != "AVRO":
            found["schemaType"] = self.kind
        if self.references:
            found["references"] = [
                {"name": other.name, "subject": other.subject, "version": other.version} for other in self.references
            ]
        return found


@dataclass(slots=True)
class _State:
    """What the registry holds; everything under `lock`."""

    user: str = ""
    password: str = ""
    token: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    schemas: list[_Registered] = field(default_factory=list)
    subjects: dict[str, list[_Registered]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    faults: deque[int] = field(default_factory=deque)


class DevelopmentRegistry:
    """A registry in a thread of this process, ready when the constructor returns.

        with DevelopmentRegistry() as registry:
            number = registry.register("clicks-value", schema_text)
            message = registry.header(number) + payload

    With `user` and `password`, or `token`, requests without them are refused. Protobuf schemas are given as serialized file
    descriptors in base 64 (what `protobuf_text` makes), since a real registry's own form, their source, needs a compiler.
    """

    def __init__(self, *, user: str = "", password: str = "", token: str = "", port: int = 0) -> None:
        self._state = _State(user, password, token)
        state = self._state

        class Handler(_Handler):
            registry = state

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="schema-registry", daemon=True)
        self._thread.start()

    def __enter__(self) -> DevelopmentRegistry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> list[str]:
        """The paths that were asked for, in order, with their queries."""
        with self._state.lock:
            return list(self._state.requests)

    def register(
        self, subject: str, schema: str | Mapping[str, Any], kind: str = "AVRO", *, references: Sequence[Reference] = ()
    ) -> int:
        """A schema's number: a new one, unless the very same schema is there already."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        with self._state.lock:
            return _register(self._state, subject, text, kind, tuple(references)).number

    def fail_next(self, *statuses: int) -> None:
        """Answer the next requests with these HTTP statuses, in order; 0 drops the connection."""
        with self._state.lock:
            self._state.faults.extend(statuses)

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @staticmethod
    def header(number: int, indexes: Sequence[int] | None = None) -> bytes:
        """What stands in front of a message. `indexes`: of a Protobuf message's type; [0] is the first of its file."""
        head = b"\0" + number.to_bytes(4, "big")
        if indexes is None:
            return head
        if list(indexes) == [0]:
            return head + b"\0"
        return head + b"".join(_zigzag(value) for value in (len(indexes), *indexes))

    @staticmethod
    def protobuf_text(serialized_file: bytes) -> str:
        """A serialized FileDescriptorProto as `register` takes it."""
        return base64.b64encode(serialized_file).decode()


def _register(state: _State, subject: str, text: str, kind: str, references: tuple[Reference, ...]) -> _Registered:
    found = next((other for other in state.schemas if (other.text, other.kind, other.references) == (text, kind, references)), None)
    if found is None:
        found = _Registered(len(state.schemas) + 1, kind, text, references)
        state.schemas.append(found)
    versions = state.subjects.setdefault(subject, [])
    if found not in versions:
        versions.append(found)
    return found


def _zigzag(value: int) -> bytes:
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


class _Handler(BaseHTTPRequestHandler):
    registry: _State
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_POST(self) -> None:
        self._handle(self._post)

    def log_message(self, *_: Any) -> None:
        """Tests want no access log."""

    def _handle(self, answer: Callable[[str], tuple[int, dict[str, Any]]]) -> None:
        with self.registry.lock:
            self.registry.requests.append(self.path)
            fault = self.registry.faults.popleft() if self.registry.faults else None
        if fault == 0:
            self.close_connection = True
            self.connection.close()
            return
        if fault is not None:
            self._send(fault, {"error_code": fault, "message": "as the test asked"})
        elif not self._is_allowed():
            self._send(401, {"error_code": 401, "message": "Unauthorized"})
        else:
            self._send(*answer(urlsplit(self.path).path))

    def _is_allowed(self) -> bool:
        state, given = self.registry, self.headers.get("Authorization", "")
        if state.token:
            return given == f"Bearer {state.token}"
        expected = base64.b64encode(f"{state.user}:{state.password}".encode()).decode()
        return not state.user or given == f"Basic {expected}"

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        by_number, by_version = _SCHEMA.match(path), _VERSION.match(path)
        with self.registry.lock:
            if by_number:
                number = int(by_number[1])
                found = self.registry.schemas[number - 1] if 0 < number <= len(self.registry.schemas) else None
            elif by_version:
                versions = self.registry.subjects.get(unquote(by_version[1]), [])
                version = len(versions) if by_version[2] == "latest" else int(by_version[2])
                found = versions[version - 1] if 0 < version <= len(versions) else None
            else:
                return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
        if found is None:
            return 404, {"error_code": 40403 if by_number else 40402, "message": "Schema not found"}
        if found.kind == "PROTOBUF" and parse_qs(urlsplit(self.path).query).get("format") != ["serialized"]:
            return 422, {"error_code": 422, "message": "this registry gives Protobuf schemas with format=serialized only"}
        return 200, found.answer()

    def _post(self, path: str) -> tuple[int, dict[str, Any]]:
        match = _VERSIONS.match(path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if match is None or not isinstance(body.get("schema"), str):
            return 404 if match is None else 422, {"error_code": 422, "message": "not a schema"}
        references = tuple(Reference(r["name"], r["subject"], r["version"]) for r in body.get("references", ()))
        with self.registry.lock:
            found = _register(self.registry, unquote(match[1]), body["schema"], body.get("schemaType", "AVRO"), references)
        return 200, {"id": found.number}

    def _send(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
