"""From a checkpoint to a snapshot and its releases, with a real model, as serving reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from tidemill.checkpoint.capture import Capture, Staging
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.contracts import layout
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.distributed.sharding import ShardedModel
from tidemill.errors import PublishError
from tidemill.features.feature_set import FeatureSet
from tidemill.lineage.records import snapshot_digest
from tidemill.lineage.terms import Writer, open_term
from tidemill.models.model import RecModel, build_model
from tidemill.publish.cut import Cutter, Moment
from tidemill.publish.export import NUM_PROBE_ROWS, Probes, SnapshotOptions, StoredCheckpoint, export_snapshot
from tidemill.publish.gate import Candidate, Gate
from tidemill.publish.publisher import Publisher, PublishSettings
from tidemill.publish.recovery import PublishCursor, absorb, open_releases
from tidemill.publish.tracker import TouchedRows
from tidemill.serving.generation import Change, next_generation
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash
from tidemill.testing.model_contract import contract_config, contract_features, contract_step, random_batch
from tidemill.testing.ranks import single_process
from tidemill.training.step import TrainStep


@dataclass
class Job:
    """A daily job that has trained a little and saved."""

    step: TrainStep
    sharded: ShardedModel
    model: RecModel
    features: FeatureSet
    checkpoint: StoredCheckpoint

    def score(self, rows: pa.Table) -> dict[str, np.ndarray]:
        return self.step.scores(self.features.transform(rows, with_labels=False))

    def options(self, rows: pa.Table, **others) -> SnapshotOptions:
        return SnapshotOptions("ranker", 123.0, Probes(rows, self.score), **others)

    def export(self, target: Storage, options: SnapshotOptions) -> SnapshotManifest:
        return export_snapshot(self.checkpoint, target, self.model, self.features, options)

    def train(self, seed: int) -> None:
        batch = random_batch(seed, 32)
        self.step(batch, float(batch.weights.sum()))


@pytest.fixture(params=["multi_tower_din"])
def job(request, tmp_path) -> Iterator[Job]:
    features = contract_features()
    with single_process() as runtime:
        step, _, sharded = contract_step(runtime, build_model(contract_config(request.param), features, seed=3))
        job = Job(step, sharded, build_model(contract_config(request.param), features, seed=8), features, None)
        for seed in range(3):
            job.train(seed)
        job.checkpoint = _save(sharded, job.model, LocalStorage(tmp_path / "daily"), step=3)
        yield job


def _save(sharded: ShardedModel, model: RecModel, storage: Storage, step: int) -> StoredCheckpoint:
    manager = CheckpointManager(storage, Writer(1, "daily", 0, 1), tables=list(model.plan.tables), pipeline="model_config: {}")
    dense = {name: tensor.detach().numpy().copy() for name, tensor in sharded.dense_state().items()}
    manager.save(Capture(step, 300, 99.0, True, Staging().copy(sharded.local_shards()), {"dense": dense}, [], {}, {}))
    manager.close(deadline_s=20)
    return StoredCheckpoint(storage, manager.newest[1])


@pytest.fixture(scope="session")
def rows() -> pa.Table:
    """Raw rows of the contract's features, more than a snapshot stores."""
    rng = np.random.default_rng(4)
    count = 100

    def ids(size: int, longest: int) -> list[list[int]]:
        return [rng.integers(0, size, rng.integers(0, longest + 1)).tolist() for _ in range(count)]

    columns = {"user": ids(50, 1), "tags": ids(13, 3), "item": ids(40, 1), "other_item": ids(40, 2), "clicks": ids(40, 9)}
    lists = {name: pa.array(values, pa.list_(pa.int64())) for name, values in columns.items()}
    dense = {
        "price": pa.array(rng.normal(size=count).astype(np.float32)),
        "context": pa.array(rng.normal(size=(count, 2)).astype(np.float32).tolist(), pa.list_(pa.float32())),
    }
    return pa.table({**lists, **dense})


def serve(storage: Storage, rows: pa.Table) -> dict[str, np.ndarray]:
    return Predictor(load_generation(storage, "")).score_table(rows)


def test_a_snapshot_is_served_with_the_trainers_scores(job, rows, tmp_path):
    target = LocalStorage(tmp_path / "lineage")
    verified = []

    def verify(storage: Storage) -> dict[str, np.ndarray]:
        verified.append(storage)
        return serve(storage, rows.slice(0, NUM_PROBE_ROWS))

    manifest = job.export(target, job.options(rows, verify=verify))
    assert len(verified) == 1
    served, expected = serve(target, rows), job.score(rows)
    assert sorted(served) == sorted(manifest.outputs) == ["logits", "probs"]
    for output, scores in expected.items():
        np.testing.assert_allclose(served[output], scores, rtol=0, atol=1e-5)
    assert manifest.checkpoint_digest == job.checkpoint.manifest.digest()
    assert (manifest.model, manifest.boundary, manifest.watermark, manifest.examples) == ("ranker", 123.0, 99.0, 300)
    assert len(manifest.probes.scores["probs"]) == NUM_PROBE_ROWS
    assert target.read(manifest.pipeline.key) == b"model_config: {}"


