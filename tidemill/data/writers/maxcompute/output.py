"""A table or one partition of it, replaced as a whole by one commit of a batch write session. Needs the extra `maxcompute`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pydantic import Field

from tidemill.clock import Clock, SystemClock
from tidemill.config.base import Positive
from tidemill.config.env import OdpsCredentials, odps_credentials
from tidemill.config.odps_uri import parse_odps_path
from tidemill.contracts.output import OutputManifest
from tidemill.data.sources.maxcompute.client import Connection
from tidemill.data.writers.maxcompute.target import Found, Target, TargetClient
from tidemill.data.writers.maxcompute.types import fit, new_table_columns, require_fit
from tidemill.data.writers.output import Json, Output, OutputConfig
from tidemill.data.writers.spool import Spool
from tidemill.errors import ConfigError, SchemaError, TidemillError
from tidemill.logs import log


class MaxComputeOutputConfig(OutputConfig):
    """A MaxCompute table, or one of its partitions: `odps://project/tables/[schema.]table/pt=a`."""

    lifecycle: Positive | None = None
    """Days after which MaxCompute drops what wasn't touched; for a table that is made here."""
    quota: str = "pay-as-you-go"
    """What writing is charged to."""
    compression: str = "LZ4_FRAME"
    """LZ4_FRAME, ZSTD or UNCOMPRESSED."""
    tunnel_endpoint: str = ""
    """Address of the Storage API; empty: the service is asked."""
    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Longest wait for any one answer: an upload that doesn't come through, a commit that doesn't end."""


class MaxComputeOutput(Output):
    """Each rank's rows become one block; rank 0 commits all blocks at once, in place of what the target held.

    Until all ranks have all rows they wait on this machine's disk; then the table and the partition are made, if they aren't
    there. `credentials`: from the environment if not given.
    """

    kind = "maxcompute"
    Config = MaxComputeOutputConfig

    def __init__(
        self, config: MaxComputeOutputConfig, *, credentials: OdpsCredentials | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._target = _target(config.path)
        self.place = str(self._target)
        self._credentials = credentials
        self._clock = clock or SystemClock()
        self._made: TargetClient | None = None
        self._spool = Spool(self.kind)
        self._made_partition = False

    def check(self, schema: pa.Schema | None) -> None:
        found = self._client.find()
        self._require_shape(schema, found)
        if found is not None:
            self._require_free()

    def write(self, table: pa.Table) -> None:
        self._spool.write(table)

    def begin(self, schema: pa.Schema | None) -> Json:
        found = self._client.find()
        self._require_shape(schema, found)
        if found is None:
            assert schema is not None  # a table that isn't there and no rows: refused above
            columns = new_table_columns(self.place, schema, [name for name, _ in self._target.partition])
            self._client.create_table(columns, self._config.lifecycle)
            found = self._client.find() or Found(columns, ())
            require_fit(self.place, schema, found.columns)
        self._require_free()
        if self._target.partition and self._client.num_bytes() is None:
            self._client.create_partition()
            self._made_partition = True
        return {"session": self._client.open_session(), "columns": found.columns}

    def deliver(self, begun: Json, rank: int) -> Json:
        if not self._spool.rows:
            return {"rows": 0, "message": None}
        message = self._client.write_block(begun["session"], rank, lambda: self._fitting(begun["columns"]))
        return {"rows": self._spool.rows, "message": message}

    def commit(self, begun: Json, receipts: Sequence[Json]) -> OutputManifest:
        messages = [receipt["message"] for receipt in receipts if receipt["message"] is not None]
        if not messages:
            # A commit of nothing would not say which columns nothing has.
            messages = [self._client.write_block(begun["session"], 0, lambda: _no_rows(self.place, begun["columns"]))]
        # From here on the partition may hold rows, whatever the answer.
        self._made_partition = False
        self._client.commit(begun["session"], messages)
        return OutputManifest(rows=sum(int(receipt["rows"]) for receipt in receipts), files=[])

    def abort(self) -> None:
        """Also takes away a partition that was made for these rows and is still empty. The write session expires by itself."""
        self._spool.close()
        if not self._made_partition:
            return
        self._made_partition = False
        try:
            if self._client.num_bytes() == 0:
                self._client.drop_partition()
        except TidemillError as error:
            log.warning("%s: an empty partition is left: %s", self.place, error)

    @property
    def _client(self) -> TargetClient:
        if self._made is None:
            config = self._config
            connection = Connection(
                self._credentials or odps_credentials(),
                quota=config.quota,
                compression=config.compression,
                tunnel_endpoint=config.tunnel_endpoint,
            )
            self._made = TargetClient(
                self._target,
                connection,
                quota=config.quota,
                compression=config.compression,
                tunnel_endpoint=config.tunnel_endpoint,
                timeout_s=config.timeout_s,
                clock=self._clock,
            )
        return self._made

    def _fitting(self, columns: dict[str, str]) -> Iterator[pa.RecordBatch]:
        for batch in self._spool.batches():
            yield from fit(self.place, pa.Table.from_batches([batch]), columns).combine_chunks().to_batches()

    def _require_shape(self, schema: pa.Schema | None, found: Found | None) -> None:
        """Raise what keeps rows of these columns out of the table."""
        names = tuple(name for name, _ in self._target.partition)
        if found is None:
            if schema is None:
                raise ConfigError(
                    f"{self.place}: the table isn't there, and without rows its columns aren't known; create it first"
                )
            new_table_columns(self.place, schema, names)
            return
        if tuple(name.lower() for name in names) != tuple(name.lower() for name in found.partition):
            form = "/".join(f"{name}=VALUE" for name in found.partition)
            raise ConfigError(f"{self.place}: " + (f"name one partition, {form}" if form else "the table has no partitions"))
        if schema is not None:
            clash = [field.name for field in schema if field.name.lower() in {name.lower() for name in names}]
            if clash:
                raise SchemaError(f"{self.place}: column {clash[0]!r} is a partition column; leave it out")
            require_fit(self.place, schema, found.columns)

    def _require_free(self) -> None:
        if not self._config.overwrite and (self._client.num_bytes() or 0) > 0:
            raise ConfigError(f"{self.place} holds rows already: write elsewhere, or pass --overwrite to replace them")


def _target(address: str) -> Target:
    try:
        path = parse_odps_path(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if len(path.partitions) > 1:
        raise ConfigError(f"{address}: names {len(path.partitions)} partitions; one at a time can be written")
    pairs = [column.split("=", 1) for spec in path.partitions for column in spec.split("/")]
    return Target(path.table, tuple((name, value) for name, value in pairs))


def _no_rows(place: str, columns: dict[str, str]) -> list[pa.RecordBatch]:
    empty = fit(place, pa.table({name: pa.nulls(0) for name in columns}), columns)
    return [pa.RecordBatch.from_arrays([pa.array([], field.type) for field in empty.schema], schema=empty.schema)]
