import json
import re
import subprocess
import sys
import threading
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill import registry
from tidemill.config.base import Config
from tidemill.config.feature import FeatureEntry
from tidemill.errors import ConfigError, DataError, SchemaError
from tidemill.features import feature_set, native, vectorized
from tidemill.features.feature_set import FeatureSet
from tidemill.features.plan import DenseSpec, IdSpec
from tidemill.testing.feature_contract import assert_same


def feature(kind: str, name: str, **fields: Any) -> tuple[str, Config]:
    if kind in ("id_feature", "sequence_id_feature"):
        fields = {"embedding_dim": 8, **fields}
    return kind, registry.resolve("feature", kind).Config(**{"feature_name": name, "expression": f"user:{name}", **fields})


def ids_of(kind: str, rows: Any, *, fg_mode: str = "FG_DAG", **fields: Any) -> tuple[list[int], list[int]]:
    features = FeatureSet.compile([feature(kind, "f", **fields)], fg_mode=fg_mode)
    batch = features.transform(pa.table({"f": rows}))
    columns = batch.sequences if kind.startswith("sequence") else batch.ids
    return columns.values.tolist(), columns.lengths.tolist()


def dense_of(rows: Any, *, fg_mode: str = "FG_DAG", **fields: Any) -> list[list[float]]:
    features = FeatureSet.compile([feature("raw_feature", "f", **fields)], fg_mode=fg_mode)
    return features.transform(pa.table({"f": rows})).dense.tolist()