def test_table_files_are_linked_and_outlive_the_checkpoint(job, rows, tmp_path):
    target = LocalStorage(tmp_path / "lineage")
    manifest = job.export(target, job.options(rows))
    for before, after in zip(job.checkpoint.manifest.table_files, manifest.table_files, strict=True):
        assert target.local_path(after.file.key).samefile(job.checkpoint.storage.local_path(before.file.key))
    for info in job.checkpoint.storage.list():
        job.checkpoint.storage.delete(info.key)
    np.testing.assert_allclose(serve(target, rows)["probs"], job.score(rows)["probs"], rtol=0, atol=1e-5)


def test_exporting_twice_is_a_no_op_and_another_checkpoint_an_error(job, rows, tmp_path):
    target = LocalStorage(tmp_path / "lineage")
    first = job.export(target, job.options(rows))
    before = target.list()
    assert job.export(target, job.options(rows)).digest() == first.digest()
    assert target.list() == before
    job.train(9)
    job.checkpoint = _save(job.sharded, job.model, LocalStorage(tmp_path / "other"), step=4)
    with pytest.raises(PublishError, match=r"another checkpoint \(step 3"):
        job.export(target, job.options(rows))
    assert target.list() == before


def test_a_program_that_scores_otherwise_is_not_exported(job, rows, tmp_path):
    target = LocalStorage(tmp_path / "lineage")

    def verify(storage: Storage) -> dict[str, np.ndarray]:
        scores = serve(storage, rows.slice(0, NUM_PROBE_ROWS))
        scores["probs"] = scores["probs"] + np.float32(0.01)
        return scores

    with pytest.raises(PublishError, match="output 'probs': probe row 0"):
        job.export(target, job.options(rows, verify=verify))
    assert layout.SNAPSHOT not in {info.key for info in target.list()}
    job.export(target, job.options(rows))


def test_a_model_with_other_weights_is_refused(job, rows, tmp_path):
    section = {"towers": [{"input": "deep", "mlp": {"hidden_units": [4]}}], "final": {"hidden_units": [4]}}
    job.model = build_model(contract_config("multi_tower", section), job.features, seed=1)
    with pytest.raises(PublishError, match=r"dense weights don't fit|holds tables"):
        job.export(LocalStorage(tmp_path / "lineage"), job.options(rows))


def test_a_crash_at_any_operation_leaves_no_snapshot_or_a_whole_one(job, rows, tmp_path):
    expected = job.score(rows)["probs"]
    options = job.options(rows)
    for k in range(1, 60):
        inner = LocalStorage(tmp_path / f"lineage-{k}")
        faulty = FaultyStorage(inner)
        faulty.crash_at(k)
        try:
            job.export(faulty, options)
        except SimulatedCrash:
            assert layout.SNAPSHOT not in {info.key for info in inner.list()}
            if k % 4 == 0:
                job.export(inner, options)
                np.testing.assert_allclose(serve(inner, rows)["probs"], expected, rtol=0, atol=1e-5)
            continue
        break
    else:
        pytest.fail("an export never got by without a crash")
    assert k > 8


def test_releases_of_a_trained_model_are_served_with_the_trainers_scores(job, rows, tmp_path):
    """The whole way: lookups mark rows, cuts copy them, the gate scores the artifact as a server would, and a server reads it."""
    target = LocalStorage(tmp_path / "lineage")
    job.export(target, job.options(rows))
    writer = Writer(open_term(target, run_id="stream", nonce="n"), "stream", 0, 1)
    shards = job.sharded.local_shards()
    touched, cursor = TouchedRows(shards), PublishCursor(snapshot_digest(target))
    job.sharded.on_lookup(touched.mark)
    sequence = open_releases(target, writer)
    absorb(target, touched, job.model.plan.tables, after=cursor.sequence, up_to=sequence)
    probes = rows.slice(0, NUM_PROBE_ROWS)

    def score(candidate: Candidate) -> dict[str, np.ndarray]:
        change = Change(
            candidate.term, candidate.sequence, candidate.step, candidate.watermark, candidate.segments, candidate.dense
        )
        return Predictor(next_generation(load_generation(target, ""), [change])).score_table(probes)

    publisher = Publisher(
        target,
        writer,
        Cutter(shards, touched, dense=job.sharded.dense_state),
        cursor,
        sequence=sequence,
        settings=PublishSettings(gate=Gate(score)),
    )
    try:
        for step in range(1, 4):
            job.train(100 + step)
            number = publisher.cut(Moment(step, 300 + 32 * step, None, None, [], job.score(probes)))
            publisher.drain(deadline_s=20)
            assert publisher.settled == (number, True), publisher.counts.last_failure
            publisher.on_settled(number, True)
            _require_served(target, job, rows)
        assert publisher.newest.sequence == cursor.sequence == 4
    finally:
        publisher.abort()


def _require_served(target: Storage, job: Job, rows: pa.Table) -> None:
    generation = load_generation(target, "")
    for shard in job.sharded.local_shards():
        assert np.array_equal(generation.tables.rows(shard.table), shard.weight.detach().numpy())
    np.testing.assert_allclose(Predictor(generation).score_table(rows)["probs"], job.score(rows)["probs"], rtol=0, atol=1e-5)
