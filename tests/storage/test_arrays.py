"""Safetensors files: layout, agreement with the safetensors library, and refusal of everything malformed."""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.numpy import load, save

from tidemill.errors import CorruptError, NotFoundError
from tidemill.storage.arrays import read_arrays, read_metadata, write_arrays
from tidemill.storage.backends.fsspec import FsspecStorage
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st_numpy.arrays(np.dtype(dtype), st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "local" else FsspecStorage(f"memory://{uuid.uuid4().hex}")


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@given(arrays=st.dictionaries(st.text(max_size=8), ARRAYS, max_size=5), metadata=st.dictionaries(st.text(), st.text(), max_size=3))
def test_what_is_written_is_read_here_and_by_the_safetensors_library(
    arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    storage = FsspecStorage("memory://arrays-round-trip")
    stored = write_arrays(storage, "file", arrays, metadata)
    data = storage.read("file")
    assert (stored.size, stored.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    ours, theirs = read_arrays(storage, "file", sha256=stored.sha256, size=stored.size), load(data)
    assert ours.keys() == theirs.keys() == arrays.keys()
    assert all(_same(ours[name], array) and _same(theirs[name], array) for name, array in arrays.items())
    assert read_metadata(storage, "file") == metadata


@given(arrays=st.dictionaries(st.text(max_size=8), ARRAYS, max_size=5))
def test_what_the_safetensors_library_writes_is_read(arrays: dict[str, np.ndarray]) -> None:
    storage = FsspecStorage("memory://arrays-from-library")
    storage.write("file", save(arrays, {"by": "library"}))
    ours = read_arrays(storage, "file")
    assert ours.keys() == arrays.keys()
    assert all(_same(ours[name], array) for name, array in arrays.items())
    assert read_metadata(storage, "file") == {"by": "library"}


def test_views_and_foreign_byte_order_are_written_by_value(storage: Storage) -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"turned": grid.T, "strided": grid[::2, 1:], "big": np.arange(3, dtype=">i4"), "scalar": np.array(7, dtype=np.int64)}
    write_arrays(storage, "file", arrays)
    read = read_arrays(storage, "file")
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].shape == array.shape
    assert read["big"].dtype == np.dtype("<i4")


def test_bytes_do_not_depend_on_order(storage: Storage) -> None:
    arrays = {"b": np.zeros(3, np.uint8), "a": np.zeros(2, np.float32), "c": np.zeros(1, np.float64)}
    first = write_arrays(storage, "first", arrays, {"x": "1", "y": "2"})
    second = write_arrays(storage, "second", dict(reversed(arrays.items())), {"y": "2", "x": "1"})
    assert first.sha256 == second.sha256


def test_data_starts_aligned(storage: Storage) -> None:
    arrays = {"mask": np.ones(3, np.bool_), "half": np.ones(5, np.float16), "wide": np.ones(2, np.float64), "ids": np.arange(3)}
    for name in ("", "x", "xy", "xyz"):
        write_arrays(storage, "file", arrays | {f"pad{name}": np.ones(1, np.uint8)})
        assert all(array.flags.aligned for array in read_arrays(storage, "file").values())


def test_arrays_are_read_only_and_mapped_if_the_store_is_local(storage: Storage) -> None:
    write_arrays(storage, "file", {"weight": np.ones((4, 2), np.float32)})
    weight = read_arrays(storage, "file")["weight"]
    storage.delete("file")
    with pytest.raises(ValueError, match="read-only"):
        weight[0, 0] = 2.0
    base: Any = weight
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj, mmap.mmap) == isinstance(storage, LocalStorage)
    assert weight.sum() == 8.0


def test_arrays_without_a_code_are_refused(storage: Storage) -> None:
    for dtype in ("c8", "U3", "M8[s]", "O"):
        with pytest.raises(TypeError, match=r"'odd'.*no safetensors code"):
            write_arrays(storage, "file", {"odd": np.zeros(1, dtype)})
    with pytest.raises(ValueError, match="__metadata__"):
        write_arrays(storage, "file", {"__metadata__": np.zeros(1)})
    assert storage.list() == []


def test_missing_file(storage: Storage) -> None:
    for read in (read_arrays, read_metadata):
        with pytest.raises(NotFoundError, match="file"):
            read(storage, "file")


