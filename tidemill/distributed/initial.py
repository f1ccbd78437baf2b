"""Initial weights of embedding tables: a function of seed, table and row alone, whatever the world size and sharding."""

from __future__ import annotations

import hashlib

import torch

# Rows drawn by one generator. Part of the function: another number gives other weights.
BLOCK_ROWS = 65536


def fill_initial(weight: torch.Tensor, table: str, num_embeddings: int, row_start: int, seed: int) -> None:
    """Fill `weight` (rows, dim), the rows from `row_start` on, with uniform(-1, 1) / sqrt(num_embeddings), TorchRec's default.

    A rank draws only the blocks that it holds rows of.
    """
    rows, dim = weight.shape
    bound = num_embeddings**-0.5
    for block in range(row_start // BLOCK_ROWS, -(-(row_start + rows) // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        drawn = torch.rand(min(BLOCK_ROWS, num_embeddings - first), dim, generator=_generator(seed, table, block))
        start, stop = max(first, row_start), min(first + len(drawn), row_start + rows)
        weight[start - row_start : stop - row_start] = drawn[start - first : stop - first].mul_(2 * bound).sub_(bound)


def _generator(seed: int, table: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
