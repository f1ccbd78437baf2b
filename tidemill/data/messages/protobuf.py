"""Protobuf: one row a message, read into Arrow without an object for each."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import DecodeError

from tidemill.data.messages.columns import Fitting
from tidemill.data.messages.decoder import Columns
from tidemill.data.messages.registry import HEADER_BYTES, RegisteredSchema, SchemaRegistry
from tidemill.data.messages.wire import RowDecoder, RowFormat, registry_header, schema_number
from tidemill.errors import ConfigError, MissingExtraError

try:
    import ptars
except ImportError:
    ptars = None  # type: ignore[assignment]

_MOST_INDEXES = 32
_STANDARD = "google/protobuf/"


def protobuf_from_file(columns: Columns | None, where: str, path: str, message_type: str) -> RowDecoder:
    """A decoder of messages of one type in a compiled descriptor set. Raises ConfigError naming the file."""
    _require_ptars()
    fitting = Fitting(columns, where)
    try:
        files = list(FileDescriptorSet.FromString(Path(path).read_bytes()).file)
        if not files:
            raise ValueError("it holds no file")
        format_ = ProtobufFormat(files, _named(files, message_type), fitting.names)
        fitting.check(format_.schema)
    except (OSError, ValueError, DecodeError) as error:
        how = "make it with protoc --include_imports --descriptor_set_out=FILE"
        raise ConfigError(f"kafka.schema_file {path}: {error} ({how})") from None
    return RowDecoder(fitting, local=format_)


def protobuf_from_registry(columns: Columns | None, where: str, registry: SchemaRegistry) -> RowDecoder:
    """A decoder of messages that say the number of their schema and which of its message types they are.

    `registry` gives serialized schemas.
    """
    _require_ptars()
    fitting = Fitting(columns, where)

    def registered(head: bytes) -> ProtobufFormat | None:
        found = registry.schema(schema_number(head))
        if found is None:
            return None
        if found.kind != "PROTOBUF":
            raise ValueError(f"it is {found.kind}, not PROTOBUF")
        indexes, _ = _indexes(head, HEADER_BYTES)
        files = [_file(schema, name) for name, schema in found.references.items()]
        main = _file(found, "row.proto")
        return ProtobufFormat([*files, main], _at(main, indexes), fitting.names)

    return RowDecoder(fitting, registered=registered, header=_header)


class ProtobufFormat(RowFormat):
    """Messages of one type. `files`: each behind those it imports; `message_type`: full name, in any of them. `names`: the columns
    to read, None: all; other fields are skipped. Fields without presence that aren't set are 0, "" or empty.
    """

    def __init__(self, files: Sequence[FileDescriptorProto], message_type: str, names: Sequence[str] | None) -> None:
        # What the schema has is checked on all of it; what is read leaves out what nobody wants.
        self.schema = ptars.get_schema(_descriptor(files, message_type), _settings())
        descriptor = _descriptor([_only(file, message_type, names) for file in files], message_type)
        pool = ptars.HandlerPool([descriptor.file], config=_settings())
        self._handler = pool.get_for_message(descriptor)

    def read(self, payloads: Sequence[bytes]) -> pa.Table:
        return pa.Table.from_batches([self._handler.array_to_record_batch(pa.array(payloads, pa.binary()))])

    def explain(self, payload: bytes, error: str) -> str:
        return f"it doesn't fit its schema: {error.removeprefix('failed to decode Protobuf message: ')}"


def _require_ptars() -> None:
    if ptars is None:
        raise MissingExtraError("kafka.message_format protobuf needs ptars: pip install 'tidemill[protobuf]'")


def _settings() -> ptars.PtarsConfig:
    return ptars.PtarsConfig(enum_repr="string", timestamp_unit="us", timestamp_tz="UTC")


def _descriptor(files: Iterable[FileDescriptorProto], message_type: str) -> Descriptor:
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    try:
        for file in files:
            for name in file.dependency:
                if name.startswith(_STANDARD) and name not in added:
                    _add_standard(pool, name, added)
            if file.name not in added:
                pool.AddSerializedFile(file.SerializeToString())
                added.add(file.name)
        return pool.FindMessageTypeByName(message_type)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a Protobuf schema: {error}") from None


def _add_standard(pool: descriptor_pool.DescriptorPool, name: str, added: set[str]) -> None:
    """Add a file that comes with protobuf, and what it imports."""
    try:
        module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ImportError:
        raise ValueError(f"it imports {name}, which isn't there") from None
    for dependency in module.DESCRIPTOR.dependencies:
        if dependency.name not in added:
            _add_standard(pool, dependency.name, added)
    pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    added.add(name)


def _named(files: Sequence[FileDescriptorProto], message_type: str) -> str:
    """The full name of the message that is a row."""
    known = [_full(file, message.name) for file in files if not file.name.startswith(_STANDARD) for message in file.message_type]
    if message_type:
        return message_type
    if len(known) != 1:
        raise ValueError(f"kafka.message_type must say which message is a row; it has {', '.join(known) or 'none'}")
    return known[0]


def _full(file: FileDescriptorProto, *names: str) -> str:
    return ".".join([*([file.package] if file.package else []), *names])


def _file(schema: RegisteredSchema, name: str) -> FileDescriptorProto:
    try:
        file = FileDescriptorProto.FromString(base64.b64decode(schema.text, validate=True))
    except (ValueError, DecodeError) as error:
        raise ValueError(f"the registry gave no serialized file descriptor: {error}") from None
    # What imports it knows it by the reference's name.
    file.name = name
    return file


def _at(file: FileDescriptorProto, indexes: Sequence[int]) -> str:
    """The full name of the message type that lies there."""
    messages, names = file.message_type, list[str]()
    for index in indexes:
        if not 0 <= index < len(messages):
            raise ValueError(f"it has no message type at {list(indexes)}")
        names.append(messages[index].name)
        messages = messages[index].nested_type
    return _full(file, *names)


def _only(file: FileDescriptorProto, message_type: str, names: Sequence[str] | None) -> FileDescriptorProto:
    """A copy whose message of that name has these fields only."""
    copy = FileDescriptorProto()
    copy.CopyFrom(file)
    prefix = f"{file.package}." if file.package else ""
    if names is not None and message_type.startswith(prefix):
        messages, message = copy.message_type, None
        for part in message_type.removeprefix(prefix).split("."):
            message = next((candidate for candidate in messages if candidate.name == part), None)
            if message is None:
                return copy
            messages = message.nested_type
        assert message is not None
        _keep(message, set(names))
    return copy


def _keep(message: DescriptorProto, names: set[str]) -> None:
    kept = [field for field in message.field if field.name in names]
    groups = sorted({field.oneof_index for field in kept if field.HasField("oneof_index")})
    oneofs = [message.oneof_decl[index] for index in groups]
    for field in kept:
        if field.HasField("oneof_index"):
            field.oneof_index = groups.index(field.oneof_index)
    kept = [type(field).FromString(field.SerializeToString()) for field in kept]
    oneofs = [type(oneof).FromString(oneof.SerializeToString()) for oneof in oneofs]
    del message.field[:]
    del message.oneof_decl[:]
    message.field.extend(kept)
    message.oneof_decl.extend(oneofs)


def _header(message: bytes) -> int:
    start = registry_header(message)
    return start + 1 if message[start : start + 1] == b"\0" else _indexes(message, start)[1]


def _indexes(message: bytes, start: int) -> tuple[list[int], int]:
    """(where the type stands in its file, by message and nested message; where the header ends). A single 0 means [0]."""
    count, at = _varint(message, start)
    if count == 0:
        return [0], at
    if not 0 < count <= _MOST_INDEXES:
        raise ValueError(f"its header has {count} message indexes")
    indexes = []
    for _ in range(count):
        index, at = _varint(message, at)
        indexes.append(index)
    return indexes, at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(a zigzag number, where it ends)"""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("its header ends within the message indexes")
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return (value >> 1) ^ -(value & 1), at
