from __future__ import annotations

import numpy as np
import pytest

from tests.serving.conftest import SPECS, LineageMaker, columns_of, random_rows
from tidemill.contracts import layout
from tidemill.contracts.files import TableFile
from tidemill.errors import CorruptError, NotFoundError, StorageError
from tidemill.serving.generation import Change, next_generation
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.arrays import write_arrays
from tidemill.storage.backends.local import LocalStorage

ROWS = random_rows(np.random.default_rng(1), 200)


def logits(generation, rows=ROWS):
    return Predictor(generation).score(columns_of(rows), len(rows))["logits"]


def test_a_snapshot_scores_like_its_tables(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    generation = load_generation(root, lineage.folder)
    assert np.array_equal(logits(generation), lineage.state.scores(ROWS))
    assert generation.name() == {
        "deployment": None,
        "lineage": "lineages/20240101",
        "snapshot": lineage.digest,
        "term": 0,
        "sequence": 0,
        "step": 500,
        "watermark": generation.model.manifest.watermark,
    }


@pytest.mark.parametrize("num_rows", [1, 2, 50])
def test_one_user_row_stands_for_all_candidates(root: LocalStorage, new_lineage: LineageMaker, num_rows: int) -> None:
    lineage = new_lineage()
    rows = [{**row, "user_id": ROWS[0]["user_id"], "clicked": "3;9;27"} for row in ROWS[:num_rows]]
    columns = columns_of(rows)
    columns |= {name: columns[name].slice(0, 1) for name in ("user_id", "clicked")}
    scores = Predictor(load_generation(root, lineage.folder)).score(columns, num_rows)
    assert np.array_equal(scores["logits"], lineage.state.scores(rows))


def test_releases_apply_in_order_across_terms(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    for sequence in range(1, 13):
        lineage.release(term=1 + sequence // 5, dense=sequence % 3 == 0)
    for position, state in lineage.states.items():
        generation = load_generation(root, lineage.folder, up_to=position)
        assert generation.position == position
        assert np.array_equal(logits(generation), state.scores(ROWS))
        for spec in SPECS:
            assert np.array_equal(generation.tables.rows(spec.name), state.tables[spec.name])
    assert load_generation(root, lineage.folder).position == (3, 12)


def test_going_on_equals_starting_afresh_and_leaves_the_old_generation_alone(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    generations = [load_generation(root, lineage.folder)]
    for _ in range(40):
        lineage.release(everything=True)
        fresh = load_generation(root, lineage.folder)
        before = generations[-1]
        arrays = {
            f"{spec.name}/{part}": array
            for spec in SPECS
            for part, array in (
                ("ids", np.arange(spec.num_embeddings, dtype=np.int64)),
                ("rows", lineage.state.tables[spec.name]),
            )
        }
        change = Change(fresh.term, fresh.sequence, fresh.step, fresh.watermark, [arrays], lineage.state.dense())
        generations.append(next_generation(before, [change]))
        assert np.array_equal(logits(generations[-1]), logits(fresh))
    for generation, state in zip(generations, lineage.states.values(), strict=True):
        assert np.array_equal(logits(generation), state.scores(ROWS))


def test_two_candidates_from_one_generation_do_not_meet(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.release()
    base = load_generation(root, lineage.folder)
    name = SPECS[0].name
    ids = np.array([1, 5], np.int64)

    def candidate(value: float):
        rows = np.full((2, 4), value, np.float32)
        return next_generation(base, [Change(1, 2, 20, None, [{f"{name}/ids": ids, f"{name}/rows": rows}], None)])

    first, second = candidate(1.0), candidate(2.0)
    assert np.array_equal(first.tables.rows(name)[ids], np.full((2, 4), 1.0))
    assert np.array_equal(second.tables.rows(name)[ids], np.full((2, 4), 2.0))
    assert np.array_equal(base.tables.rows(name), lineage.state.tables[name])
    assert first.tables[SPECS[1].name] is base.tables[SPECS[1].name]
    assert first.program is base.program


def test_score_table_equals_score(root: LocalStorage, new_lineage: LineageMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa

    lineage = new_lineage()
    predictor = Predictor(load_generation(root, lineage.folder))
    monkeypatch.setattr("tidemill.serving.predictor.TABLE_ROWS", 64)
    table = pa.concat_tables([pa.table(columns_of(ROWS[:130])), pa.table(columns_of(ROWS[130:]))])
    assert np.array_equal(predictor.score_table(table)["logits"], lineage.state.scores(ROWS))
    assert predictor.score_table(table.slice(0, 0))["probs"].shape == (0,)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("snapshot/dense.safetensors", "dense.safetensors"),
        ("snapshot/program.pt2", "program.pt2"),
        ("snapshot/probes.arrow", "probes.arrow"),
        ("segments/00000001/00000001/dense.safetensors", "00000001/dense.safetensors"),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damage_is_found_and_named(root: LocalStorage, new_lineage: LineageMaker, key: str, message: str, damage: str) -> None:
    lineage = new_lineage()
    lineage.release()
    data = bytearray(root.read(lineage.key(key)))
    data[len(data) // 2] ^= 1
    if damage == "delete":
        root.delete(lineage.key(key))
    else:
        root.write(lineage.key(key), bytes(data) if damage == "flip" else bytes(data[:-1]))
    with pytest.raises(CorruptError, match=message):
        load_generation(root, lineage.folder)


def test_a_snapshot_that_scores_its_probes_differently_is_refused(root: LocalStorage, new_lineage: LineageMaker) -> None:
    probes = new_lineage().snapshot  # written once to learn the probes' file
    manifest = load_generation(root, "lineages/20240101").model.manifest
    assert manifest.probes is not None
    scores = {"logits": [score + 1 for score in manifest.probes.scores["logits"]]}
    probes(probes=manifest.probes.model_copy(update={"scores": scores}))
    with pytest.raises(CorruptError, match="probe rows up to 1 away"):
        load_generation(root, "lineages/20240101")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"snapshot_digest": "f" * 64}, "builds on snapshot ffffffffffff"),
        ({"sequence": 7}, "says that it is release 7"),
        ({"term": 0}, "doesn't follow"),
    ],
)
def test_releases_that_do_not_belong_are_refused(
    root: LocalStorage, new_lineage: LineageMaker, changes: dict[str, object], message: str
) -> None:
    lineage = new_lineage()
    lineage.release()
    manifest = lineage.release(**changes)
    root.write(lineage.key(layout.release(2)), manifest.to_bytes())
    root.delete(lineage.key(layout.release(7)))
    with pytest.raises(CorruptError, match=message):
        load_generation(root, lineage.folder)


def test_cleaned_away_releases_are_reported(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    for _ in range(3):
        lineage.release()
    root.delete(lineage.key(layout.release(1)))
    with pytest.raises(StorageError, match="release 1 is gone, but 3 is the newest"):
        load_generation(root, lineage.folder)


def test_no_snapshot(root: LocalStorage) -> None:
    with pytest.raises(NotFoundError):
        load_generation(root, "lineages/20240101")


def test_a_snapshot_may_hold_sets_of_rows_above_its_ranges(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    spec = SPECS[1]
    ids = np.array([3, 50, 99], np.int64)
    rows = np.full((3, spec.embedding_dim), 24, np.float32)
    key = "snapshot/rows.safetensors"
    stored = write_arrays(root, lineage.key(key), {f"{spec.name}/ids": ids, f"{spec.name}/weight": rows})
    files = load_generation(root, lineage.folder).model.manifest.table_files
    lineage.snapshot(table_files=[*files, TableFile(table=spec.name, file=lineage.entry(stored))], probes=None)
    lineage.state.tables[spec.name][ids] = rows
    generation = load_generation(root, lineage.folder)
    assert np.array_equal(generation.tables.rows(spec.name), lineage.state.tables[spec.name])
    assert np.array_equal(logits(generation), lineage.state.scores(ROWS))
