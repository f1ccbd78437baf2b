from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.contracts.files import TableSpec
from tidemill.contracts.snapshot import PooledLookup, ProgramInputs, SequenceInput, StepLookup
from tidemill.errors import CorruptError, ServingError
from tidemill.features.batch import Batch, IdColumns
from tidemill.serving.inputs import program_inputs
from tidemill.serving.tables import BaseRows, Table, Tables, base_table

ROWS, DIM = 23, 3
SPEC = TableSpec(name="pooled/t", num_embeddings=ROWS, embedding_dim=DIM)
BASE = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)


def new_table(*cuts: int) -> Table:
    edges = [0, *cuts, ROWS]
    return base_table(SPEC, [BaseRows(start, stop, BASE[start:stop]) for start, stop in pairwise(edges)])


ids = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS).map(lambda chosen: np.array(sorted(chosen), np.int64))
edits = st.lists(st.tuples(st.integers(0, 5), st.lists(st.tuples(st.booleans(), ids), max_size=3)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(edits=edits, cuts=st.lists(st.integers(1, ROWS - 1), unique=True, max_size=3).map(sorted))
def test_every_version_keeps_its_rows(edits: list, cuts: list[int]) -> None:
    """Edits go on from any earlier version, as generations, failed candidates and retries do."""
    versions = [(Tables([new_table(*cuts)]), BASE.copy())]
    value = 1000.0
    for back, operations in edits:
        tables, expected = versions[-1 - back % len(versions)]
        expected = expected.copy()
        edit = tables.edit()
        for is_upsert, chosen in operations:
            value += 1
            if is_upsert:
                edit["pooled/t"].upsert(chosen, np.full((len(chosen), DIM), value, np.float32))
                expected[chosen] = value
            else:
                edit["pooled/t"].delete(chosen)
                expected[chosen] = 0
        versions.append((edit.tables(), expected))
    for tables, expected in versions:
        assert np.array_equal(tables.rows("pooled/t"), expected)


def test_memory_follows_the_live_rows() -> None:
    spec = TableSpec(name="t", num_embeddings=5000, embedding_dim=2)
    tables = Tables([base_table(spec, [BaseRows(0, 5000, np.zeros((5000, 2), np.float32))])])
    chosen = np.arange(2000, dtype=np.int64)
    for number in range(50):
        edit = tables.edit()
        edit["t"].upsert(chosen, np.full((2000, 2), number, np.float32))
        tables = edit.tables()
        arena = tables["t"].arena
        assert arena is not None
        assert len(arena.rows) <= 4 * 2000 + 1024
    assert tables["t"].num_changed() == 2000
    assert set(tables.rows("t")[:2000].flat) == {49.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda edit: edit["pooled/t"].upsert(np.array([ROWS], np.int64), np.zeros((1, DIM), np.float32)), "ids 23 to 23"),
        (lambda edit: edit["pooled/t"].upsert(np.array([-1], np.int64), np.zeros((1, DIM), np.float32)), "ids -1 to -1"),
        (lambda edit: edit["pooled/t"].upsert(np.array([1], np.int64), np.zeros((2, DIM), np.float32)), "rows of shape"),
        (lambda edit: edit["pooled/t"].delete(np.array([1], np.int32)), "must be int64"),
        (lambda edit: edit["pooled/other"].delete(np.array([1], np.int64)), "table 'pooled/other'"),
    ],
)
def test_changes_that_do_not_fit_are_refused(change, message: str) -> None:
    tables = Tables([new_table()])
    with pytest.raises(CorruptError, match=message):
        change(tables.edit())
    assert np.array_equal(tables.rows("pooled/t"), BASE)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([BaseRows(0, 20, BASE[:20])], "files hold 20 rows of 23"),
        ([BaseRows(0, 10, BASE[:10]), BaseRows(11, 23, BASE[11:])], "don't follow row 10"),
        ([BaseRows(0, 12, BASE[:12]), BaseRows(11, 23, BASE[11:])], "don't follow row 12"),
        ([BaseRows(0, 23, BASE[:, :2])], "of shape"),
        ([BaseRows(0, 23, BASE.astype(np.float64))], "the snapshot says float32"),
    ],
)
def test_a_base_covers_every_row_once(parts: list[BaseRows], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        base_table(SPEC, parts)


def columns(**features: list[list[int]]) -> IdColumns:
    values = [value for rows in features.values() for row in rows for value in row]
    lengths = [len(row) for rows in features.values() for row in rows]
    return IdColumns(tuple(features), torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32))


def batch(size: int, ids: IdColumns, sequences: IdColumns) -> Batch:
    return Batch(size, size, torch.zeros(size, 2), ids, sequences, {}, torch.ones(size), {})


def test_inputs_are_what_the_snapshot_says() -> None:
    plan = ProgramInputs(
        num_dense=2,
        pooled=[
            PooledLookup(feature="b", table="pooled/t", pooling="mean"),
            PooledLookup(feature="a", table="pooled/t", pooling="sum"),
        ],
        sequences=[
            SequenceInput(
                group="g",
                query=[StepLookup(feature="a", table="pooled/t")],
                steps=[StepLookup(feature="s", table="pooled/t"), StepLookup(feature="r", table="pooled/t")],
                max_steps=2,
            )
        ],
    )
    made = batch(3, columns(a=[[1], [], [2, 3]], b=[[4, 5], [], [6]]), columns(r=[[7, 8, 9], [], [1]], s=[[3, 2, 1], [], [5]]))
    inputs = {name: tensor.numpy() for name, tensor in program_inputs(plan, Tables([new_table(5)]), made).items()}
    zero = np.zeros(DIM, np.float32)
    pooled = [[(BASE[4] + BASE[5]) / 2, BASE[1]], [zero, zero], [BASE[6], BASE[2] + BASE[3]]]
    steps = [[[BASE[3], BASE[7]], [BASE[2], BASE[8]]], [[zero, zero]] * 2, [[BASE[5], BASE[1]], [zero, zero]]]
    assert list(inputs) == ["dense", "pooled", "g.query", "g.sequence", "g.lengths"]
    assert np.array_equal(inputs["pooled"], np.array(pooled).reshape(3, 2 * DIM))
    assert np.array_equal(inputs["g.query"], np.stack([BASE[1], zero, BASE[2]]))
    assert np.array_equal(inputs["g.sequence"], np.array(steps).reshape(3, 2, 2 * DIM))
    assert inputs["g.lengths"].tolist() == [2, 0, 1]
    assert all(array.dtype == np.float32 for name, array in inputs.items() if name != "g.lengths")


def test_empty_inputs_are_left_out() -> None:
    plan = ProgramInputs(num_dense=0, pooled=[PooledLookup(feature="a", table="pooled/t", pooling="mean")], sequences=[])
    inputs = program_inputs(plan, Tables([new_table()]), batch(2, columns(a=[[], []]), columns()))
    assert list(inputs) == ["pooled"]
    assert not inputs["pooled"].any()


def test_ids_beyond_the_table_and_missing_features_are_named() -> None:
    plan = ProgramInputs(num_dense=0, pooled=[PooledLookup(feature="a", table="pooled/t", pooling="sum")], sequences=[])
    for table in (new_table(), new_table(7)):
        with pytest.raises(ServingError, match="feature 'a' has ids up to 23, beyond the end of table 'pooled/t'"):
            program_inputs(plan, Tables([table]), batch(1, columns(a=[[ROWS]]), columns()))
    with pytest.raises(ServingError, match="ids of 'a', which the feature set doesn't make"):
        program_inputs(plan, Tables([new_table()]), batch(1, columns(b=[[1]]), columns()))
