"""The metadata calls that the client makes: projects, schemas, tables, partitions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from typing import TypeVar
from xml.sax.saxutils import escape, quoteattr

from tidemill.testing.maxcompute.documents import Column, PartitionDocument, TableDocument, TableName, spec_pairs
from tidemill.testing.maxcompute.exchange import Exchange
from tidemill.testing.maxcompute.replies import Reply, no_such_object, xml_reply
from tidemill.testing.maxcompute.storage_api import table_name
from tidemill.testing.maxcompute.tables import Tables

_PAGE = 1000
Item = TypeVar("Item")


class Metadata:
    """Answers the metadata requests. Thread-safe. Raises ApiError. `page` is how many entries a listing returns at a time."""

    def __init__(self, tables: Tables, page: int = _PAGE) -> None:
        self._tables = tables
        self._page = page

    def tunnel(self, exchange: Exchange) -> Reply:
        """Where the Storage API is: on this very server."""
        return Reply(200, exchange.headers["host"].encode(), "text/plain")

    def project(self, exchange: Exchange) -> Reply:
        """Any name is a project, since create_table makes it."""
        name = escape(exchange.parts["project"])
        then = formatdate(0, usegmt=True)
        headers = {"x-odps-owner": "emulator", "x-odps-creation-time": then, "Last-Modified": then}
        return xml_reply(f"<Project><Name>{name}</Name><Type>managed</Type><State>AVAILABLE</State></Project>", headers=headers)

    def schema(self, exchange: Exchange) -> Reply:
        project, schema = exchange.parts["project"], exchange.parts["schema"]
        if schema != "default" and not any((name.project, name.schema_name) == (project, schema) for name in self._tables.names()):
            raise no_such_object(f"schema {project}.{schema}")
        return xml_reply(f"<Schema><Name>{escape(schema)}</Name></Schema>")

    def list_tables(self, exchange: Exchange) -> Reply:
        project, schema = exchange.parts["project"], exchange.query.get("curr_schema") or "default"
        prefix = exchange.query.get("name", "")
        found = [
            name
            for name in self._tables.names()
            if (name.project, name.schema_name) == (project, schema) and name.table.startswith(prefix)
        ]
        page, marker = self._paged(found, exchange.query)
        entries = "".join(f"<Table><Name>{escape(name.table)}</Name><Type>MANAGED_TABLE</Type></Table>" for name in page)
        return xml_reply(f"<Tables>{marker}{entries}</Tables>")

    def table(self, exchange: Exchange) -> Reply:
        """A table, one of its partitions (`?partition=`), or a page of them (`?partitions`)."""
        name = table_name(exchange)
        if "partitions" in exchange.query:
            return self._partitions(name, exchange.query)
        if "partition" in exchange.query:
            _, partition = self._tables.partition(name, exchange.query["partition"])
            return xml_reply(f"<Partition>{_schema_text(_partition_fields(partition))}</Partition>")
        document = self._tables.document(name)
        times = f"<CreationTime>{formatdate(document.created_at, usegmt=True)}</CreationTime>"
        times += f"<LastModifiedTime>{formatdate(document.modified_at, usegmt=True)}</LastModifiedTime>"
        text = f"<Name>{escape(name.table)}</Name><Project>{escape(name.project)}</Project><Type>MANAGED_TABLE</Type>"
        return xml_reply(f'<Table format="Json">{text}{times}{_schema_text(_table_fields(document))}</Table>')

    def _partitions(self, name: TableName, query: Mapping[str, str]) -> Reply:
        wanted = spec_pairs(query.get("partition", ""))
        held = sorted(self._tables.document(name).partitions.items(), reverse="reverse" in query)
        found = [(spec, partition) for spec, partition in held if spec_pairs(spec)[: len(wanted)] == wanted]
        page, marker = self._paged(found, query)
        entries = "".join(_partition_entry(spec, partition) for spec, partition in page)
        return xml_reply(f"<Partitions>{marker}{entries}</Partitions>")

    def _paged(self, found: list[Item], query: Mapping[str, str]) -> tuple[list[Item], str]:
        """One page, and where the next begins; an empty marker ends the listing."""
        start = int(query.get("marker") or 0)
        stop = start + self._page
        marker = stop if stop < len(found) else ""
        return found[start:stop], f"<Marker>{marker}</Marker><MaxItems>{self._page}</MaxItems>"


def _partition_entry(spec: str, partition: PartitionDocument) -> str:
    columns = "".join(f"<Column Name={quoteattr(name)} Value={quoteattr(value)}/>" for name, value in spec_pairs(spec))
    created, modified = int(partition.created_at), int(partition.modified_at)
    times = f"<CreationTime>{created}</CreationTime><LastDDLTime>{created}</LastDDLTime>"
    times += f"<LastModifiedTime>{modified}</LastModifiedTime>"
    sizes = f"<PartitionSize>{partition.bytes}</PartitionSize><PartitionRecordCount>{partition.rows}</PartitionRecordCount>"
    return f"<Partition>{columns}{times}{sizes}</Partition>"


def _partition_fields(partition: PartitionDocument) -> dict[str, object]:
    return {
        "createTime": int(partition.created_at),
        "lastDDLTime": int(partition.created_at),
        "lastModifiedTime": int(partition.modified_at),
        "partitionSize": partition.bytes,
        "partitionRecordNum": partition.rows,
        "IsArchived": False,
        "PhysicalSize": partition.bytes,
        "FileNum": len(partition.files),
    }


def _table_fields(document: TableDocument) -> dict[str, object]:
    partitions = document.partitions.values()
    return {
        "columns": _columns(document.columns),
        "partitionKeys": _columns(document.partition_columns),
        "comment": document.comment,
        "owner": "emulator",
        "createTime": int(document.created_at),
        "lastDDLTime": int(document.created_at),
        "lastModifiedTime": int(document.modified_at),
        "lifecycle": -1 if document.lifecycle is None else document.lifecycle,
        "recordNum": sum(partition.rows for partition in partitions),
        "size": sum(partition.bytes for partition in partitions),
        "isVirtualView": False,
        "IsArchived": False,
        "PhysicalSize": sum(partition.bytes for partition in partitions),
        "FileNum": sum(len(partition.files) for partition in partitions),
    }


def _columns(columns: Iterable[Column]) -> list[dict[str, object]]:
    return [{"name": c.name, "type": c.type, "comment": c.comment, "isNullable": c.nullable} for c in columns]


def _schema_text(fields: dict[str, object]) -> str:
    return f'<Schema format="Json"><![CDATA[{json.dumps(fields)}]]></Schema>'
