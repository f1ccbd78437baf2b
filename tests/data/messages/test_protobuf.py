"""Protobuf messages to rows, by a registry's schemas and by a compiled descriptor set."""

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.timestamp_pb2 import Timestamp

from tidemill.config.data import KafkaConfig
from tidemill.config.messages import SchemaRegistryConfig
from tidemill.data.messages import protobuf
from tidemill.data.messages.make import make_decoder
from tidemill.errors import ConfigError, MissingExtraError
from tidemill.testing.schema_registry import DevelopmentRegistry, Reference

COLUMNS = {"n": pa.int64(), "name": pa.string()}
REPEATED = Field.LABEL_REPEATED


def message(file, name, *fields):
    """Fields: (name, type) or (name, type, label)."""
    row = file.message_type.add(name=name)
    for number, (field, kind, *label) in enumerate(fields, start=1):
        more = {"type": Field.TYPE_MESSAGE, "type_name": kind} if isinstance(kind, str) else {"type": kind}
        row.field.add(name=field, number=number, label=label[0] if label else Field.LABEL_OPTIONAL, **more)
    return row


def row_file(*fields, name="row.proto", others=()):
    file = FileDescriptorProto(name=name, package="shop", syntax="proto3")
    for other in others:
        message(file, other, ("x", Field.TYPE_INT32))
    message(file, "Row", *(fields or (("n", Field.TYPE_INT64), ("name", Field.TYPE_STRING), ("extra", Field.TYPE_BYTES))))
    return file


def maker(*files, name="shop.Row"):
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def config(**more):
    return KafkaConfig(brokers="h:1", topic=("clicks",), message_format="protobuf", **more)


@pytest.fixture
def by_file(tmp_path):
    def make(columns, *files, message_type=""):
        path = tmp_path / "row.desc"
        path.write_bytes(FileDescriptorSet(file=files or [row_file()]).SerializeToString())
        return make_decoder(config(schema_file=str(path), message_type=message_type), columns)

    return make


@pytest.fixture
def registry():
    with DevelopmentRegistry() as running:
        yield running


def register(registry, file, subject="clicks-value", **more):
    return registry.register(subject, registry.protobuf_text(file.SerializeToString()), "PROTOBUF", **more)


def by_registry(registry, columns):
    return make_decoder(config(schema_registry=SchemaRegistryConfig(url=registry.url)), columns)


def test_rows_by_a_descriptor_set(by_file):
    row = maker(row_file())
    messages = [row(n=n, name=name, extra=b"\n").SerializeToString() for n, name in ((1, "a"), (2**40, "ü\n"), (0, "b"))]
    decoded = by_file(COLUMNS).decode(messages)
    assert decoded.table.schema == pa.schema(list(COLUMNS.items()))
    assert decoded.table.to_pydict() == {"n": [1, 2**40, 0], "name": ["a", "ü\n", "b"]}
    assert decoded.rows.tolist() == [1, 1, 1]
    assert by_file(COLUMNS).decode([]).table.schema == decoded.table.schema


def test_poison_is_only_its_own_message(by_file):
    """DCL 9.9. An empty message would be a row of zeros; it is taken as none."""
    good = maker(row_file())(n=1, name="a").SerializeToString()
    bad = [b"garbage", None, b"", good[:-1], b"\xff" * 40, good + b"\x00", b"\x12\x02\xff\xfe"]
    messages = [message for pair in zip([good] * len(bad), bad, strict=True) for message in pair]
    decoded = by_file(COLUMNS).decode(messages)
    assert decoded.rows.tolist() == [1, 0] * len(bad)
    assert decoded.table.column("n").to_pylist() == [1] * len(bad)
    assert set(decoded.poison) == set(range(1, len(messages), 2))
    assert not any(poison.is_schema for poison in decoded.poison.values())


@pytest.mark.parametrize(
    ("kind", "label", "value", "wanted", "read"),
    [
        (Field.TYPE_INT32, 1, 7, pa.int64(), 7),
        (Field.TYPE_SINT64, 1, -7, pa.int64(), -7),
        (Field.TYPE_UINT32, 1, 7, pa.int64(), 7),
        (Field.TYPE_FLOAT, 1, 0.5, pa.float64(), 0.5),
        (Field.TYPE_BOOL, 1, True, pa.int64(), 1),
        (Field.TYPE_INT64, 1, 7, pa.string(), "7"),
        (Field.TYPE_INT64, REPEATED, [1, 2], pa.list_(pa.int64()), [1, 2]),
        (Field.TYPE_STRING, REPEATED, ["a"], pa.list_(pa.string()), ["a"]),
        (".google.protobuf.Timestamp", 1, {"seconds": 1_700_000_000, "nanos": 500_000_000}, pa.float64(), 1_700_000_000.5),
    ],
)
def test_types(by_file, kind, label, value, wanted, read):
    """DCL 9.8: int32 -> int64 and the like."""
    file = row_file(("v", kind, label))
    files = [file]
    if isinstance(kind, str):
        file.dependency.append("google/protobuf/timestamp.proto")
        files = [FileDescriptorProto.FromString(Timestamp.DESCRIPTOR.file.serialized_pb), file]
    row = maker(*files)
    decoded = by_file({"v": wanted}, *files).decode([row(v=value).SerializeToString()] * 2)
    assert decoded.poison == {}
    assert decoded.table.column("v").to_pylist() == [read] * 2


