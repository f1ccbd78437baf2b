"""Rows per second from each source and in each format: a bare client and decoder against our whole path, source to RawBatch.

Both read the same rows into Arrow, by turns, in one process; Kafka's bare client gives the same offsets and timestamps. Files and
tables are timed from before they are opened to their last row, discovering included ("csv" alone is read from splits that are
known, as after the count that a job begins with); topics behind their first tenth. CPU seconds are those of this process, all
threads. Feature work is timed apart. Prints a table, then one line of JSON.

Topics come from the development broker, a process on the same cores. Where rows/s lie far below rows / CPU s, the client waited for
it most of the time, as both do for Avro: the ratio of such rates says how the broker was scheduled, which the middle half shows by
its width, and the ratio of CPU is the one to go by. The bare decoders of JSON and Avro leave text as large strings; ours give plain
ones, and of Avro also prove, by a mark behind each, that a message is exactly one row.

    python -m benchmarks.read [--rows 200000] [--turns 5] [--only kafka]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tidemill import registry
from tidemill.config.data import KafkaConfig
from tidemill.data.assignment import assign
from tidemill.data.source import Source
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.kafka import KafkaSource
from tidemill.data.sources.kafka_client import open_consumer
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.data.split import Split
from tidemill.features.feature_set import FeatureSet
from tidemill.testing.broker import DevelopmentBroker

ROWS_PER_ARROW_MESSAGE = 100
TIMEOUT_S = 60.0
PATIENCE_S = 0.05

Values = list[bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """`bare` and `ours` each give pieces: how many rows each has. `is_stream`: connecting isn't timed."""

    name: str
    rows: int
    bare: Callable[[], Iterator[int]]
    ours: Callable[[], Iterator[int]]
    is_stream: bool = False


def make_rows(count: int) -> pa.Table:
    """44 columns: ids, event time and label, 13 floats, 13 numbers, 13 texts of 16 characters."""
    random = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {
        "event_id": pa.array([f"e{number:010d}" for number in range(count)]),
        "event_time": pa.array(1.7e9 + np.arange(count) / 100),
        "user_id": pa.array([f"u{value:06d}" for value in random.integers(0, 10**5, count)]),
        "item_id": pa.array([f"i{value:06d}" for value in random.integers(0, 10**5, count)]),
        "label": pa.array(random.integers(0, 2, count)),
    }
    for number in range(13):
        columns[f"float{number}"] = pa.array(random.random(count), pa.float32())
        columns[f"number{number}"] = pa.array(random.integers(0, 10**6, count))
        columns[f"text{number}"] = pa.array([f"t{value:015d}" for value in random.integers(0, 10**6, count)])
    return pa.table(columns)


def pieces(source: Source, splits: list[Split] | None = None) -> Iterator[int]:
    """The rows of everything that a source has, or of splits that are known, a RawBatch at a time."""
    reader = source.open_all(assign(source.discover() if splits is None else splits, {}, 1, 0))
    try:
        while True:
            raw = reader.read(PATIENCE_S)
            if raw is not None:
                yield raw.num_rows
    except EOFError:
        return
    finally:
        reader.close()
        source.close()


def rate(case: Case, start: Callable[[], Iterator[int]]) -> tuple[float, float]:
    """Rows per second, and per second of CPU. A stream's are taken behind its first tenth, when what was fetched ahead is read."""
    began, began_cpu = time.perf_counter(), time.process_time()
    found = iter(start())
    rows = first = 0
    if case.is_stream:
        while rows < case.rows / 10:
            rows += next(found)
        first = rows
        began, began_cpu = time.perf_counter(), time.process_time()
    for count in found:
        rows += count
        # A stream's client takes long to close.
        if case.is_stream and rows >= case.rows:
            break
    elapsed, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    found.close()  # type: ignore[attr-defined]
    assert rows == case.rows, f"{case.name}: {rows} rows instead of {case.rows}"
    return (rows - first) / elapsed, (rows - first) / cpu


# Kafka


def arrow_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def json_lines(table: pa.Table) -> Values:
    text = io.BytesIO()
    pl.from_arrow(table).write_ndjson(text)  # type: ignore[union-attr]
    return text.getvalue().splitlines()