@pytest.fixture(params=[native, vectorized], ids=["compiled", "numpy"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_set, "encode", request.param.encode)


# ---- the shape of a set


def test_outputs_are_in_config_order() -> None:
    features = FeatureSet.compile(
        [
            feature("raw_feature", "age", value_dim=2),
            feature("sequence_id_feature", "clicks", hash_bucket_size=50, sequence_length=9, embedding_name="item"),
            feature("id_feature", "user", num_buckets=10, pooling="mean"),
            feature("raw_feature", "price"),
            feature("id_feature", "item", hash_bucket_size=50, embedding_name="item", value_dim=1),
        ],
        labels=["click"],
        sample_weight="w",
        extras=["event"],
    )
    assert features.dense == (DenseSpec("age", 2, 0), DenseSpec("price", 1, 2))
    assert features.id_features == (
        IdSpec("clicks", 50, 8, "item", "sum", True, 9, 1),
        IdSpec("user", 10, 8, "user_emb", "mean", False, 0, 0),
        IdSpec("item", 50, 8, "item", "sum", False, 0, 1),
    )
    roles = {column.name: (column.role, column.side) for column in features.input_columns}
    assert roles == {
        **dict.fromkeys(["age", "clicks", "user", "price", "item"], ("feature", "user")),
        "click": ("label", None),
        "w": ("weight", None),
        "event": ("extra", None),
    }


def test_labels_weights_and_extras() -> None:
    features = FeatureSet.compile(
        [feature("id_feature", "f", num_buckets=3)], labels=["click", "buy"], sample_weight="w", extras=["event"]
    )
    table = pa.table({"f": [1, 2], "click": [True, False], "buy": [0.5, 1], "w": [2.0, 0.25], "event": ["e1", "e2"]})
    batch = features.transform(table, size=3)
    assert {name: column.tolist() for name, column in batch.labels.items()} == {"click": [1, 0, 0], "buy": [0.5, 1, 0]}
    assert batch.weights.tolist() == [2.0, 0.25, 0.0]
    assert batch.extras["event"].to_pylist() == ["e1", "e2"]
    serving = features.transform_columns({"f": pa.array([1])}, 2, size=3)
    assert (serving.labels, serving.extras, serving.weights.tolist()) == ({}, {}, [1.0, 1.0, 0.0])


def test_a_batch_smaller_than_its_rows_is_refused() -> None:
    features = FeatureSet.compile([feature("id_feature", "f", num_buckets=3)])
    with pytest.raises(DataError, match="3 rows don't fit into a batch of 2"):
        features.transform(pa.table({"f": [0, 1, 2]}), size=2)


def test_selected_keys_come_in_the_order_asked_for() -> None:
    features = FeatureSet.compile([feature("id_feature", name, num_buckets=100) for name in "abc"])
    table = pa.table({"a": [[1], [2, 3]], "b": [[4], []], "c": [[], [5]]})
    chosen = features.transform(table).ids.select(["c", "a"])
    assert (chosen.keys, chosen.values.tolist(), chosen.lengths.tolist()) == (("c", "a"), [5, 1, 2, 3], [0, 1, 1, 2])
    assert chosen.offsets().tolist() == [0, 0, 1, 2, 4]
    assert chosen.select([]).lengths.numel() == 0


def test_two_features_may_read_one_column() -> None:
    features = FeatureSet.compile(
        [
            feature("id_feature", "a", expression="item:x", hash_bucket_size=100),
            feature("id_feature", "b", expression="item:x", num_buckets=9),
        ]
    )
    assert [(c.name, c.used_by, c.side) for c in features.input_columns] == [("x", ("a", "b"), "item")]
    assert features.transform(pa.table({"x": [1, 2]})).ids.values.tolist() == [95, 70, 1, 2]


def test_a_group_expands_to_prefixed_sequences() -> None:
    member = feature("id_feature", "item", expression="item:id", embedding_dim=4, num_buckets=9)
    members = (FeatureEntry(kind=member[0], config=member[1]),)
    config = registry.resolve("feature", "sequence_feature").Config(
        sequence_name="clicks", sequence_length=2, sequence_delim="|", features=members
    )
    features = FeatureSet.compile([("sequence_feature", config)])
    assert features.id_features == (IdSpec("clicks__item", 9, 4, "clicks__item_emb", "sum", True, 2, 1),)
    assert features.transform(pa.table({"clicks__id": ["5|6|7"]})).sequences.values.tolist() == [5, 6]
    encoded = FeatureSet.compile([("sequence_feature", config)], fg_mode="FG_NONE")
    assert [column.name for column in encoded.input_columns] == ["clicks__item"]


# ---- ids


@pytest.mark.usefixtures("kernel")
class TestIds:
    def test_empty_values_between_separators_are_dropped(self) -> None:
        assert ids_of("id_feature", ["1\x1d\x1d2\x1d", "\x1d"], num_buckets=5, default_value="4") == ([1, 2, 4], [2, 1])
        assert ids_of("id_feature", [["1", "", None]], num_buckets=5) == ([1], [1])

    def test_value_dim_keeps_the_first(self) -> None:
        rows = ["1\x1d2\x1d3", None]
        assert ids_of("id_feature", rows, num_buckets=9, value_dim=2, default_value="7\x1d8\x1d0") == (
            [1, 2, 7, 8],
            [2, 2],
        )

    def test_separators_can_be_chosen(self) -> None:
        assert ids_of("id_feature", ["1,2"], num_buckets=5, separator=",") == ([1, 2], [2])

    def test_list_elements_are_not_split(self) -> None:
        values, lengths = ids_of("id_feature", [["a\x1db"]], hash_bucket_size=10**9)
        assert lengths == [1]
        assert values != ids_of("id_feature", ["a"], hash_bucket_size=10**9)[0]

    def test_integers_hash_as_their_text(self) -> None:
        numbers = [0, -1, 7, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
        texts = ids_of("id_feature", [str(number) for number in numbers], hash_bucket_size=10**9)
        assert ids_of("id_feature", numbers, hash_bucket_size=10**9) == texts
        assert ids_of("id_feature", pa.array(numbers[:5], pa.int32()), hash_bucket_size=10**9)[0] == texts[0][:5]

    @pytest.mark.parametrize("type_", [pa.int8(), pa.uint16(), pa.float32(), pa.float64(), pa.int32(), pa.string()])
    def test_numbers_of_any_type_are_ids(self, type_: pa.DataType) -> None:
        rows = pa.array([3, None, 0], pa.int64()).cast(type_)
        assert ids_of("id_feature", rows, num_buckets=5) == ([3, 0], [1, 0, 1])

    def test_fixed_lists_and_lists_of_dictionaries(self) -> None:
        fixed = pa.array([[1, 2], None], pa.list_(pa.int64(), 2))
        assert ids_of("id_feature", fixed, num_buckets=5) == ([1, 2], [2, 0])
        texts = pa.array([["1", "2"], None], pa.list_(pa.dictionary(pa.int32(), pa.string())))
        assert ids_of("id_feature", texts, num_buckets=5) == ([1, 2], [2, 0])
        assert ids_of("id_feature", pa.array([["1"], ["2"]], pa.large_list(pa.large_string())), num_buckets=5)[0] == [1, 2]

    def test_a_column_without_any_value(self) -> None:
        assert ids_of("id_feature", pa.nulls(2), num_buckets=5, default_value="3") == ([3, 3], [1, 1])

    def test_a_null_list_that_spans_elements_is_missing(self) -> None:
        rows = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.array([1, 2, 3]), mask=pa.array([True, False]))
        assert ids_of("id_feature", rows, num_buckets=5) == ([3], [0, 1])
        assert ids_of("sequence_id_feature", rows, num_buckets=5) == ([0, 3], [1, 1])

    def test_vocabulary_slots(self) -> None:
        rows = ["abc\x1defg", "", "hij"]
        for default, expected in [("", [2, 3, 1]), ("xyz", [2, 3, 0, 1]), ("abc", [2, 3, 2, 1])]:
            values, _ = ids_of("id_feature", rows, vocab_list=["abc", "efg"], default_value=default)
            assert values == expected

    def test_a_large_vocabulary_finds_every_token(self) -> None:
        tokens = [f"token {k}" for k in range(3000)]
        values, _ = ids_of("id_feature", [*tokens, "other"], vocab_list=tokens)
        assert values == [*range(2, 3002), 1]

    def test_steps_are_cut_to_the_first(self) -> None:
        assert ids_of("sequence_id_feature", ["1;2;3", "4"], num_buckets=9, sequence_length=2) == ([1, 2, 4], [2, 1])
        assert ids_of("sequence_id_feature", [[1, 2, 3], []], num_buckets=9, sequence_length=2) == ([1, 2, 0], [2, 1])

    def test_a_step_counts_by_its_first_value(self) -> None:
        assert ids_of("sequence_id_feature", ["\x1d1\x1d2;3;\x1d"], num_buckets=9) == ([1, 3, 0], [3])

    def test_a_single_number_is_one_step(self) -> None:
        assert ids_of("sequence_id_feature", [4, None], num_buckets=9) == ([4, 0], [1, 1])


@pytest.mark.usefixtures("kernel")
class TestEncodedIds:
    def test_ids_are_used_as_they_are(self) -> None:
        for rows in (["1\x032", None, ""], [[1, 2], None, []], [["1", "2"], [], None]):
            assert ids_of("id_feature", rows, hash_bucket_size=5, fg_mode="FG_NONE") == ([1, 2], [2, 0, 0])

    def test_the_encoded_default_stands_for_null(self) -> None:
        fields = {"num_buckets": 5, "fg_encoded_default_value": "3\x034", "default_value": "9"}
        assert ids_of("id_feature", ["1", None], fg_mode="FG_NONE", **fields) == ([1, 3, 4], [1, 2])

    def test_sequences_may_be_empty(self) -> None:
        rows = ["1;2", None, ""]
        assert ids_of("sequence_id_feature", rows, num_buckets=5, fg_mode="FG_NONE") == ([1, 2], [2, 0, 0])
        values = ids_of("sequence_id_feature", rows, num_buckets=5, fg_mode="FG_NONE", fg_encoded_default_value="4")
        assert values == ([1, 2, 4, 4], [2, 1, 1])

    def test_an_empty_step_without_default_is_an_error(self) -> None:
        with pytest.raises(DataError, match=r"row 1: value '1;;2' has an empty step"):
            ids_of("sequence_id_feature", ["1", "1;;2"], num_buckets=5, fg_mode="FG_NONE")

    def test_boundaries_do_not_apply(self) -> None:
        fields = {"boundaries": [0.5, 1.5], "embedding_dim": 2}
        assert ids_of("raw_feature", [2, 0], fg_mode="FG_NONE", **fields) == ([2, 0], [1, 1])


# ---- numbers


def test_a_default_is_not_normalised() -> None:
    normalizer = "method=minmax,min=0,max=10"
    assert dense_of([5.0, None], default_value="0.25", normalizer=normalizer) == [[0.5], [0.25]]


def test_nan_is_missing() -> None:
    assert dense_of([float("nan"), 2.0], default_value="0.5") == [[0.5], [2.0]]
    assert ids_of("raw_feature", [float("nan"), 2.0], boundaries=[1], embedding_dim=1, default_value="") == ([1], [0, 1])


def test_a_part_that_is_missing_takes_its_part_of_the_default() -> None:
    assert dense_of([[None, 2.0], None], value_dim=2, default_value="0.5\x1d0.75") == [[0.5, 2.0], [0.5, 0.75]]


def test_encoded_numbers_are_not_normalised_and_need_a_value() -> None:
    normalizer = "method=minmax,min=0,max=10"
    assert dense_of(["1\x032"], value_dim=2, normalizer=normalizer, fg_mode="FG_NONE") == [[1.0, 2.0]]
    with pytest.raises(DataError, match=r"feature 'f', column 'f', row 1: value None is missing"):
        dense_of([1.0, None], fg_mode="FG_NONE")


def test_a_value_on_a_boundary_goes_up_in_float32() -> None:
    rows = pa.array([0.1, 0.1 - 1e-12, 0.09], pa.float64())
    assert ids_of("raw_feature", rows, boundaries=[0.1], embedding_dim=1)[0] == [1, 1, 0]


# ---- errors


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("kind", "rows", "fields", "message"),
    [
        ("id_feature", ["1", "x2"], {"num_buckets": 5}, "feature 'f', column 'f', row 1: value 'x2' isn't a whole number"),
        ("id_feature", [1, 0, 5], {"num_buckets": 5}, "row 2: value 5 isn't in 0..4"),
        ("id_feature", ["0", "-1"], {"num_buckets": 5}, "row 1: value '-1' isn't in 0..4"),
        ("id_feature", ["9" * 40], {"num_buckets": 5}, "row 0: value '9999"),
        ("id_feature", ["-"], {"num_buckets": 5}, "value '-' isn't a whole number"),
        ("id_feature", ["1.0"], {"num_buckets": 5}, "value '1.0' isn't a whole number"),
        ("sequence_id_feature", [[1], [2, 7]], {"num_buckets": 5}, "row 1: value [2, 7] isn't in 0..4"),
        ("id_feature", [1.5], {"num_buckets": 5}, "feature 'f', column 'f': not a whole number"),
        ("raw_feature", [1.0, float("inf")], {}, "row 1: value inf isn't finite"),
        ("raw_feature", ["1", "1e400"], {}, "row 1: value '1e400' isn't finite"),
        ("raw_feature", ["1", "abc"], {}, "feature 'f', column 'f': value 'abc' (number 1 of the column) isn't a number"),
        ("raw_feature", ["abc"], {"boundaries": [1], "embedding_dim": 1}, "value 'abc'"),
        ("raw_feature", [[1, 2, 3]], {"value_dim": 2}, "row 0: 3 numbers ([1.0, 2.0, 3.0]), value_dim is 2"),
        ("raw_feature", [None], {"default_value": ""}, "row 0: value None is missing"),
    ],
)
def test_bad_values_are_named(kind: str, rows: list[Any], fields: dict[str, Any], message: str) -> None:
    features = FeatureSet.compile([feature(kind, "f", **fields)])
    with pytest.raises(DataError, match=re.escape(message)):
        features.transform(pa.table({"f": rows}))


