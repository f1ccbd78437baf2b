"""Tables filled and read without the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from tidemill.testing.maxcompute.documents import Column, TableDocument, TableName, arrow_schema, normal_spec, spec_pairs
from tidemill.testing.maxcompute.replies import invalid_argument, new_id
from tidemill.testing.maxcompute.tables import Tables, columns_of


def fill_table(
    tables: Tables, name: TableName, partitions: Mapping[str, pa.Table], lifecycle: int | None = None, buckets: int | None = None
) -> None:
    """Make a table of these partitions, or replace partitions of it; all rows have its columns.

    Raises ValueError without any partition, ApiError for rows or specs that don't fit the table.
    """
    if not partitions:
        raise ValueError(f"{name}: give at least one partition, so that its columns are known (rows may be none)")
    now = tables.clock.time()
    first_spec, first = next(iter(partitions.items()))
    partition_columns = tuple(Column(name=key, type="string") for key, _ in spec_pairs(first_spec))
    document = TableDocument(
        columns=columns_of(first.schema),
        partition_columns=partition_columns,
        lifecycle=lifecycle,
        buckets=buckets,
        created_at=now,
        modified_at=now,
    )
    tables.create(name, document, if_not_exists=True)
    held = tables.document(name)
    files = {}
    for text, rows in partitions.items():
        spec = normal_spec(text, held.partition_columns)
        files[spec] = [tables.write_file(name, spec, new_id(), in_columns(rows, held.columns))]
    tables.publish(name, files, overwrite=True)


def in_columns(rows: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Rows in these columns and their types. Raises ApiError that names what doesn't fit."""
    schema = arrow_schema(columns)
    if set(rows.column_names) != set(schema.names):
        raise invalid_argument(f"the rows have columns {rows.column_names}, the table takes {schema.names}")
    try:
        return rows.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise invalid_argument(f"the rows don't fit the table: {error}") from error


def table_rows(tables: Tables, name: TableName, partition: str) -> pa.Table:
    """A partition's rows, without its partition columns."""
    _, held = tables.partition(name, partition)
    schema = arrow_schema(tables.document(name).columns)
    parts = [tables.read_file(name, file).select(schema.names).cast(schema) for file in held.files]
    return pa.concat_tables(parts) if parts else schema.empty_table()
