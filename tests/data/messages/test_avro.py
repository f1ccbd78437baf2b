"""Avro messages to rows: in blocks, one by one, by a registry's schemas and by a file's."""

import io
import json

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.data import KafkaConfig
from tidemill.config.messages import SchemaRegistryConfig
from tidemill.data.messages import avro
from tidemill.data.messages.make import make_decoder
from tidemill.errors import ConfigError, MissingExtraError
from tidemill.testing.schema_registry import DevelopmentRegistry, Reference

FIELDS = [
    {"name": "n", "type": "int"},
    {"name": "name", "type": ["null", "string"], "default": None},
    {"name": "extra", "type": "bytes"},
]
COLUMNS = {"n": pa.int64(), "name": pa.string()}


def record(*fields, **more):
    return {"type": "record", "name": "Row", "fields": list(fields), **more}


SCHEMA = record(*FIELDS)


def written(schema, row, named=None):
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema, named_schemas={} if named is None else named), row)
    return data.getvalue()


def row(n, name="a", **more):
    return {"n": n, "name": name, "extra": b"\n", **more}


def config(**more):
    return KafkaConfig(brokers="h:1", topic=("clicks",), message_format="avro", **more)


@pytest.fixture
def by_file(tmp_path):
    def make(columns, schema=SCHEMA):
        path = tmp_path / "row.avsc"
        path.write_text(json.dumps(schema))
        return make_decoder(config(schema_file=str(path)), columns)

    return make


@pytest.fixture
def registry():
    with DevelopmentRegistry(user="reader", password="geheim") as running:
        yield running


def by_registry(registry, columns, **more):
    settings = SchemaRegistryConfig(url=registry.url, user="reader", password="geheim", **more)
    return make_decoder(config(schema_registry=settings), columns)


def test_rows_by_a_schema_file(by_file):
    decoded = by_file(COLUMNS).decode([written(SCHEMA, row(1)), written(SCHEMA, row(2, None)), written(SCHEMA, row(-3, "ü\n"))])
    assert decoded.table.schema == pa.schema(list(COLUMNS.items()))
    assert decoded.table.to_pydict() == {"n": [1, 2, -3], "name": ["a", None, "ü\n"]}
    assert decoded.rows.tolist() == [1, 1, 1]
    assert by_file(COLUMNS).decode([]).table.schema == decoded.table.schema


def test_good_messages_are_read_in_one_block(by_file, monkeypatch):
    """Not one by one, which is a hundred times slower."""

    def never(self, payload):
        raise AssertionError("a message was read alone")

    decoder = by_file(COLUMNS)
    monkeypatch.setattr(avro.AvroFormat, "_read_one", never)
    for count in (1, 8, 16, 100):
        assert decoder.decode([written(SCHEMA, row(number)) for number in range(count)]).rows.tolist() == [1] * count


def test_poison_is_only_its_own_message(by_file):
    """DCL 9.9. One that is too long, or too short, doesn't shift the others."""
    good = written(SCHEMA, row(1))
    bad = [b"garbage", None, b"", good + b"x", good[:-1], b"\xff" * 40, b"\x02" * 3, good + good]
    messages = [message for pair in zip([good] * len(bad), bad, strict=True) for message in pair]
    decoded = by_file(COLUMNS).decode(messages)
    assert decoded.rows.tolist() == [1, 0] * len(bad)
    assert decoded.table.column("n").to_pylist() == [1] * len(bad)
    assert set(decoded.poison) == set(range(1, len(messages), 2))
    assert not any(poison.is_schema for poison in decoded.poison.values())


@given(st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=30)), max_size=20))
def test_rows_stay_with_their_messages(script):
    """A number stands for a good message; bytes are a message of their own, which may even be a good one."""
    format_ = avro.AvroFormat(json.dumps(SCHEMA), {}, ["n"], "test")
    decoder = avro.RowDecoder(avro.Fitting({"n": pa.int64()}, "test"), local=format_)
    decoded = decoder.decode([written(SCHEMA, row(part)) if isinstance(part, int) else part for part in script])
    assert decoded.table.num_rows == decoded.rows.sum()
    assert set(decoded.poison) == {index for index, count in enumerate(decoded.rows) if not count}
    firsts = iter(decoded.table.column("n").to_pylist())
    for part, count in zip(script, decoded.rows.tolist(), strict=True):
        assert not isinstance(part, int) or count == 1
        value = next(firsts) if count else None
        if isinstance(part, int):
            assert value == part


