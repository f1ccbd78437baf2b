"""What all file sources share: which files patterns name, what identifies them, how they are opened and how a change is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import numpy as np
import pyarrow as pa

from tidemill.data.event_times import column_times
from tidemill.data.split import RawBatch, Run, SplitId, largest
from tidemill.errors import ConfigError, DataError, MissingExtraError, SchemaError, SourceChangedError, StorageError

T = TypeVar("T")

_PARALLEL = 8
# What stores call the tag that changes whenever an object is written.
_ETAGS = ("ETag", "etag")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as its store describes it. `path`: absolute, or a URL without credentials; `etag`: if the store gives one."""

    path: str
    size: int
    etag: str | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {"size": self.size} | ({"etag": self.etag} if self.etag else {})


@dataclass(frozen=True, slots=True)
class Place:
    """A file system, and what its paths begin with in the names that files have here: "" locally, "s3://", "hdfs://host:8020"."""

    files: Any
    prefix: str
    is_local: bool = False

    def identity(self, path: str) -> str:
        """The name of a file of this place: the same however a pattern was worded."""
        return os.path.abspath(path) if self.is_local else self.prefix + path

    def found(self, info: dict[str, Any]) -> FoundFile:
        """A file as the store's listing shows it."""
        etag = next((str(info[key]).strip('"') for key in _ETAGS if info.get(key)), None)
        return FoundFile(self.identity(info["name"]), int(info["size"]), etag)

    def stat(self, path: str) -> FoundFile:
        """A file by its name here. Raises SourceChangedError if it is gone."""
        try:
            return self.found(self.files.info(path.removeprefix(self.prefix)))
        except FileNotFoundError:
            raise _gone(path) from None

    def open(self, path: str, *, mapped: bool = False) -> pa.NativeFile:
        """A file by its name here; `mapped`: into memory, if it is local. Raises SourceChangedError if it is gone."""
        try:
            if self.is_local:
                return pa.memory_map(path) if mapped else pa.OSFile(path)
            return pa.PythonFile(self.files.open(path.removeprefix(self.prefix), "rb"), mode="r")
        except FileNotFoundError:
            raise _gone(path) from None


def locate(url: str) -> tuple[Place, str]:
    """The place of a path, a pattern or a URL, and its path there. Raises ConfigError, or MissingExtraError for a kind of store
    whose package isn't installed."""
    if "::" in url:
        raise ConfigError(f"{url!r}: chained URLs aren't supported; name the store alone")
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url!r}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from None
    protocols = [files.protocol] if isinstance(files.protocol, str) else list(files.protocol)
    if "file" in protocols:
        return Place(files, "", is_local=True), path
    if "://" in path:
        return Place(files, ""), path
    # Where the host is no part of the path (hdfs, sftp), it has to stay in the name; who logs in there doesn't.
    host = urlsplit(url).netloc.rpartition("@")[2]
    return Place(files, f"{protocols[0]}://{'' if path.lstrip('/').startswith(host) else host}"), path


class FileSet:
    """The files that a comma list of paths, globs and URLs names. `what`, `example`: what they should be ("Parquet file") and a
    pattern of such, for errors."""

    def __init__(self, patterns: str, what: str, example: str) -> None:
        self._patterns = [pattern for pattern in (part.strip() for part in patterns.split(",")) if pattern]
        self._what = what
        self._example = example
        self._places: list[tuple[Place, str]] | None = None

    def find(self) -> list[FoundFile]:
        """All files in the order of their names, each once, whatever order a store lists them in. Raises DataError naming a
        pattern that matches none."""
        found: dict[str, FoundFile] = {}
        for (place, path), pattern in zip(self._located(), self._patterns, strict=True):
            matches = self._matches(place, path, pattern)
            found |= {file.path: file for file in matches}
        if not found:
            raise DataError(f"no {self._what} is named: the list of paths is empty")
        return [found[path] for path in sorted(found)]

    def place(self, path: str) -> Place:
        """Where a file of this set lies, by its name."""
        for place, _ in self._located():
            if "://" not in path if place.is_local else path.startswith(place.prefix or "http"):
                return place
        return locate(path)[0]

    def _located(self) -> list[tuple[Place, str]]:
        if self._places is None:
            self._places = [locate(pattern) for pattern in self._patterns]
        return self._places

    def _matches(self, place: Place, path: str, pattern: str) -> list[FoundFile]:
        # Listings that the client remembers may be older than the newest files.
        place.files.invalidate_cache()
        with reading(pattern):
            infos = place.files.glob(path, detail=True).values()
            matches = [place.found(info) for info in infos if info["type"] != "directory" and not place.files.isdir(info["name"])]
            if not matches:
                hint = f"; it is a folder: write {pattern.rstrip('/')}/{self._example}" if place.files.isdir(path) else ""
                raise DataError(f"no {self._what} matches {pattern!r}{hint}")
        return matches


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns what a store's client raises about the connection into a StorageError that names the path."""
    try:
        yield
    except (PermissionError, ConnectionError, TimeoutError) as error:
        raise StorageError(f"{path}: {type(error).__name__}: {error}") from error