def avro_schema(schema: pa.Schema) -> dict[str, object]:
    names = {pa.string(): "string", pa.int64(): "long", pa.float32(): "float", pa.float64(): "double"}
    return {"type": "record", "name": "Row", "fields": [{"name": field.name, "type": names[field.type]} for field in schema]}


def avro_values(table: pa.Table) -> Values:
    import fastavro

    schema = fastavro.parse_schema(avro_schema(table.schema))
    values = []
    for row in table.to_pylist():
        data = io.BytesIO()
        fastavro.schemaless_writer(data, schema, row)
        values.append(data.getvalue())
    return values


def protobuf_file(schema: pa.Schema) -> bytes:
    """A serialized descriptor set with one message."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    kinds = {
        pa.string(): Field.TYPE_STRING,
        pa.int64(): Field.TYPE_INT64,
        pa.float32(): Field.TYPE_FLOAT,
        pa.float64(): Field.TYPE_DOUBLE,
    }
    files = FileDescriptorSet()
    file = files.file.add(name="row.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Row")
    for number, field in enumerate(schema, start=1):
        message.field.add(name=field.name, number=number, type=kinds[field.type], label=Field.LABEL_OPTIONAL)
    return files.SerializeToString()


def protobuf_handler(schema: pa.Schema) -> object:
    import ptars
    from google.protobuf import descriptor_pool
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    pool = descriptor_pool.DescriptorPool()
    (file,) = FileDescriptorSet.FromString(protobuf_file(schema)).file
    pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindMessageTypeByName("bench.Row")
    return ptars.HandlerPool([descriptor.file]).get_for_message(descriptor)


def read_avro(schema: pa.Schema, values: Values) -> int:
    """All messages as one block of a container file in memory."""
    text = json.dumps(avro_schema(schema)).encode()
    data = b"".join(values)
    head = b"".join(
        [
            b"Obj\x01",
            zigzag(2),
            zigzag(11),
            b"avro.schema",
            zigzag(len(text)),
            text,
            zigzag(10),
            b"avro.codec",
            zigzag(4),
            b"null",
            b"\0",
            bytes(16),
        ]
    )
    return pl.read_avro(io.BytesIO(b"".join([head, zigzag(len(values)), zigzag(len(data)), data, bytes(16)]))).to_arrow().num_rows


def zigzag(value: int) -> bytes:
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@dataclass(frozen=True, slots=True)
class Format:
    """`values`: makes all messages; `decode`: the bare decoder of many, which says how many rows they held."""

    values: Callable[[], Values]
    decode: Callable[[Values], int]
    settings: dict[str, str]
    rows_per_message: int = 1
    at_once: int = 5000


def kafka_formats(table: pa.Table, folder: Path) -> dict[str, Format]:
    schema, step = table.schema, ROWS_PER_ARROW_MESSAGE
    frame_schema = pl.DataFrame(schema.empty_table()).schema
    handler = protobuf_handler(schema)
    avro, protobuf = folder / "row.avsc", folder / "row.desc"
    avro.write_text(json.dumps(avro_schema(schema)))
    protobuf.write_bytes(protobuf_file(schema))

    def decode_json(values: Values) -> int:
        return pl.read_ndjson(b"\n".join(values), schema=frame_schema).to_arrow().num_rows

    def decode_arrow(values: Values) -> int:
        return pa.concat_tables([pa.ipc.open_stream(value).read_all() for value in values]).num_rows

    def decode_protobuf(values: Values) -> int:
        return handler.array_to_record_batch(pa.array(values, pa.binary())).num_rows  # type: ignore[attr-defined, no-any-return]

    return {
        "json": Format(lambda: json_lines(table), decode_json, {}),
        # It is read several times faster, so there is more of it.
        "arrow": Format(
            lambda: [arrow_stream(table.slice(at, step)) for at in range(0, table.num_rows, step)] * 4, decode_arrow, {}, step, 200
        ),
        "avro": Format(lambda: avro_values(table), partial(read_avro, schema), {"schema_file": str(avro)}),
        "protobuf": Format(lambda: table_to_protobuf(table, handler), decode_protobuf, {"schema_file": str(protobuf)}),
    }


def kafka_cases(table: pa.Table, folder: Path, only: str, resources: ExitStack) -> Iterator[Case]:
    broker = resources.enter_context(DevelopmentBroker(folder / "broker"))
    columns = {field.name: field.type for field in table.schema}
    for name, made in kafka_formats(table, folder).items():
        if only not in f"kafka {name}":
            continue
        values = made.values()
        produce(broker.bootstrap, name, values)
        config = KafkaConfig(
            brokers=broker.bootstrap,
            topic=(name,),
            message_format=name,  # type: ignore[arg-type]
            end_offsets={f"{name}:0": len(values)},
            **made.settings,  # type: ignore[arg-type]
        )
        bare = partial(bare_kafka, config, len(values), made.at_once, made.decode)
        yield Case(f"kafka {name}", len(values) * made.rows_per_message, bare, partial(our_kafka, config, columns), is_stream=True)


def our_kafka(config: KafkaConfig, columns: dict[str, pa.DataType]) -> Iterator[int]:
    return pieces(KafkaSource(config, columns, event_time_column="event_time"))


def bare_kafka(config: KafkaConfig, count: int, at_once: int, decode: Callable[[Values], int]) -> Iterator[int]:
    """Consume and decode, with the offset and timestamp of each message."""
    consumer = open_consumer(config, lambda error: None)
    consumer.assign([TopicPartition(config.topic[0], 0, 0)])
    done = 0
    try:
        while done < count:
            messages = [message for message in consumer.consume(at_once, PATIENCE_S) if not message.error()]
            if messages:
                np.array([message.offset() for message in messages])
                np.array([message.timestamp() for message in messages])
                done += len(messages)
                yield decode([message.value() for message in messages])
    finally:
        consumer.close()


def table_to_protobuf(table: pa.Table, handler: object) -> Values:
    batch = table.combine_chunks().to_batches()[0]
    return handler.record_batch_to_array(batch).to_pylist()  # type: ignore[attr-defined]


def produce(brokers: str, topic: str, values: Values) -> None:
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(TIMEOUT_S)
    producer = Producer({"bootstrap.servers": brokers, "linger.ms": 20, "queue.buffering.max.kbytes": 1 << 20})
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=0)
        if number % 10_000 == 0:
            producer.poll(0)
            while len(producer) > 50_000:
                producer.poll(0.1)
    assert producer.flush(TIMEOUT_S) == 0


# Files and tables


def file_cases(table: pa.Table, folder: Path) -> Iterator[Case]:
    parquet, text = str(folder / "rows.parquet"), str(folder / "rows.csv")
    rows_at_once = max(1000, min(50_000, table.num_rows // 20))
    pq.write_table(table, parquet, row_group_size=rows_at_once)
    pc.write_csv(table, text)
    names, types = table.column_names, {field.name: field.type for field in table.schema}

    def bare_parquet() -> Iterator[int]:
        with pq.ParquetFile(parquet) as file:
            for batch in file.iter_batches(rows_at_once, columns=names):
                yield batch.num_rows

    def bare_csv() -> Iterator[int]:
        options = pc.ConvertOptions(column_types=types)
        with pc.open_csv(text, convert_options=options) as file:
            for batch in file:
                yield batch.num_rows

    yield Case(
        "parquet",
        table.num_rows,
        bare_parquet,
        lambda: pieces(ParquetSource(ParquetConfig(paths=parquet, event_time_column="event_time"), names)),
    )
    source = CsvSource(CsvConfig(paths=text, with_header=True, event_time_column="event_time"), types)
    known = source.discover()
    yield Case("csv", table.num_rows, bare_csv, lambda: pieces(source, known))
    yield Case("csv and its count", table.num_rows, bare_csv, lambda: pieces(source))


def table_cases(table: pa.Table, folder: Path, resources: ExitStack) -> Iterator[Case]:
    """The emulator, in a process of its own, read through pyodps."""
    from odps import ODPS
    from odps.apis.storage_api import Compression, ReadRowsRequest, SplitOptions, StorageApiArrowClient, TableBatchScanRequest

    from tidemill.config.env import OdpsCredentials
    from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
    from tidemill.testing.maxcompute import MaxComputeProcess

    (folder / "maxcompute").mkdir()
    emulator = resources.enter_context(MaxComputeProcess(folder / "maxcompute"))
    emulator.add_table("prj", "rows", {"": table})
    odps = ODPS("id", "secret", project="prj", endpoint=emulator.endpoint)

    def bare() -> Iterator[int]:
        client = StorageApiArrowClient(odps, odps.get_table("rows"))
        options = SplitOptions.get_default_options(SplitOptions.SplitMode.ROW_OFFSET)
        session = client.create_read_session(TableBatchScanRequest(required_data_columns=table.column_names, split_options=options))
        request = ReadRowsRequest(
            session.session_id, row_count=session.record_count, max_batch_rows=4096, compression=Compression.LZ4_FRAME
        )
        reader = client.read_rows_arrow(request)
        while (batch := reader.read()) is not None:
            yield batch.num_rows

    config = MaxComputeSourceConfig(paths=("odps://prj/tables/rows",), event_time_column="event_time")
    credentials = OdpsCredentials(endpoint=emulator.endpoint, found_in="", access_id="id", access_key="secret")
    yield Case(
        "maxcompute", table.num_rows, bare, lambda: pieces(MaxComputeSource(config, table.column_names, credentials=credentials))
    )


def feature_rate(table: pa.Table) -> float:
    """Rows per second of the features that the columns make: 15 text ids, 13 numeric ids, 13 floats."""

    def feature(kind: str, name: str, **fields: object) -> tuple[str, object]:
        return kind, registry.resolve("feature", kind).Config(feature_name=name, expression=f"user:{name}", **fields)

    ids = [name for name in table.column_names if name.startswith(("text", "number", "user", "item"))]
    features = FeatureSet.compile(
        [
            *(feature("id_feature", name, embedding_dim=16, hash_bucket_size=1_000_000) for name in ids),
            *(feature("raw_feature", f"float{number}") for number in range(13)),
        ],
        labels=("label",),
    )
    batch = table.slice(0, 4096)
    features.transform(batch)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        features.transform(batch)
        times.append(time.perf_counter() - began)
    return batch.num_rows / statistics.median(times)


def compare(case: Case, count: int) -> dict[str, float]:
    """Medians over turns, each of which reads both ways, in changing order, behind one that warms up. Ratios are taken within a
    turn: what else the machine does is shared."""
    turns = []
    for number in range(count + 1):
        first, second = (case.bare, case.ours) if number % 2 else (case.ours, case.bare)
        pair = rate(case, first), rate(case, second)
        turns.append(pair if number % 2 else pair[::-1])
    rates = np.array(turns[1:])
    (bare, bare_cpu), (ours, ours_cpu) = np.median(rates, axis=0)
    ratios = rates[:, 1] / rates[:, 0]
    ratio, ratio_cpu = np.median(ratios, axis=0)
    least, most = np.quantile(ratios, [0.25, 0.75], axis=0).round(2)
    print(
        f"{case.name:18} {bare:12,.0f} {ours:12,.0f} {ratio:6.2f} ({least[0]:.2f} to {most[0]:.2f})"
        f" {bare_cpu:12,.0f} {ours_cpu:12,.0f} {ratio_cpu:6.2f} ({least[1]:.2f} to {most[1]:.2f})",
        flush=True,
    )
    return {
        "bare_rows_per_s": round(bare),
        "rows_per_s": round(ours),
        "ratio": round(ratio, 3),
        "bare_rows_per_cpu_s": round(bare_cpu),
        "rows_per_cpu_s": round(ours_cpu),
        "ratio_cpu": round(ratio_cpu, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    table = make_rows(arguments.rows // ROWS_PER_ARROW_MESSAGE * ROWS_PER_ARROW_MESSAGE)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as resources:
        folder = Path(name)
        ratio = f"{'ratio (middle half)':>22}"
        print(f"{'':18} {'bare rows/s':>12} {'ours':>12} {ratio} {'bare / CPU s':>12} {'ours':>12} {ratio}")
        tables = table_cases(table, folder, resources) if arguments.only in "maxcompute" else ()
        for case in chain(file_cases(table, folder), kafka_cases(table, folder, arguments.only, resources), tables):
            if arguments.only in case.name:
                results[case.name] = compare(case, arguments.turns)
    features = feature_rate(table)
    print(f"{'features':18} {'':12} {features:12,.0f}")
    summary = {"benchmark": "read", "rows": table.num_rows, "load": os.getloadavg()[0], "features_rows_per_s": round(features)}
    print(json.dumps({**summary, "results": results}))


if __name__ == "__main__":
    main()
