"""Avro: one row a message. Many messages are read at once, as one block of a container file in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import polars as pl
import pyarrow as pa

from tidemill.data.messages.columns import Fitting
from tidemill.data.messages.decoder import BAD_MESSAGE, Columns
from tidemill.data.messages.registry import RegisteredSchema, SchemaRegistry
from tidemill.data.messages.wire import RowDecoder, RowFormat, registry_header, schema_number
from tidemill.errors import ConfigError, MissingExtraError
from tidemill.logs import log

try:
    import fastavro
except ImportError:
    fastavro = None  # type: ignore[assignment]

_MARK_BYTES = 8
_SYNC = bytes(16)
_PRIMITIVES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "null": pa.null(),
}
_LOGICAL = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
}


def avro_from_file(columns: Columns | None, where: str, path: str) -> RowDecoder:
    """A decoder of messages that were all written with the schema of an `.avsc` file. Raises ConfigError naming the file."""
    _require_fastavro()
    fitting = Fitting(columns, where)
    try:
        format_ = AvroFormat(Path(path).read_text(encoding="utf-8"), {}, fitting.names, where)
        fitting.check(format_.schema)
    except (OSError, ValueError) as error:
        raise ConfigError(f"kafka.schema_file {path}: {error}") from None
    return RowDecoder(fitting, local=format_)


def avro_from_registry(columns: Columns | None, where: str, registry: SchemaRegistry) -> RowDecoder:
    """A decoder of messages that say the number of their schema."""
    _require_fastavro()
    fitting = Fitting(columns, where)

    def registered(head: bytes) -> AvroFormat | None:
        found = registry.schema(schema_number(head))
        if found is None:
            return None
        if found.kind != "AVRO":
            raise ValueError(f"it is {found.kind}, not AVRO")
        return AvroFormat(found.text, found.references, fitting.names, where)

    return RowDecoder(fitting, registered=registered, header=registry_header)


class AvroFormat(RowFormat):
    """What was written with one schema. `names`: the columns to read, None: all. Raises ValueError for a schema that is none.

    A mark behind each message proves that the reader took each message for exactly one row: it is random, so that it can't
    stand in a message, and rows in which it isn't found where it should be began or ended elsewhere.
    Schemas that the block reader can't do (unions of several types, recursion) are read message by message, which is slower.
    """

    def __init__(self, text: str, references: dict[str, RegisteredSchema], names: Sequence[str] | None, where: str) -> None:
        named: dict[str, Any] = {}
        for reference in references.values():
            _parse(reference.text, named)
        self._parsed = _parse(text, named)
        if not isinstance(self._parsed, dict) or self._parsed.get("type") != "record":
            raise ValueError("it isn't a record, so it has no columns")
        self._types = {field["name"]: _arrow_type(field["type"], named, ()) for field in self._parsed["fields"]}
        wanted = self._types if names is None else [name for name in names if name in self._types]
        self._wanted = list(wanted)
        self._mark = os.urandom(_MARK_BYTES)
        self._mark_name = "end_of_message"
        while self._mark_name in self._types:
            self._mark_name += "_"
        self._head: bytes | None = self._block_head(named)
        self.schema = pa.schema(list(self._types.items()))
        if self._head is None:
            log.warning("%s: an Avro schema with unions of several types, or recursion, is read message by message: slower", where)

    def read(self, payloads: Sequence[bytes]) -> pa.Table:
        if self._head is not None:
            try:
                return self._read_block(payloads)
            except BAD_MESSAGE:
                # The block reader takes no arrays whose blocks say their size, which are rare; they are read here, one by one.
                if len(payloads) > 1:
                    raise
        rows = [self._read_one(payload) for payload in payloads]
        return pa.table({name: pa.array([row[name] for row in rows], self._types[name]) for name in self._wanted})

    def _read_block(self, payloads: Sequence[bytes]) -> pa.Table:
        assert self._head is not None
        data = self._mark.join(payloads) + self._mark
        block = b"".join([self._head, _long(len(payloads)), _long(len(data)), data, _SYNC])
        frame = pl.read_avro(io.BytesIO(block), columns=[*self._wanted, self._mark_name])
        marks = frame.get_column(self._mark_name).to_numpy().view(np.int64)
        if frame.height != len(payloads) or not (marks == int.from_bytes(self._mark, "little", signed=True)).all():
            raise ValueError("a message is longer or shorter than its schema says")
        return frame.drop(self._mark_name).to_arrow(compat_level=pl.CompatLevel.oldest())

    def _read_one(self, payload: bytes) -> dict[str, Any]:
        data = io.BytesIO(payload)
        try:
            row: Any = fastavro.schemaless_reader(data, self._parsed, None)
        except Exception as error:  # noqa: BLE001 - the reader raises all sorts for damaged bytes (IndexError, struct.error, ...)
            raise ValueError(f"it doesn't fit its schema: {error or type(error).__name__}") from None
        if data.tell() != len(payload):
            raise ValueError(f"it doesn't fit its schema: {len(payload) - data.tell()} bytes are left over")
        return {name: _to_arrow(row[name], self._types[name]) for name in self._wanted}

    def _block_head(self, named: dict[str, Any]) -> bytes | None:
        """What stands in front of a block; None if the block reader can't do the schema."""
        try:
            fields = [{"name": field["name"], "type": _plain(field["type"], named, ())} for field in self._parsed["fields"]]
            schema = orjson.dumps(
                {"type": "record", "name": "row", "fields": [*fields, {"name": self._mark_name, "type": "double"}]}
            )
            metadata = [(b"avro.schema", schema), (b"avro.codec", b"null")]
            pairs = b"".join(_long(len(part)) + part for pair in metadata for part in pair)
            head = b"Obj\x01" + _long(len(metadata)) + pairs + _long(0) + _SYNC
            pl.read_avro(io.BytesIO(head + _long(0) + _long(0) + _SYNC), columns=[*self._wanted, self._mark_name])
        except (*BAD_MESSAGE, RecursionError):
            return None
        return head


