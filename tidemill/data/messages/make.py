"""The decoder that a topic's config asks for."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pyarrow as pa

from tidemill.config.data import KafkaConfig
from tidemill.data.messages.arrow import ArrowDecoder
from tidemill.data.messages.avro import avro_from_file, avro_from_registry
from tidemill.data.messages.decoder import Columns, Decoder
from tidemill.data.messages.json import JsonDecoder
from tidemill.data.messages.protobuf import protobuf_from_file, protobuf_from_registry
from tidemill.data.messages.registry import HEADER_BYTES, SchemaRegistry
from tidemill.errors import ConfigError


def make_decoder(config: KafkaConfig, columns: Columns | None, *, interrupted: threading.Event | None = None) -> Decoder:
    """A decoder of the topics' messages. `interrupted`: once it is set, schemas aren't waited for any more.

    Raises ConfigError for settings that don't go together and for a schema file that can't be used, MissingExtraError for a
    package that isn't installed.
    """
    where = f"kafka {', '.join(config.topic)}"
    if config.message_format == "json":
        return JsonDecoder(_typed(columns), where, header=HEADER_BYTES if config.schema_registry else 0)
    if config.message_format == "arrow":
        return ArrowDecoder(columns, where, declared=_arrow_schema(config.schema_file) if config.schema_file else None)
    if config.schema_registry is not None:
        is_avro = config.message_format == "avro"
        registry = SchemaRegistry(config.schema_registry, serialized=not is_avro, interrupted=interrupted)
        return (avro_from_registry if is_avro else protobuf_from_registry)(columns, where, registry)
    if not config.schema_file:
        raise ConfigError(f"kafka.message_format {config.message_format} needs a schema_registry or a schema_file")
    if config.message_format == "avro":
        return avro_from_file(columns, where, config.schema_file)
    return protobuf_from_file(columns, where, config.schema_file, config.message_type)


def _typed(columns: Columns | None) -> Mapping[str, pa.DataType]:
    untyped = [name for name, kind in (columns or {}).items() if kind is None]
    if not columns or untyped:
        what = f"the types of {', '.join(untyped)}" if untyped else "the columns' types"
        raise ConfigError(f"kafka.message_format json needs {what}; name them in data_config.input_fields")
    return columns


def _arrow_schema(path: str) -> pa.Schema:
    """The schema of an Arrow file or stream."""
    try:
        with pa.memory_map(path) as file:
            try:
                return pa.ipc.open_file(file).schema
            except pa.ArrowInvalid:
                file.seek(0)
                return pa.ipc.open_stream(file).schema
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"kafka.schema_file {path}: not an Arrow file or stream: {error}") from None