def test_every_truncation_is_corrupt(storage: Storage) -> None:
    write_arrays(storage, "file", {"a": np.arange(3, dtype=np.int32), "b": np.ones(2, np.uint8)}, {"k": "v"})
    data = storage.read("file")
    for length in range(len(data)):
        storage.write("file", data[:length])
        with pytest.raises(CorruptError, match="'file'"):
            read_arrays(storage, "file")
    storage.write("file", data + b"\0")
    with pytest.raises(CorruptError, match="'file'"):
        read_arrays(storage, "file")


def test_every_flipped_byte_is_corrupt_by_hash_and_never_another_error(storage: Storage) -> None:
    stored = write_arrays(storage, "file", {"a": np.arange(3, dtype=np.int32), "b": np.ones(2, np.uint8)}, {"k": "v"})
    data = storage.read("file")
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0xFF
        storage.write("file", flipped)
        with pytest.raises(CorruptError, match=r"'file'.*SHA-256"):
            read_arrays(storage, "file", sha256=stored.sha256, size=stored.size)
        with suppress(CorruptError):  # without a hash, a flipped data byte can't be seen
            read_arrays(storage, "file")


def test_size_is_checked_first(storage: Storage) -> None:
    stored = write_arrays(storage, "file", {"a": np.zeros(3)})
    with pytest.raises(CorruptError, match=f"'file'.*{stored.size} bytes, where its manifest says {stored.size + 1}"):
        read_arrays(storage, "file", sha256=stored.sha256, size=stored.size + 1)


MALFORMED = {
    "nothing": b"",
    "length only": struct.pack("<Q", 2),
    "length beyond the file": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": _file(b"{nope}"),
    "not UTF-8": _file(b'{"\xff": 1}'),
    "a list": _file([]),
    "nested too deep": _file(b"[" * 200_000),
    "a number too long": _file(b'{"a": ' + b"9" * 5_000 + b"}"),
    "a name twice": _file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"0"
    ),
    "metadata of numbers": _file({"__metadata__": {"a": 1}}),
    "metadata of a list": _file({"__metadata__": []}),
    "no fields": _file({"a": {}}),
    "a field too many": _file({"a": _tensor() | {"extra": 1}}, bytes(8)),
    "unknown dtype": _file({"a": _tensor("F33")}, bytes(8)),
    "dtype of another type": _file({"a": _tensor() | {"dtype": ["F32"]}}, bytes(8)),
    "negative shape": _file({"a": _tensor(shape=(-2,), offsets=(0, 8))}, bytes(8)),
    "shape of floats": _file({"a": _tensor(shape=(2.0,))}, bytes(8)),
    "shape of bools": _file({"a": _tensor("U8", shape=(True,), offsets=(0, 1))}, b"0"),
    "one offset": _file({"a": _tensor(offsets=(0,))}, bytes(8)),
    "offsets backwards": _file({"a": _tensor(offsets=(8, 0))}, bytes(8)),
    "shape and offsets differ": _file({"a": _tensor(shape=(3,))}, bytes(8)),
    "beyond the data": _file({"a": _tensor(offsets=(0, 8))}, bytes(7)),
    "data left over": _file({"a": _tensor(offsets=(0, 8))}, bytes(9)),
    "a hole": _file({"a": _tensor(offsets=(0, 8)), "b": _tensor(offsets=(9, 17))}, bytes(17)),
    "an overlap": _file({"a": _tensor(offsets=(0, 8)), "b": _tensor(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": _file({"a": _tensor(), "b": _tensor()}, bytes(8)),
    "too many dimensions": _file({"a": _tensor("U8", shape=(1,) * 100, offsets=(0, 1))}, b"0"),
    "empty, yet too large": _file({"a": _tensor("U8", shape=(2**61, 2**61, 0), offsets=(0, 0))}),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_corrupt(storage: Storage, data: bytes) -> None:
    storage.write("file", data)
    with pytest.raises(CorruptError, match=r"'file'.*isn't a well-formed safetensors file"):
        read_arrays(storage, "file")


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_never_raise_another_error(noise: bytes, with_length: bool) -> None:
    storage = FsspecStorage("memory://arrays-noise")
    storage.write("file", _file(noise) if with_length else noise)
    with pytest.raises(CorruptError, match="'file'"):
        read_arrays(storage, "file")