@pytest.mark.parametrize(
    ("kind", "rows", "fields", "message"),
    [
        ("id_feature", [1.5], {"hash_bucket_size": 5}, "feature 'f', column 'f' has type double, whose text isn't unique"),
        ("id_feature", [True], {"num_buckets": 5}, "feature 'f', column 'f' has type bool; accepted: string"),
        ("raw_feature", [True], {}, "feature 'f', column 'f' has type bool; accepted: float32"),
        ("raw_feature", [b"x"], {}, "feature 'f', column 'f' has type binary"),
    ],
)
def test_wrong_types_are_named(kind: str, rows: list[Any], fields: dict[str, Any], message: str) -> None:
    features = FeatureSet.compile([feature(kind, "f", **fields)])
    with pytest.raises(SchemaError, match=re.escape(message)):
        features.transform(pa.table({"f": rows}))


def test_missing_columns_and_wrong_lengths_are_named() -> None:
    features = FeatureSet.compile([feature("id_feature", "f", num_buckets=5)], labels=["click"])
    with pytest.raises(SchemaError, match="feature 'f', column 'f' isn't there; the data have g"):
        features.transform(pa.table({"g": [1]}))
    with pytest.raises(SchemaError, match="label column 'click' isn't there"):
        features.transform(pa.table({"f": [1]}))
    with pytest.raises(DataError, match=r"column 'f' has 3 rows instead of 2"):
        features.transform_columns({"f": pa.array([1, 2, 3])}, 2)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"click": [1.0, None]}, "label column 'click', row 1: value None isn't a finite number"),
        ({"click": ["1", "0"]}, "label column 'click' has type string"),
        ({"w": [1.0, -2.0]}, "sample weight 'w', row 1: -2.0 is negative"),
    ],
)
def test_bad_labels_and_weights_are_named(column: dict[str, Any], message: str) -> None:
    features = FeatureSet.compile([feature("id_feature", "f", num_buckets=5)], labels=["click"], sample_weight="w")
    table = pa.table({"f": [1, 2], "click": [0.0, 1.0], "w": [1.0, 1.0], **column})
    with pytest.raises(DataError, match=re.escape(message)):
        features.transform(table)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("id_feature", {}, "feature 'f' has no bucketiser"),
        ("id_feature", {"num_buckets": 2, "hash_bucket_size": 3}, "sets hash_bucket_size and num_buckets"),
        ("id_feature", {"num_buckets": 2, "expression": "f"}, "isn't of the form side:column"),
        ("id_feature", {"num_buckets": 2, "expression": "feature:f"}, "side 'feature'"),
        ("id_feature", {"num_buckets": 2, "separator": "ab"}, "separator 'ab' must be one ASCII character"),
        ("id_feature", {"num_buckets": 2, "pooling": "max"}, "pooling 'max' isn't known"),
        ("id_feature", {"num_buckets": 2, "default_value": "2"}, "default value '2' isn't a whole number in 0..1"),
        ("id_feature", {"num_buckets": 2, "weighted": True}, "weighted isn't supported yet"),
        ("id_feature", {"vocab_list": ["a"], "default_bucketize_value": 1}, "outside 0..0"),
        ("sequence_id_feature", {"num_buckets": 2, "value_dim": 3}, "value_dim 3 in a sequence"),
        ("raw_feature", {"boundaries": [2, 1], "embedding_dim": 1}, "boundaries aren't sorted"),
        ("raw_feature", {"boundaries": [1]}, "boundaries need an embedding_dim"),
        ("raw_feature", {"normalizer": "method=log2"}, "normalizer method 'log2' isn't supported"),
        ("raw_feature", {"normalizer": "method=zscore,mean=1"}, "normalizer needs standard_deviation=<number>"),
        ("raw_feature", {"normalizer": "method=minmax,min=1,max=1"}, "divides by 0"),
        ("raw_feature", {"value_dim": 3, "default_value": "1\x1d2"}, "holds 2 numbers, value_dim is 3"),
        ("sequence_raw_feature", {}, "a raw sequence needs boundaries"),
    ],
)
def test_bad_configs_are_named(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        FeatureSet.compile([feature(kind, "f", **fields)])


def test_a_set_checks_what_its_features_share() -> None:
    one = feature("id_feature", "f", num_buckets=5)
    with pytest.raises(ConfigError, match="'f' is there twice"):
        FeatureSet.compile([one, one])
    with pytest.raises(ConfigError, match="fg_mode 'FG_BUCKETIZE'"):
        FeatureSet.compile([one], fg_mode="FG_BUCKETIZE")
    with pytest.raises(ConfigError, match="hash function 'md5'"):
        FeatureSet.compile([one], hash_function="md5")


def test_a_spec_of_another_version_is_refused() -> None:
    spec = FeatureSet.compile([feature("id_feature", "f", hash_bucket_size=5)]).spec()
    assert spec["hash"] == {"function": "std", "version": 1}
    with pytest.raises(ConfigError, match="schema 'other/1'"):
        FeatureSet.from_spec({**spec, "schema": "other/1"})
    with pytest.raises(ConfigError, match="version 2"):
        FeatureSet.from_spec({**spec, "hash": {"function": "std", "version": 2}})
    with pytest.raises(ConfigError, match="doesn't fit this version"):
        FeatureSet.from_spec({**spec, "features": [{**spec["features"][0], "later": 1}]})


# ---- both kernels, random rows

TEXT = st.one_of(st.none(), st.text("ab1\x1d;é", max_size=12))
NUMBERS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))


