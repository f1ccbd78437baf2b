"""The base of every document that two processes share: a typed, versioned, canonical JSON object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from tidemill.errors import CorruptError

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
_SEAL = "sha256"


class Document(BaseModel):
    """A frozen document. Its bytes start with `"schema": "tidemill.<name>/<version>"` in canonical JSON.

    Canonical: keys sorted, UTF-8, two-space indent, final newline; equal documents have equal bytes. `parse` upgrades older
    versions through `upgrades` (version -> pure function to the next one). NaN and infinities are refused when written.
    A `sealed` document carries the SHA-256 of the rest of its bytes, so that a flipped bit in it is noticed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    schema_name: ClassVar[str]
    schema_version: ClassVar[int] = 1
    upgrades: ClassVar[dict[int, Upgrade]] = {}
    sealed_from: ClassVar[int | None] = None
    """The first version whose documents are sealed; None: they aren't."""

    _stored_digest: str | None = PrivateAttr(default=None)
    """Of the bytes that an older version was read from: what others wrote down of it then is that, and not our form's."""

    @classmethod
    def schema_id(cls) -> str:
        return f"tidemill.{cls.schema_name}/{cls.schema_version}"

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        body = {"schema": self.schema_id(), **self.model_dump(mode="json")}
        return canonical(body if self.sealed_from is None else {**body, _SEAL: _seal(body)})

    def digest(self) -> str:
        """SHA-256 of the canonical bytes, in hex; of a document of an older version, of the bytes as they lie in the store."""
        return self._stored_digest or hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Self:
        """The document in `data`. Raises CorruptError that names `where` and what is wrong."""
        body = parse_object(data, where=where)
        schema = body.pop("schema", None)
        prefix, _, version = str(schema).rpartition("/")
        if prefix != f"tidemill.{cls.schema_name}" or not version.isdigit():
            raise CorruptError(f"{where}: holds {schema!r}, not a {cls.schema_id()!r}")
        if int(version) > cls.schema_version:
            raise CorruptError(f"{where}: {schema} was written by a newer tidemill; this one reads up to {cls.schema_id()}")
        if cls.sealed_from is not None and int(version) >= cls.sealed_from:
            seal = body.pop(_SEAL, None)
            if seal != _seal({"schema": schema, **body}):
                raise CorruptError(f"{where}: damaged: its content isn't what its {_SEAL} field says")
        for step in range(int(version), cls.schema_version):
            body = cls.upgrades[step](body)
        try:
            # Strings to numbers and the like would hide a torn or foreign document.
            document = cls.model_validate_json(orjson.dumps(body), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise CorruptError(f"{where}: {key}: {first['msg']}") from None
        if int(version) < cls.schema_version:
            document._stored_digest = hashlib.sha256(data).hexdigest()
        return document

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; a changed one isn't the stored document any more."""
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._stored_digest = None
        return copy


class Part(BaseModel):
    """A nested object of a document."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def canonical(body: dict[str, Any]) -> bytes:
    """The bytes of a JSON object: keys sorted, two-space indent, final newline."""
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(body)).hexdigest()


def parse_object(data: bytes, *, where: str) -> dict[str, Any]:
    """`data` as one JSON object. Raises CorruptError that names `where`."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptError(f"{where}: not JSON ({error})") from None
    if not isinstance(body, dict):
        raise CorruptError(f"{where}: not a JSON object but {type(body).__name__}")
    return body
