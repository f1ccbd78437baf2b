"""What every model of the zoo must do: train, score, shard, export. Run over all registered models, with a config for each kind.

`EXAMPLES` holds the config of the built-in kinds; a third party's model brings one of its own and calls the `check_` functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tidemill.config.model import FeatureGroupConfig, ModelConfig
from tidemill.config.optimizer import DenseOptimizer, SparseOptimizer
from tidemill.distributed.runtime import Runtime
from tidemill.distributed.sharding import ShardedModel, Sharding, shard
from tidemill.features.batch import Batch, IdColumns
from tidemill.features.feature_set import FeatureSet
from tidemill.features.plan import Bucketizer, DensePlan, IdPlan
from tidemill.models.losses import binary_cross_entropy
from tidemill.models.model import RecModel, build_model
from tidemill.models.program import example_inputs, export_program
from tidemill.registry import component_config
from tidemill.training.optimizers import Optimizers, UpdateOptions
from tidemill.training.step import Objective, TrainStep, padding_batch

LABEL = "click"
MAX_STEPS = 6
_MLP: dict[str, Any] = {"hidden_units": [16, 8]}
_PLAIN_TOWER = {"input": "deep", "mlp": _MLP}
_DIN_TOWER = {"input": "history", "attn_mlp": {"hidden_units": [8]}}

EXAMPLES: dict[str, dict[str, Any]] = {
    "multi_tower": {"towers": [_PLAIN_TOWER, {"input": "cross"}], "final": _MLP},
    "multi_tower_din": {"towers": [_PLAIN_TOWER], "din_towers": [_DIN_TOWER], "final": _MLP},
}
"""Kind -> its section of a config, on the groups of `contract_config`"""


def contract_features() -> FeatureSet:
    """Two raw features, three pooled id features (one averaged, two sharing a table) and a sequence of items."""
    return FeatureSet(
        [
            DensePlan("price", "price", None, 1, "", (0.0,)),
            id_plan("user", 50, 8),
            id_plan("tags", 13, 4, pooling="mean"),
            DensePlan("context", "context", None, 2, ",", (0.0, 0.0)),
            id_plan("item", 40, 8),
            id_plan("other_item", 40, 8, embedding_name="item_emb"),
            id_plan("clicks", 40, 8, embedding_name="item_emb", sequence_length=MAX_STEPS),
        ],
        labels=[LABEL],
    )


def id_plan(name: str, rows: int, dim: int, *, embedding_name: str = "", pooling: str = "sum", sequence_length: int = 0) -> IdPlan:
    """A feature whose values are ids already; a sequence if it has a length."""
    return IdPlan(
        name=name,
        column=name,
        side=None,
        bucketizer=Bucketizer("number", rows),
        separator=",",
        default="",
        value_dim=1 if sequence_length else 0,
        embedding_dim=dim,
        embedding_name=embedding_name or f"{name}_emb",
        pooling=pooling,
        is_sequence=sequence_length > 0,
        sequence_length=sequence_length,
    )


def contract_config(kind: str, section: dict[str, Any] | None = None) -> ModelConfig:
    """A model of that kind; its groups interleave raw and id features, in another order than the features have."""
    config = component_config("model", kind)
    return ModelConfig(
        feature_groups=(
            FeatureGroupConfig(group_name="deep", feature_names=("other_item", "price", "user", "tags", "context")),
            FeatureGroupConfig(group_name="cross", feature_names=("item", "user")),
            FeatureGroupConfig(group_name="history", feature_names=("item", "clicks"), group_type="SEQUENCE"),
        ),
        kind=kind,
        config=config.model_validate(EXAMPLES[kind] if section is None else section),
    )


def random_batch(seed: int, size: int, num_rows: int | None = None, max_ids: int = 3) -> Batch:
    """A batch for `contract_features`: 0 to `max_ids` random ids a row, sequences of any length, weights of 0.5 to 1.5.

    The label follows from the first id of the first feature, so that it can be learned.
    """
    features = contract_features()
    rng = np.random.default_rng(seed)
    rows = size if num_rows is None else num_rows
    pooled = [spec for spec in features.id_features if not spec.is_sequence]
    sequences = [spec for spec in features.id_features if spec.is_sequence]
    lengths = [rng.integers(0, max_ids + 1, rows) for _ in pooled]
    ids = [rng.integers(0, spec.num_embeddings, count.sum()) for spec, count in zip(pooled, lengths, strict=True)]
    steps = [rng.integers(0, spec.sequence_length + 1, rows) for spec in sequences]
    step_ids = [rng.integers(0, spec.num_embeddings, count.sum()) for spec, count in zip(sequences, steps, strict=True)]
    firsts = np.array([first[0] if len(first) else 0 for first in np.split(ids[0], np.cumsum(lengths[0])[:-1])])
    weights = rng.uniform(0.5, 1.5, rows)
    return Batch(
        num_rows=rows,
        size=size,
        dense=_padded(rng.normal(size=(rows, sum(spec.dim for spec in features.dense))), size),
        ids=_columns([spec.name for spec in pooled], ids, lengths, size),
        sequences=_columns([spec.name for spec in sequences], step_ids, steps, size),
        labels={LABEL: _padded(firsts % 2, size)},
        weights=_padded(weights, size),
        extras={},
    )


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The rows of a full batch in equal parts, in order; what each rank gets of a global batch."""
    size = batch.size // parts
    return [_rows(batch, part * size, size) for part in range(parts)]