ODD = [
    ({"type": "map", "values": "float"}, {"a": 1.5}, pa.map_(pa.string(), pa.float32()), [("a", 1.5)]),
    (["null", {"type": "map", "values": "string"}], None, pa.map_(pa.string(), pa.string()), None),
    ({"type": "array", "items": ["null", "string"]}, ["a", None], pa.list_(pa.string()), ["a", None]),
    ({"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}, "BLUE", pa.string(), "BLUE"),
    ({"type": "long", "logicalType": "timestamp-millis"}, 1_700_000_000_500, pa.float64(), 1_700_000_000.5),
    (["string", "long"], 7, pa.string(), "7"),
    (["null", "string", "long"], "x", pa.string(), "x"),
    (["int", "null", "double"], 0.5, pa.float64(), 0.5),
    ("boolean", True, pa.int64(), 1),
    ("float", 0.5, pa.float64(), 0.5),
]


@pytest.mark.parametrize(("kind", "value", "wanted", "read"), ODD, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("beside", ["long", ["string", "long"]], ids=["blocks", "one by one"])
def test_types(by_file, kind, value, wanted, read, beside):
    schema = record({"name": "v", "type": kind}, {"name": "beside", "type": beside})
    decoded = by_file({"v": wanted}, schema).decode([written(schema, {"v": value, "beside": 3})] * 2)
    assert decoded.poison == {}
    assert decoded.table.column("v").to_pylist() == [read] * 2


def test_recursive_schemas_and_named_types(by_file):
    tree = record({"name": "n", "type": "long"}, {"name": "child", "type": ["null", "Row"]})
    decoded = by_file({"n": pa.int64()}, tree).decode([written(tree, {"n": 1, "child": {"n": 2, "child": None}})])
    assert decoded.table.to_pydict() == {"n": [1]}
    money = {"type": "record", "name": "Money", "fields": [{"name": "cents", "type": "long"}]}
    twice = record({"name": "price", "type": money}, {"name": "tax", "type": "shop.Money"}, namespace="shop")
    rows = by_file({"tax": None}, twice).decode([written(twice, {"price": {"cents": 7}, "tax": {"cents": 1}})])
    assert rows.table.to_pylist() == [{"tax": {"cents": 1}}]


def test_an_array_whose_blocks_say_their_size(by_file):
    """Java writes them. -2 items, 2 bytes, the items, the end."""
    schema = record({"name": "ids", "type": {"type": "array", "items": "long"}})
    messages = [written(schema, {"ids": [1]}), bytes([3, 4, 2, 4, 0]), written(schema, {"ids": []})]
    decoded = by_file({"ids": pa.list_(pa.int64())}, schema).decode(messages)
    assert decoded.table.column("ids").to_pylist() == [[1], [1, 2], []]
    assert decoded.poison == {}


def test_registry_schemas_are_fetched_once_and_rows_keep_their_order(registry, caplog):
    """DCL 9.8: a column added, reordered, widened, nullability changed, in one read."""
    second = record({"name": "new", "type": "string"}, {"name": "name", "type": "string"}, {"name": "n", "type": "long"})
    one, two = registry.register("clicks-value", SCHEMA), registry.register("clicks-value", second)
    decoder = by_registry(registry, COLUMNS)
    first = registry.header(one) + written(SCHEMA, row(1))
    other = registry.header(two) + written(second, {"n": 2**40, "name": "b", "new": "x"})
    with caplog.at_level("INFO", "tidemill"):
        for _ in range(2):
            decoded = decoder.decode([first, other, first, other, other])
            assert decoded.table.column("n").to_pylist() == [1, 2**40, 1, 2**40, 2**40]
            assert decoded.rows.tolist() == [1] * 5
    assert registry.requests == [f"/schemas/ids/{one}", f"/schemas/ids/{two}"]
    assert len(caplog.messages) == len({*caplog.messages}) == 1
    assert "new came" in caplog.messages[0]


def test_registry_schema_errors_name_the_column(registry):
    """DCL 9.8: a needed column went, and one was narrowed."""
    good, gone = registry.register("v", SCHEMA), registry.register("v", record(FIELDS[0]))
    text = record({"name": "n", "type": "string"}, FIELDS[1])
    wide = record({"name": "n", "type": "long"}, FIELDS[1])
    changed, wider = registry.register("v", text), registry.register("v", wide)
    decoder = by_registry(registry, {"n": pa.int32(), "name": pa.string()})
    decoded = decoder.decode(
        [
            registry.header(good) + written(SCHEMA, row(1)),
            registry.header(gone) + written(record(FIELDS[0]), {"n": 1}),
            registry.header(changed) + written(text, {"n": "x", "name": "a"}),
            registry.header(wider) + written(wide, {"n": 1, "name": "a"}),
            registry.header(good) + written(SCHEMA, row(2)),
        ]
    )
    assert decoded.table.column("n").to_pylist() == [1, 2]
    assert [(index, poison.column, poison.is_schema) for index, poison in sorted(decoded.poison.items())] == [
        (1, "name", True),
        (2, "n", True),
        (3, "n", True),
    ]


def test_registry_poison(registry):
    """DCL 9.9: no header, and a number that nobody knows (asked for once)."""
    number = registry.register("v", SCHEMA)
    json_schema = registry.register("v", "{}", "JSON")
    good = registry.header(number) + written(SCHEMA, row(1))
    decoder = by_registry(registry, COLUMNS)
    unknown = registry.header(99) + b"x"
    messages = [b"garbage", good, unknown, b"\0\0", None, registry.header(json_schema) + b"{}", unknown, good]
    decoded = decoder.decode(messages)
    assert decoded.rows.tolist() == [0, 1, 0, 0, 0, 0, 0, 1]
    assert "no schema 99" in str(decoded.poison[2])
    assert "JSON" in str(decoded.poison[5])
    assert registry.requests.count("/schemas/ids/99") == 1


def test_references(registry):
    money = {"type": "record", "name": "Money", "namespace": "shop", "fields": [{"name": "cents", "type": "long"}]}
    registry.register("money", money)
    schema = record({"name": "price", "type": "shop.Money"}, {"name": "tax", "type": ["null", "shop.Money"]})
    number = registry.register("clicks-value", schema, references=[Reference("shop.Money", "money")])
    named = {}
    fastavro.parse_schema(money, named_schemas=named)
    message = registry.header(number) + written(schema, {"price": {"cents": 7}, "tax": None}, named)
    decoded = by_registry(registry, {"price": None}).decode([message])
    assert decoded.table.to_pylist() == [{"price": {"cents": 7}}]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "not an Avro schema"),
        ('"string"', "isn't a record"),
        ('{"type":"record","name":"R","fields":[{"name":"n","type":"nothing"}]}', "not an Avro schema"),
        (json.dumps(record(FIELDS[0])), "column 'name' isn't in the message; it has n"),
    ],
)
def test_a_schema_file_that_cannot_be_used(tmp_path, schema, said):
    path = tmp_path / "row.avsc"
    path.write_text(schema)
    with pytest.raises(ConfigError, match=r"row\.avsc") as caught:
        make_decoder(config(schema_file=str(path)), COLUMNS)
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match=r"nowhere\.avsc"):
        make_decoder(config(schema_file="nowhere.avsc"), COLUMNS)
    with pytest.raises(ConfigError, match="schema_registry or a schema_file"):
        make_decoder(config(), COLUMNS)


def test_without_fastavro_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(avro, "fastavro", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tidemill\[avro\]'"):
        make_decoder(config(schema_file="x.avsc"), COLUMNS)
