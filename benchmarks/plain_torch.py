"""What `train.py` compares with: the same models, data and optimizers in plain PyTorch, as one would write them in an afternoon.

Parquet is read by pyarrow and turned into tensors by NumPy in a thread of its own, which stays a few batches ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = tuple[Tensor, ...]
"""the model's inputs, then the labels"""

READ_AHEAD = 4


def read_batches(paths: list[Path], columns: list[str], size: int, prepare: Callable[[pa.RecordBatch], Inputs]) -> Iterator[Inputs]:
    """All full batches, made by a thread that reads ahead."""
    ready: queue.Queue[Inputs | None] = queue.Queue(READ_AHEAD)

    def read() -> None:
        for path in paths:
            for rows in pq.ParquetFile(path, memory_map=True).iter_batches(size, columns=columns):
                if rows.num_rows == size:
                    ready.put(prepare(rows))
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def train(model: nn.Module, batches: Iterator[Inputs], on_step: Callable[[], None], rates: tuple[float, float]) -> None:
    """Sparse Adagrad for tables, Adam for the rest; `rates` of the two."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    known = {id(weight) for weight in tables}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in known]
    optimizers = torch.optim.Adagrad(tables, lr=rates[0]), torch.optim.Adam(dense, lr=rates[1], fused=True)
    for *inputs, labels in batches:
        on_step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(*inputs), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    on_step()


def mlp(*widths: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*chain.from_iterable(layers))


class Bags(nn.Module):
    """One id a row and feature -> the embeddings side by side; `fused`: all tables in one, else one EmbeddingBag each."""

    def __init__(self, sizes: list[int], dim: int, fused: bool) -> None:
        super().__init__()
        starts = np.cumsum([0, *sizes])
        self.register_buffer("starts", torch.from_numpy(starts[:-1]))
        groups = [int(starts[-1])] if fused else sizes
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for rows in groups)

    def forward(self, ids_bf: Tensor) -> Tensor:
        if len(self.tables) == 1:
            return self.tables[0]((ids_bf + self.starts).view(-1, 1)).view(len(ids_bf), -1)
        return torch.cat([table(ids_bf[:, k : k + 1]) for k, table in enumerate(self.tables)], dim=1)


class Heavy(nn.Module):
    def __init__(self, num_dense: int, sizes: list[int], dim: int, fused: bool) -> None:
        super().__init__()
        self.bags = Bags(sizes, dim, fused)
        self.bottom = mlp(num_dense, 512, 256, 64)
        self.top = nn.Sequential(mlp(64 + dim * len(sizes), 256, 128), nn.Linear(128, 1))

    def forward(self, dense_bf: Tensor, ids_bf: Tensor) -> Tensor:
        return self.top(torch.cat([self.bottom(dense_bf), self.bags(ids_bf)], dim=1)).squeeze(1)


def heavy_inputs(rows: pa.RecordBatch, num_dense: int, num_sparse: int) -> Inputs:
    dense = np.stack([rows.column(f"f{k}").to_numpy() for k in range(num_dense)], axis=1)
    ids = np.stack([rows.column(f"c{k}").to_numpy() for k in range(num_sparse)], axis=1)
    return torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(rows.column("label").to_numpy().astype(np.float32))


class Light(nn.Module):
    """An MLP on five ids and the price, DIN attention of the item over the clicks, an MLP on both."""

    def __init__(self, sizes: list[int], items: int, dim: int, fused: bool) -> None:
        super().__init__()
        self.bags = Bags(sizes, dim, fused)
        self.items = nn.Embedding(items, dim, sparse=True)
        self.deep = mlp(dim * len(sizes) + 1, 64)
        self.attention = nn.Sequential(mlp(4 * dim, 32), nn.Linear(32, 1))
        self.final = nn.Sequential(mlp(64 + dim, 64, 32), nn.Linear(32, 1))

    def forward(self, price_b1: Tensor, ids_bf: Tensor, item_b: Tensor, clicks_bt: Tensor, present_bt: Tensor) -> Tensor:
        deep = self.deep(torch.cat([self.bags(ids_bf), price_b1], dim=1))
        both = self.items(torch.cat([item_b.unsqueeze(1), clicks_bt], dim=1))
        query, steps = both[:, :1].expand(-1, clicks_bt.shape[1], -1), both[:, 1:] * present_bt.unsqueeze(2)
        scores = self.attention(torch.cat([query, steps, query - steps, query * steps], dim=2)).squeeze(2)
        weights = torch.softmax(scores.masked_fill(~present_bt, torch.finfo(scores.dtype).min), dim=1)
        interest = torch.bmm(weights.unsqueeze(1), steps).squeeze(1)
        return self.final(torch.cat([deep, interest], dim=1)).squeeze(1)


def light_inputs(rows: pa.RecordBatch, sizes: list[int], items: int, max_steps: int) -> Inputs:
    """The number in "u00042" modulo the size of the table, which is less work than a hash of the text."""
    names = ("user_id", "age_level", "hour", "item_id", "category_id")
    numbers = [_numbers(rows.column(name)) for name in names]
    ids = np.stack([number % size for number, size in zip(numbers, sizes, strict=True)], axis=1)
    lists = pc.split_pattern(rows.column("click_seq"), ";")
    texts = lists.flatten()
    lengths = np.diff(lists.offsets.to_numpy())
    # Splitting an empty text gives one empty text.
    lengths[pc.equal(rows.column("click_seq"), "").to_numpy(zero_copy_only=False)] = 0
    steps = _numbers(texts.filter(pc.not_equal(texts, ""))) % items
    present = np.arange(max_steps) < lengths[:, None]
    clicks = np.zeros(present.shape, np.int64)
    clicks[present] = steps
    price = np.log10(np.maximum(rows.column("price").to_numpy(), 1e-10)).astype(np.float32)
    label = rows.column("click").to_numpy().astype(np.float32)
    arrays = (price[:, None], ids, numbers[3] % items, clicks, present, label)
    return tuple(torch.from_numpy(array) for array in arrays)


def _numbers(column: pa.Array) -> np.ndarray:
    if pa.types.is_string(column.type):
        column = pc.cast(pc.utf8_slice_codeunits(column, 1), pa.int64())
    return column.to_numpy()
