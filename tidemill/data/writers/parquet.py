"""A folder of Parquet parts that appears as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.clock import Clock
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.folder import PART_BYTES, Folder
from tidemill.data.writers.output import Json, Output, OutputConfig
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage


class ParquetOutput(Output):
    """Parts named `part-<number>.parquet`, committed with `_SUCCESS`, written last. `path`: a folder, or FOLDER/*.parquet."""

    kind = "parquet"

    def __init__(
        self, config: OutputConfig, storage: Storage | None = None, *, part_bytes: int = PART_BYTES, clock: Clock | None = None
    ) -> None:
        storage = storage or open_storage(config.path.removesuffix("/*.parquet"))
        self.place = storage.url
        self._folder = Folder(
            storage, self.kind, "parquet", _encode, overwrite=config.overwrite, part_bytes=part_bytes, clock=clock
        )

    def check(self, schema: pa.Schema | None) -> None:
        self._folder.check_free()

    def write(self, table: pa.Table) -> None:
        self._folder.write(table)

    def deliver(self, begun: Json, rank: int) -> Json:
        return self._folder.deliver()

    def commit(self, begun: Json, receipts: Sequence[Json]) -> OutputManifest:
        return self._folder.commit(receipts)

    def abort(self) -> None:
        self._folder.abort()


def _encode(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue()