def _random_set(hash_function: str) -> FeatureSet:
    shared = {"hash_bucket_size": 1000}
    return FeatureSet.compile(
        [
            feature("id_feature", "bag", **shared),
            feature("id_feature", "first", expression="user:bag", value_dim=1, default_value="a\x1db", **shared),
            feature("id_feature", "word", expression="user:bag", vocab_list=["a", "b", "ab"]),
            feature("id_feature", "list", **shared),
            feature("id_feature", "number", **shared),
            feature("sequence_id_feature", "steps", expression="user:bag", sequence_length=3, **shared),
            feature("sequence_id_feature", "listed", expression="user:list", default_value="a", **shared),
        ],
        hash_function=hash_function,
    )


@pytest.mark.parametrize("hash_function", ["std", "farm"])
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, st.one_of(st.none(), st.lists(TEXT, max_size=4)), NUMBERS), max_size=6))
def test_kernels_agree_on_random_rows(hash_function: str, rows: list[Any]) -> None:
    features = _random_set(hash_function)
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    types = (pa.string(), pa.list_(pa.string()), pa.int64())
    table = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=["bag", "list", "number"])
    compiled = features.transform(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_set, "encode", vectorized.encode)
        assert_same(features.transform(table), compiled)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.text("ab1é", min_size=1, max_size=80), min_size=1, max_size=5), min_size=1, max_size=6))
