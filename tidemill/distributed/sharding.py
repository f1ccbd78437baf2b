"""Embedding tables over ranks: TorchRec's DistributedModelParallel at every world size, fused optimizers, live views of the shards.

The plan is explicit, not searched: every rank computes the same one from the tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from tidemill.config.optimizer import SparseOptimizer
from tidemill.distributed.fused import fused_parameters, initial_accumulator
from tidemill.distributed.initial import fill_initial
from tidemill.distributed.runtime import Runtime, translate_peer_errors

Sharding = Literal["row_wise", "table_wise"]
LookupCallback = Callable[[str, Tensor], None]
"""(table, local rows int64): rows of this rank's shard that a training step looks up, repeated as often as they are"""

_LOOKUPS = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)


class PooledSharder(EmbeddingBagCollectionSharder):
    """Allows row-wise sharding on the CPU too, where TorchRec's default refuses it although it works."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Rows [row_start, row_stop) of a table, which this rank holds. Tensors are live: training changes them in place."""

    table: str
    row_start: int
    row_stop: int
    weight: Tensor
    """(rows, dim)"""
    optimizer: dict[str, Tensor]
    """"momentum1": (rows, dim) or (rows,); empty for sgd"""


class ShardedModel(nn.Module):
    """A model whose tables are spread over the ranks. `model` is the unwrapped module, whose submodule `program` is dense."""

    def __init__(self, parallel: DistributedModelParallel, runtime: Runtime) -> None:
        super().__init__()
        self._parallel = parallel
        self.runtime = runtime
        self.model: nn.Module = parallel.module
        self._lookups = list(_lookups(parallel))
        self._callbacks: list[LookupCallback] = []
        for lookup in self._lookups:
            lookup.register_forward_hook(self._looked_up)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Collective. In training mode gradients of dense parameters are averaged over ranks, and lookups are reported."""
        if self.training and torch.is_grad_enabled():
            return self._parallel(batch)
        return self.model(batch)

    def local_shards(self) -> list[LocalShard]:
        """This rank's shards of all tables, sorted by table."""
        found = [shard for lookup in self._lookups for shard in _shards(lookup)]
        return sorted(found, key=lambda shard: (shard.table, shard.row_start))

    def dense_state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the dense program by name, live."""
        return dict(self.program.state_dict())

    def load_dense_state(self, state: dict[str, Tensor]) -> None:
        """Copy values into the live parameters. Raises RuntimeError if names or shapes differ."""
        self.program.load_state_dict(state, strict=True)

    @property
    def program(self) -> nn.Module:
        return self.model.get_submodule("program")

    def on_lookup(self, callback: LookupCallback) -> None:
        """Have `callback` told of the rows of every training lookup, on the rank that owns them, in the training thread."""
        self._callbacks.append(callback)

    def set_sparse_learning_rate(self, rate: float) -> None:
        """The rate of the tables' optimizer from the next backward pass on."""
        for lookup in self._lookups:
            lookup.emb_module.set_learning_rate(rate)

    def _looked_up(self, lookup: Any, arguments: tuple[Any, ...], output: Any) -> None:
        # After the lookup: FBGEMM replaces ids out of bounds in place, and those rows are the ones that it trains.
        if not (self._callbacks and self.training and torch.is_grad_enabled()):
            return
        features = arguments[0]
        ends = features.offset_per_key()
        at = 0
        for table in lookup.config.embedding_tables:
            first, at = at, at + table.num_features()
            rows = features.values()[ends[first] : ends[at]]
            if rows.numel():
                for callback in self._callbacks:
                    callback(table.name, rows)


def shard(model: nn.Module, runtime: Runtime, optimizer: SparseOptimizer, sharding: Sharding, seed: int) -> ShardedModel:
    """Spread the tables of `model` over the ranks and fill them with their initial rows. Changes `model` in place.

    Tables too small to give every rank a row stay whole. Collective. Raises ConfigError for an optimizer that isn't supported here.
    """
    fused = fused_parameters(optimizer, runtime.device)
    sharders: list[ModuleSharder[nn.Module]] = [PooledSharder(dict(fused)), EmbeddingCollectionSharder(dict(fused))]
    with translate_peer_errors(f"all ranks to shard the model (rank {runtime.rank})"):
        parallel = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(runtime.main),
            device=runtime.device,
            plan=_plan(model, runtime, sharders, sharding),
            sharders=sharders,
            # A single process has nobody to average gradients with.
            init_data_parallel=runtime.world_size > 1,
        )
    parallel.to(runtime.device)
    sharded = ShardedModel(parallel, runtime)
    sizes = {table.name: table.num_embeddings for lookup in sharded._lookups for table in lookup.config.embedding_tables}
    for local in sharded.local_shards():
        fill_initial(local.weight, local.table, sizes[local.table], local.row_start, seed)
        for state in local.optimizer.values():
            state.fill_(initial_accumulator(optimizer))
    return sharded


def _plan(model: nn.Module, runtime: Runtime, sharders: list[ModuleSharder[nn.Module]], sharding: Sharding) -> ShardingPlan:
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    kernel = EmbeddingComputeKernel.FUSED.value
    load = [0] * runtime.world_size
    plan = {}
    for path, module in _collections(model):
        generators = {}
        for table, parameter in sharder_of[type(module)].shardable_parameters(module).items():
            rows, dim = parameter.shape
            if sharding == "row_wise" and _every_rank_has_rows(rows, runtime.world_size):
                generators[table] = row_wise(compute_kernel=kernel)
                continue
            rank = load.index(min(load))
            load[rank] += rows * dim
            generators[table] = table_wise(rank=rank, compute_kernel=kernel)
        plan[path] = construct_module_sharding_plan(
            module,
            generators,
            sharder=sharder_of[type(module)],
            local_size=runtime.local_world_size,
            world_size=runtime.world_size,
            device_type=runtime.device.type,
        )
    return ShardingPlan(plan=plan)


def _collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            yield path, module


def _lookups(parallel: nn.Module) -> Iterator[Any]:
    for module in parallel.modules():
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            # TorchRec keeps them in a plain list, out of the module tree.
            for grouped in module._lookups:
                yield from (lookup for lookup in grouped.modules() if isinstance(lookup, _LOOKUPS))


def _every_rank_has_rows(rows: int, world_size: int) -> bool:
    """TorchRec gives each rank ceil(rows / world size) rows; the last ones may get none."""
    return (world_size - 1) * -(-rows // world_size) < rows


def _shards(lookup: Any) -> Iterator[LocalShard]:
    engine = lookup.emb_module
    weights = engine.split_embedding_weights()
    # Empty for sgd, not a list of empty lists.
    states = engine.split_optimizer_states() or [[] for _ in weights]
    for table, weight, state in zip(lookup.config.embedding_tables, weights, states, strict=True):
        start = table.local_metadata.shard_offsets[0] if table.local_metadata else 0
        optimizer = {f"momentum{n}": tensor for n, tensor in enumerate(state, start=1)}
        yield LocalShard(table.name, start, start + table.local_rows, weight, optimizer)