def test_maps_enums_and_optional_fields(by_file):
    file = row_file(("weights", ".shop.Row.WeightsEntry", REPEATED), ("label", Field.TYPE_INT32), ("other", Field.TYPE_INT32))
    entry = file.message_type[0].nested_type.add(name="WeightsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=Field.TYPE_FLOAT, label=1)
    color = file.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="BLUE", number=1)
    row = file.message_type[0]
    row.field.add(name="color", number=9, type=Field.TYPE_ENUM, type_name=".shop.Color", label=1)
    for number, name in enumerate(("other", "label")):
        field = next(field for field in row.field if field.name == name)
        field.proto3_optional = True
        field.oneof_index = number
        row.oneof_decl.add(name=f"_{name}")
    columns = {"weights": pa.map_(pa.string(), pa.float64()), "color": pa.string(), "label": pa.int64()}
    made = maker(file)
    messages = [made(weights={"a": 0.5}, color=1, label=0).SerializeToString(), made(other=3).SerializeToString()]
    decoded = by_file(columns, file).decode(messages)
    assert decoded.poison == {}
    assert decoded.table.to_pylist() == [
        {"weights": [("a", 0.5)], "color": "BLUE", "label": 0},
        {"weights": [], "color": "RED", "label": None},
    ]


def test_which_message_is_a_row(by_file):
    file = row_file(others=["Other"])
    good = maker(file)(n=1, name="a").SerializeToString()
    assert by_file(COLUMNS, file, message_type="shop.Row").decode([good]).table.num_rows == 1
    with pytest.raises(ConfigError, match=r"message_type must say .* shop\.Other, shop\.Row"):
        by_file(COLUMNS, file)
    with pytest.raises(ConfigError, match=r"row\.desc.*shop\.Nothing"):
        by_file(COLUMNS, file, message_type="shop.Nothing")
    with pytest.raises(ConfigError, match="column 'x' isn't in the message; it has n, name, extra"):
        by_file({"x": None}, file, message_type="shop.Row")


def test_registry_schemas_are_fetched_once_and_rows_keep_their_order(registry, caplog):
    """DCL 9.8: a column added, reordered, widened; another message type of the file, by its indexes."""
    old = row_file(("name", Field.TYPE_STRING), ("n", Field.TYPE_INT32))
    new = row_file(("n", Field.TYPE_INT64), ("name", Field.TYPE_STRING), ("more", Field.TYPE_INT32), others=["Other"])
    one, two = register(registry, old), register(registry, new)
    decoder = by_registry(registry, COLUMNS)
    first = registry.header(one, [0]) + maker(old)(n=1, name="a").SerializeToString()
    other = registry.header(two, [1]) + maker(new)(n=2**40, name="b", more=3).SerializeToString()
    with caplog.at_level("INFO", "tidemill"):
        for _ in range(2):
            decoded = decoder.decode([first, other, first, other, other])
            assert decoded.table.to_pydict() == {"n": [1, 2**40, 1, 2**40, 2**40], "name": ["a", "b", "a", "b", "b"]}
            assert decoded.rows.tolist() == [1] * 5
    assert registry.requests == [f"/schemas/ids/{number}?format=serialized" for number in (one, two)]
    assert len(caplog.messages) == 1
    assert "more came; n was int32, is int64" in caplog.messages[0]


def test_registry_schema_errors_and_poison(registry):
    """DCL 9.8, 9.9."""
    good, gone = row_file(), row_file(("n", Field.TYPE_INT64))
    wide = row_file(("n", Field.TYPE_STRING), ("name", Field.TYPE_STRING))
    numbers = [register(registry, file) for file in (good, gone, wide)]
    decoder = by_registry(registry, COLUMNS)
    row = maker(good)(n=1, name="a").SerializeToString()
    messages = [
        registry.header(numbers[0], [0]) + row,
        registry.header(numbers[1], [0]) + maker(gone)(n=1).SerializeToString(),
        registry.header(numbers[2], [0]) + maker(wide)(n="x", name="a").SerializeToString(),
        registry.header(99, [0]) + row,
        registry.header(numbers[0], [7]) + row,
        registry.header(numbers[0]) + b"\xff",
        registry.header(numbers[0]),
        b"garbage",
        registry.header(numbers[0], [0]) + row,
    ]
    decoded = decoder.decode(messages)
    assert decoded.rows.tolist() == [1, *[0] * 7, 1]
    assert [(index, poison.column) for index, poison in decoded.poison.items() if poison.is_schema] == [(1, "name"), (2, "n")]
    assert set(decoded.poison) == set(range(1, 8))


def test_references(registry):
    money = FileDescriptorProto(name="money.proto", package="shop", syntax="proto3")
    message(money, "Money", ("cents", Field.TYPE_INT64), ("at", ".google.protobuf.Timestamp"))
    money.dependency.append("google/protobuf/timestamp.proto")
    file = row_file(("price", ".shop.Money"), ("n", Field.TYPE_INT64))
    file.dependency.append("money.proto")
    register(registry, money, "money")
    number = register(registry, file, references=[Reference("money.proto", "money")])
    stamp = FileDescriptorProto.FromString(Timestamp.DESCRIPTOR.file.serialized_pb)
    row = maker(stamp, money, file)(price={"cents": 7}, n=1).SerializeToString()
    decoded = by_registry(registry, {"n": None}).decode([registry.header(number, [0]) + row])
    assert decoded.table.to_pylist() == [{"n": 1}]


def test_a_schema_file_that_cannot_be_used(tmp_path):
    path = tmp_path / "row.desc"
    for content in (b"", b"garbage"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"row\.desc: .*protoc"):
            make_decoder(config(schema_file=str(path)), COLUMNS)


def test_without_ptars_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(protobuf, "ptars", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tidemill\[protobuf\]'"):
        make_decoder(config(schema_file="row.desc"), COLUMNS)