def in_parallel(function: Callable[[FoundFile], T], found: Sequence[FoundFile]) -> list[T]:
    """The function of each file, in order; the first error is raised."""
    with ThreadPoolExecutor(_PARALLEL, "files") as pool:
        return list(pool.map(function, found))


def compare(split: SplitId, saved: dict[str, Any], found: dict[str, Any], keys: Collection[str]) -> None:
    """Compare what was saved of a file with what it is, by the keys that both have.

    Raises SourceChangedError with all differences.
    """
    both = [key for key in keys if key in saved and key in found]
    differences = [f"{key} was {saved[key]}, is {found[key]}" for key in both if saved[key] != found[key]]
    if differences:
        raise SourceChangedError(
            f"{split} changed since it was first read ({'; '.join(differences)}); restore it, or start a new run"
        )


def timed_rows(split: SplitId, first: int, table: pa.Table, time_column: str | None) -> RawBatch:
    """Consecutive rows of a file from row number `first` on, with event times from a column of theirs."""
    times = times_of(table, time_column, split.name)
    run = Run(split, first, first + table.num_rows, table.num_rows, event_time=largest(times, 0, table.num_rows))
    return RawBatch(table, (run,), times)


def times_of(table: pa.Table, time_column: str | None, path: str) -> np.ndarray | None:
    """(n,) event times of a file's rows; None if no column has them."""
    if time_column is None:
        return None
    return column_times(table.column(time_column), where=f"{path}: column {time_column!r}")


class Reference:
    """The types of the first file of a stream, which all later ones are read as. `columns`: those that are read."""

    def __init__(self, schema: pa.Schema, columns: Collection[str], path: str) -> None:
        self.schema = pa.schema([pa.field(name, plain_type(schema.field(name).type)) for name in columns])
        self._path = path

    def align(self, table: pa.Table, path: str) -> pa.Table:
        """The rows of another file with the first's columns; narrower numbers are widened. Raises SchemaError naming column,
        both types and both files."""
        if table.schema.equals(self.schema):
            return table
        columns = []
        for field in self.schema:
            column = table.column(field.name)
            if not widens(column.type, field.type):
                types = f"{column.type}, but {field.type} in {self._path}"
                raise SchemaError(f"{path}: column {field.name!r} is {types}; files of a stream must agree")
            columns.append(column.cast(field.type))
        return pa.Table.from_arrays(columns, schema=self.schema)


def widens(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether every value of one plain type has the same value in the other."""
    kinds = pa.types
    if found == wanted or kinds.is_null(found):
        return True
    if kinds.is_list(found) and kinds.is_list(wanted):
        return widens(found.value_type, wanted.value_type)
    same = (kinds.is_signed_integer, kinds.is_unsigned_integer, kinds.is_floating)
    return any(kind(found) and kind(wanted) for kind in same) and bool(found.bit_width <= wanted.bit_width)


def plain(table: pa.Table) -> pa.Table:
    """Rows with each column's plain type. Raises ArrowInvalid for text that is too much for it (2 GiB in one piece)."""
    schema = pa.schema([pa.field(field.name, plain_type(field.type), field.nullable) for field in table.schema])
    return table if schema.equals(table.schema) else table.cast(schema)


def plain_type(found: pa.DataType) -> pa.DataType:
    """The type that values are read as: writers differ in whether text and lists are large, or values kept in a dictionary."""
    kinds = pa.types
    if kinds.is_dictionary(found):
        return plain_type(found.value_type)
    if kinds.is_large_string(found) or kinds.is_string_view(found):
        return pa.string()
    if kinds.is_large_binary(found) or kinds.is_binary_view(found):
        return pa.binary()
    if kinds.is_list(found) or kinds.is_large_list(found) or kinds.is_fixed_size_list(found):
        return pa.list_(plain_type(found.value_type))
    if kinds.is_map(found):
        return pa.map_(plain_type(found.key_type), plain_type(found.item_type))
    return found


def _gone(path: str) -> SourceChangedError:
    return SourceChangedError(f"{path}: the file is gone; put it back to go on")