def _require_fastavro() -> None:
    if fastavro is None:
        raise MissingExtraError("kafka.message_format avro needs fastavro: pip install 'tidemill[avro]'")


def _parse(text: str, named: dict[str, Any]) -> Any:
    try:
        return fastavro.parse_schema(orjson.loads(text), named_schemas=named)
    except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not an Avro schema: {error or type(error).__name__}") from None


def _long(value: int) -> bytes:
    """A number as Avro writes it."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _resolved(schema: Any, named: dict[str, Any], within: tuple[str, ...], then: Callable[[Any, tuple[str, ...]], Any]) -> Any:
    """What `then` makes of a schema, or of the one that a name stands for. Raises ValueError for one inside itself."""
    if isinstance(schema, str) and schema not in _PRIMITIVES:
        if schema in within:
            raise ValueError(f"{schema} holds itself")
        schema = named[schema]
    inner = (*within, schema["name"]) if isinstance(schema, dict) and "name" in schema else within
    return then(schema, inner)


def _plain(schema: Any, named: dict[str, Any], within: tuple[str, ...]) -> Any:
    """An equal schema without names, and with maps as what they are on the wire: arrays of keys and values."""

    def build(schema: Any, within: tuple[str, ...]) -> Any:
        if isinstance(schema, str):
            return schema
        if isinstance(schema, list):
            return [_plain(branch, named, within) for branch in schema]
        kind = schema["type"]
        if kind == "record" or kind == "error":
            fields = [{"name": field["name"], "type": _plain(field["type"], named, within)} for field in schema["fields"]]
            return {"type": "record", "name": schema["name"], "fields": fields}
        if kind == "array":
            return {"type": "array", "items": _plain(schema["items"], named, within)}
        if kind == "map":
            values = {"name": "value", "type": _plain(schema["values"], named, within)}
            return {
                "type": "array",
                "items": {"type": "record", "name": "entry", "fields": [{"name": "key", "type": "string"}, values]},
            }
        return {key: value for key, value in schema.items() if not key.startswith("__")}

    return _resolved(schema, named, within, build)


def _arrow_type(schema: Any, named: dict[str, Any], within: tuple[str, ...]) -> pa.DataType:
    """The type of a column. What a column can't be (a record in itself, a union of different things) is binary, so that it can
    be there, but not be read as anything."""

    def build(schema: Any, within: tuple[str, ...]) -> pa.DataType:
        if isinstance(schema, str):
            return _PRIMITIVES[schema]
        if isinstance(schema, list):
            return _union_type([_arrow_type(branch, named, within) for branch in schema])
        kind, logical = schema["type"], schema.get("logicalType")
        if logical in _LOGICAL:
            return _LOGICAL[logical]
        if logical == "decimal":
            return pa.decimal128(schema["precision"], schema.get("scale", 0))
        if kind in ("record", "error"):
            return pa.struct([(field["name"], _arrow_type(field["type"], named, within)) for field in schema["fields"]])
        if kind == "array":
            return pa.list_(_arrow_type(schema["items"], named, within))
        if kind == "map":
            return pa.map_(pa.string(), _arrow_type(schema["values"], named, within))
        return {"enum": pa.string(), "fixed": pa.binary()}.get(kind) or _PRIMITIVES[kind]

    try:
        return _resolved(schema, named, within, build)
    except ValueError:
        return pa.binary()


def _union_type(branches: Sequence[pa.DataType]) -> pa.DataType:
    kinds = [kind for kind in branches if not pa.types.is_null(kind)]
    if not kinds:
        return pa.null()
    if all(kind == kinds[0] for kind in kinds):
        return kinds[0]
    if all(kind in (pa.string(), pa.int32(), pa.int64()) for kind in kinds):
        return pa.string() if pa.string() in kinds else pa.int64()
    if all(kind in (pa.int32(), pa.float32(), pa.float64()) for kind in kinds):
        return pa.float64()
    return pa.binary()


def _to_arrow(value: Any, kind: pa.DataType) -> Any:
    """A value as Arrow's constructor of arrays takes it."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return [(key, _to_arrow(item, kind.item_type)) for key, item in value.items()]
    if pa.types.is_list(kind):
        return [_to_arrow(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _to_arrow(value[field.name], field.type) for field in kind}
    if kind == pa.string():
        return str(value)
    if kind == pa.binary() and not isinstance(value, bytes):
        return None
    return value
