"""A file that a manifest lists: what must be there, byte for byte."""

from __future__ import annotations

from tidemill.contracts.base import Part


class FileEntry(Part):
    """One immutable file. `key` is relative to the folder that holds the manifest's lineage or run."""

    key: str
    size: int
    sha256: str


class TableFile(Part):
    """A file with rows of one embedding table, or part of one (D12).

    Tensors inside: `<table>/weight` (rows, dim), and for a sorted set of rows `<table>/ids` (rows,) int64; a deletion has ids only,
    named `<table>/deleted`. `row_start`/`row_stop`: the range that the file covers; both None for a set of rows from anywhere.
    `subset`: it holds some rows of the range, not all.
    """

    table: str
    file: FileEntry
    row_start: int | None = None
    row_stop: int | None = None
    subset: bool = False


class TableSpec(Part):
    """One embedding table: `name` is `<collection>/<table>`, so that two collections may hold tables of one short name."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str = "float32"