@dataclass(frozen=True, slots=True)
class ContractSettings:
    """How a contract model is trained."""

    sharding: Sharding = "row_wise"
    sparse: dict[str, Any] = field(default_factory=lambda: {"adagrad_optimizer": {"lr": 0.1}})
    dense: dict[str, Any] = field(default_factory=lambda: {"adam_optimizer": {"lr": 0.01}})
    score_first: bool = False
    update: UpdateOptions = field(default_factory=UpdateOptions)
    mixed_precision: str = ""


def contract_step(
    runtime: Runtime, model: RecModel, settings: ContractSettings = ContractSettings()
) -> tuple[TrainStep, Optimizers, ShardedModel]:
    """A step that trains `model`, its optimizers, and the sharded model. Collective."""
    sparse = SparseOptimizer.model_validate(settings.sparse)
    sharded = shard(model, runtime, sparse, settings.sharding, seed=5)
    optimizers = Optimizers(sharded, DenseOptimizer.model_validate(settings.dense), sparse, settings.update)
    objective = Objective([binary_cross_entropy], LABEL)
    padding = padding_batch(contract_features(), [LABEL], 32)
    step = TrainStep(sharded, optimizers, objective, padding, settings.score_first, settings.mixed_precision)
    return step, optimizers, sharded


def check_trains(runtime: Runtime, config: ModelConfig) -> None:
    """The loss of a batch goes down when the model is trained on it, and every dense parameter moves."""
    step, _, sharded = contract_step(runtime, build_model(config, contract_features(), seed=3))
    before = {name: tensor.clone() for name, tensor in sharded.dense_state().items()}
    batch = random_batch(1, 32)
    losses = []
    for _ in range(30):
        step(batch, float(batch.weights.sum()))
        losses.append(step.loss_sum)
    assert losses[-1] < 0.8 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    still = [name for name, tensor in sharded.dense_state().items() if torch.equal(tensor, before[name])]
    assert not still, f"parameters that training didn't change: {still}"


def check_rows_are_independent(runtime: Runtime, config: ModelConfig) -> None:
    """Padding and neighbours don't change a row's score."""
    step, _, _ = contract_step(runtime, build_model(config, contract_features(), seed=3))
    full = random_batch(2, 32)
    alone = step.scores(_rows(full, 4, 8))["probs"]
    np.testing.assert_allclose(alone, step.scores(full)["probs"][4:12], rtol=0, atol=1e-6)


def scores_after_training(runtime: Runtime, config: ModelConfig, sharding: Sharding) -> np.ndarray:
    """Scores of one batch after five steps, of which this rank trained its part.

    The same for all world sizes and shardings, but for rounding. Collective.
    """
    settings = ContractSettings(sharding=sharding, dense={"sgd_optimizer": {"lr": 0.1}})
    step, _, _ = contract_step(runtime, build_model(config, contract_features(), seed=3), settings)
    for seed in range(5):
        batch = random_batch(seed, 48)
        step(split_batch(batch, runtime.world_size)[runtime.rank], float(batch.weights.sum()))
    return step.scores(random_batch(99, 24))["probs"]


def check_exports(config: ModelConfig, num_rows: Sequence[int] = (1, 2, 50, 333)) -> None:
    """The exported graph gives the program's outputs, bit for bit, for any number of rows."""
    model = build_model(config, contract_features(), seed=3)
    exported = export_program(model.program, model.plan).module()
    program = model.program.eval()
    generator = torch.Generator().manual_seed(0)
    for rows in num_rows:
        inputs = example_inputs(model.plan, rows)
        for name, tensor in inputs.items():
            if name.endswith(".lengths"):
                inputs[name] = torch.randint(0, MAX_STEPS + 1, tensor.shape, generator=generator)
            else:
                inputs[name] = torch.randn(tensor.shape, generator=generator)
        expected, found = program(inputs), exported(inputs)
        assert list(found) == list(expected)
        for name, output in expected.items():
            assert output.shape[0] == rows
            assert torch.equal(found[name], output), f"output {name!r} differs for {rows} rows"


def _padded(values: np.ndarray, size: int) -> torch.Tensor:
    full = np.zeros((size, *values.shape[1:]), np.float32)
    full[: len(values)] = values
    return torch.from_numpy(full)


def _columns(keys: list[str], ids: list[np.ndarray], lengths: list[np.ndarray], size: int) -> IdColumns:
    padded = [np.pad(count, (0, size - len(count))) for count in lengths]
    return IdColumns(
        tuple(keys),
        torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids])),
        torch.from_numpy(np.concatenate([np.empty(0, np.int64), *padded]).astype(np.int32)),
    )


def _rows(batch: Batch, start: int, count: int) -> Batch:
    stop = start + count
    return Batch(
        num_rows=count,
        size=count,
        dense=batch.dense[start:stop],
        ids=_column_rows(batch.ids, batch.size, start, stop),
        sequences=_column_rows(batch.sequences, batch.size, start, stop),
        labels={name: label[start:stop] for name, label in batch.labels.items()},
        weights=batch.weights[start:stop],
        extras={},
    )


def _column_rows(columns: IdColumns, size: int, start: int, stop: int) -> IdColumns:
    offsets = columns.offsets().tolist()
    firsts = [key * size for key in range(len(columns.keys))]
    return IdColumns(
        columns.keys,
        torch.cat([columns.values[offsets[first + start] : offsets[first + stop]] for first in firsts]),
        torch.cat([columns.lengths[first + start : first + stop] for first in firsts]),
    )
