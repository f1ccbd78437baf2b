"""Named NumPy arrays in one safetensors file, laid out by hand so that large arrays are neither copied nor unpickled.

The file: 8 bytes little-endian header length, a JSON header padded with spaces to a multiple of 8, then raw little-endian data
without holes (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.contracts.files import FileEntry
from tidemill.errors import CorruptError
from tidemill.storage.base import Storage
from tidemill.storage.commit import view
from tidemill.storage.files import write_file

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}
_CODES = {np.dtype(text): code for code, text in _DTYPES.items()}
_METADATA = "__metadata__"
# The safetensors library refuses longer headers, and a corrupt length must not make us parse gigabytes.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a header; offsets count from the start of the data."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def write_arrays(
    storage: Storage, key: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write arrays as one safetensors file, replacing one that is there.

    Contiguous little-endian arrays go to the store without a copy, so they must not change until this returns. The bytes depend
    on names, values and metadata only, not on the mapping's order. Raises TypeError for a dtype without a safetensors code.
    """
    # Widest items first: every array then starts at a multiple of its item size, as the safetensors library does it.
    ordered = sorted(
        ((name, _portable(name, array)) for name, array in arrays.items()), key=lambda pair: (-pair[1].itemsize, pair[0])
    )
    chunks = [memoryview(_header(ordered, metadata or {})), *(_bytes_of(array) for _, array in ordered)]
    return write_file(storage, key, *chunks)


def read_arrays(storage: Storage, key: str, *, sha256: str | None = None, size: int | None = None) -> dict[str, np.ndarray]:
    """All arrays of a file, read-only; memory-mapped if the store is local (hashing, if asked for, reads it all once).

    Raises CorruptError naming the key if the size or the hash differs, or if the file isn't well-formed: truncated, a bad header,
    tensors that overlap, leave holes or reach beyond the data.
    """
    return read_arrays_and_metadata(storage, key, sha256=sha256, size=size)[0]


def read_arrays_and_metadata(
    storage: Storage, key: str, *, sha256: str | None = None, size: int | None = None
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """`read_arrays` and `read_metadata` by one read."""
    data = view(storage, key)
    if size is not None and len(data) != size:
        raise CorruptError(f"{key!r} in {storage.url}: {len(data)} bytes, where its manifest says {size}")
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256.lower():
        raise CorruptError(f"{key!r} in {storage.url}: SHA-256 {found}, where its manifest says {sha256}")
    try:
        header, body = _split(data)
        return {entry.name: _array(body, entry) for entry in _entries(header, len(body))}, _metadata(header)
    except ValueError as error:
        raise CorruptError(f"{key!r} in {storage.url} isn't a well-formed safetensors file: {error}") from error


def read_metadata(storage: Storage, key: str) -> dict[str, str]:
    """The text metadata of a file; empty if it has none. Raises CorruptError naming the key for a bad header."""
    try:
        return _metadata(_split(view(storage, key))[0])
    except ValueError as error:
        raise CorruptError(f"{key!r} in {storage.url} isn't a well-formed safetensors file: {error}") from error


def _portable(name: str, array: np.ndarray) -> np.ndarray:
    """The array itself if it is C-contiguous and little-endian, else a copy that is."""
    if name == _METADATA:
        raise ValueError(f"an array can't be named {_METADATA!r}")
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        raise TypeError(f"array {name!r}: dtype {array.dtype} has no safetensors code; known: {', '.join(map(str, _CODES))}")
    return np.asarray(array, dtype=dtype, order="C")


def _header(ordered: list[tuple[str, np.ndarray]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, array in ordered:
        offsets = [offset, offset + array.nbytes]
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _split(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Header and data. Raises ValueError."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes can't hold a header length")
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("the header isn't a JSON object")
    return header, data[8 + length :]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("the header names something twice")
    return fields


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} isn't a map of text to text")
    return metadata


def _entries(header: Mapping[str, Any], size: int) -> list[_Entry]:
    """All tensors, in file order; together they fill `size` bytes exactly once. Raises ValueError."""
    entries = [_entry(name, fields) for name, fields in header.items() if name != _METADATA]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise ValueError(f"tensor {entry.name!r} starts at {entry.start}, where {end} was expected")
        end = entry.stop
    if end != size:
        raise ValueError(f"tensors hold {end} bytes of data, the file {size}")
    return entries


def _entry(name: str, fields: Any) -> _Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"tensor {name!r}: unknown dtype {code!r:.40}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: bad shape or offsets")
    dtype = np.dtype(_DTYPES[code])
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r}: {code} of shape {shape} doesn't fill bytes {offsets[0]} to {offsets[1]}")
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _array(body: memoryview, entry: _Entry) -> np.ndarray:
    return np.frombuffer(body[entry.start : entry.stop], dtype=entry.dtype).reshape(entry.shape)
