"""What every kind of feature must do. Subclass `FeatureContract` and let pytest run it: kinds come from the registry,
rows from each kind's own examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
import torch

from tidemill import registry
from tidemill.features import vectorized
from tidemill.features.batch import Batch, IdColumns
from tidemill.features.feature import Example, feature_class
from tidemill.features.feature_set import FeatureSet

_THREADS = 4
_ROUNDS = 8


def compile_example(kind: str, example: Example) -> FeatureSet:
    return FeatureSet.compile([(kind, example.config)])


def rows_of(features: FeatureSet, columns: Mapping[str, pa.Array], *, size: int | None = None) -> Batch:
    return features.transform(pa.table(dict(columns)), size=size)


def assert_same(left: Batch, right: Batch) -> None:
    """Equal in every bit."""
    assert (left.num_rows, left.size) == (right.num_rows, right.size)
    assert left.ids.keys == right.ids.keys
    assert left.sequences.keys == right.sequences.keys
    for a, b in zip(_tensors(left), _tensors(right), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    columns = (batch.ids, batch.sequences)
    return [batch.dense, batch.weights, *(tensor for ids in columns for tensor in (ids.values, ids.lengths))]


def row_values(batch: Batch, row: int) -> tuple[list[float], dict[str, list[int]]]:
    """The dense values and the ids of one row."""
    ids: dict[str, list[int]] = {}
    for columns in (batch.ids, batch.sequences):
        offsets = columns.offsets().tolist()
        for at, key in enumerate(columns.keys):
            begin = at * batch.size + row
            ids[key] = columns.values[offsets[begin] : offsets[begin + 1]].tolist()
    return batch.dense[row].tolist(), ids


class FeatureContract:
    """Tests over every registered kind and every example of it."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "example" in metafunc.fixturenames:
            cases = [
                pytest.param(kind, example, id=f"{kind}-{at}")
                for kind in registry.kinds("feature")
                for at, example in enumerate(feature_class(kind).examples())
            ]
            metafunc.parametrize(("kind", "example"), cases)

    def test_has_rows_with_something_and_rows_with_nothing(self, kind: str, example: Example) -> None:
        arrays = [array.to_pylist() for array in example.columns.values()]
        assert any(value in (None, "", []) for rows in arrays for value in rows)
        assert any(value not in (None, "", []) for rows in arrays for value in rows)

    def test_fields_without_effect_exist(self, kind: str, example: Example) -> None:
        config = feature_class(kind).Config
        assert set(config.model_fields) >= config.idle_fields

    def test_null_equals_empty(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        nulls = {name: _replace(array, lambda v: None if v == "" else v) for name, array in example.columns.items()}
        empties = {
            name: _replace(array, lambda v: "" if v is None else v) if pa.types.is_string(array.type) else array
            for name, array in example.columns.items()
        }
        assert_same(rows_of(features, nulls), rows_of(features, empties))

    def test_other_forms_give_the_same(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        expected = rows_of(features, example.columns)
        assert_same(rows_of(features, example.same or example.columns), expected)
        for name, array in example.columns.items():
            if pa.types.is_string(array.type):
                for form in (array.cast(pa.large_string()), array.dictionary_encode()):
                    assert_same(rows_of(features, {**example.columns, name: form}), expected)

    def test_a_row_alone_gives_what_it_gives_among_others(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        whole = rows_of(features, example.columns)
        for row in range(whole.num_rows):
            alone = rows_of(features, {name: array.slice(row, 1) for name, array in example.columns.items()})
            assert row_values(alone, 0) == row_values(whole, row)

    def test_one_value_stands_for_all_rows(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        for row in range(len(next(iter(example.columns.values())))):
            single = {name: array.slice(row, 1) for name, array in example.columns.items()}
            repeated = {name: pa.concat_arrays([array] * 5) for name, array in single.items()}
            assert_same(features.transform_columns(single, 5), features.transform_columns(repeated, 5))

    def test_chunks_and_slices_change_nothing(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        columns = dict(example.columns)
        expected = rows_of(features, columns)
        chunked = {n: pa.chunked_array([a.slice(0, 1), a.slice(1, 0), a.slice(1)]) for n, a in columns.items()}
        inner = {n: pa.concat_arrays([a, a, a]).slice(len(a), len(a)) for n, a in columns.items()}
        assert_same(rows_of(features, chunked), expected)
        assert_same(rows_of(features, inner), expected)

    def test_padding_is_empty(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        plain = rows_of(features, example.columns)
        padded = rows_of(features, example.columns, size=plain.num_rows + 3)
        assert [row_values(padded, row) for row in range(plain.num_rows)] == [
            row_values(plain, row) for row in range(plain.num_rows)
        ]
        for row in range(plain.num_rows, padded.size):
            dense, ids = row_values(padded, row)
            assert not any(dense)
            assert not any(ids.values())
        assert padded.weights.tolist() == [1.0] * plain.num_rows + [0.0] * 3

    def test_no_rows(self, kind: str, example: Example) -> None:
        batch = rows_of(compile_example(kind, example), {n: a.slice(0, 0) for n, a in example.columns.items()}, size=2)
        assert batch.weights.tolist() == [0.0, 0.0]
        assert batch.ids.values.numel() == batch.sequences.values.numel() == 0

    def test_ids_lie_in_their_tables(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        batch = rows_of(features, example.columns)
        for spec in features.id_features:
            columns: IdColumns = (batch.sequences if spec.is_sequence else batch.ids).select([spec.name])
            assert all(0 <= value < spec.num_embeddings for value in columns.values.tolist())

    def test_a_set_rebuilt_from_json_gives_the_same(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        rebuilt = FeatureSet.from_spec(json.loads(json.dumps(features.spec())))
        assert rebuilt.spec() == features.spec()
        assert (rebuilt.id_features, rebuilt.dense) == (features.id_features, features.dense)
        assert_same(rows_of(rebuilt, example.columns), rows_of(features, example.columns))

    def test_kernels_give_the_same(self, kind: str, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
        features = compile_example(kind, example)
        for columns in (example.columns, example.same or example.columns):
            expected = rows_of(features, columns, size=9)
            with monkeypatch.context() as patch:
                patch.setattr("tidemill.features.feature_set.encode", vectorized.encode)
                assert_same(rows_of(features, columns, size=9), expected)

    def test_threads_share_a_set(self, kind: str, example: Example) -> None:
        features = compile_example(kind, example)
        expected = rows_of(features, example.columns)
        with ThreadPoolExecutor(_THREADS) as pool:
            batches = list(pool.map(lambda _: rows_of(features, example.columns), range(_THREADS * _ROUNDS)))
        for batch in batches:
            assert_same(batch, expected)


def _replace(array: pa.Array, change: Callable[[object], object]) -> pa.Array:
    return pa.array([change(value) for value in array.to_pylist()], array.type)