def test_text_equals_lists(rows: list[list[str]]) -> None:
    features = FeatureSet.compile(
        [
            feature("id_feature", "bag", hash_bucket_size=10**6),
            feature("sequence_id_feature", "steps", hash_bucket_size=10**6),
        ]
    )
    texts = features.transform(pa.table({"bag": ["\x1d".join(r) for r in rows], "steps": [";".join(r) for r in rows]}))
    lists = features.transform(pa.table({"bag": rows, "steps": rows}))
    assert texts.ids.lengths.tolist() == texts.sequences.lengths.tolist() == [len(row) for row in rows]
    for left, right in ((texts.ids, lists.ids), (texts.sequences, lists.sequences)):
        assert torch.equal(left.values, right.values)


def test_the_kernel_releases_the_interpreter() -> None:
    features = FeatureSet.compile([feature("sequence_id_feature", "f", hash_bucket_size=10**6)])
    table = pa.table({"f": [";".join(map(str, range(2000)))] * 2000})
    features.transform(table.slice(0, 1))
    inside, counted = threading.Event(), []
    done = threading.Event()

    def count() -> None:
        inside.set()
        while not done.is_set():
            counted.append(0)
            done.wait(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    inside.wait(5)
    before = len(counted)
    batch = features.transform(table)
    after = len(counted)
    done.set()
    thread.join(5)
    assert batch.sequences.values.numel() == 4_000_000
    assert after - before >= 3


def test_a_spec_is_plain_json() -> None:
    features = _random_set("farm")
    text = json.dumps(features.spec(), allow_nan=False)
    assert FeatureSet.from_spec(json.loads(text)).spec() == features.spec()


def test_works_without_numba() -> None:
    code = """
import sys
sys.modules["numba"] = None
import pyarrow as pa
from tidemill import registry
from tidemill.features.feature_set import FeatureSet, encode
config = registry.resolve("feature", "id_feature").Config(
    feature_name="f", expression="user:f", embedding_dim=1, hash_bucket_size=100)
print(encode.__module__, FeatureSet.compile([("id_feature", config)]).transform(pa.table({"f": ["abc"]})).ids.values.tolist())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "tidemill.features.vectorized [33]"
