"""Stable 64-bit hashes of byte strings, by name; what they give never changes, since ids in checkpoints depend on it.

    "std"    libstdc++'s std::hash<std::string> on 64-bit targets (Murmur-type, seed 0xc70f6907); the default of tzrec
    "farm"   FarmHash Fingerprint64, of tzrec's USE_FARM_HASH_TO_BUCKETIZE and of TensorFlow's string_to_hash_bucket_fast

The mixing functions work on uint64 scalars in compiled code and on uint64 arrays in NumPy; both wrap modulo 2**64.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, call-arg, no-redef, type-arg"
# (the mixing functions take scalars and arrays alike)

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tidemill.errors import ConfigError

try:
    from numba.extending import register_jitable as shared
except ImportError:  # the NumPy kernels do without

    def shared(function: Callable) -> Callable:
        return function


HASH_VERSIONS = {"std": 1, "farm": 1}
"""Each known hash with the version of its definition, as stored in a snapshot."""

STD_SEED = np.uint64(0xC70F6907)
STD_MULTIPLIER = np.uint64(0xC6A4A7935BD1E995)
FARM_K0 = np.uint64(0xC3A5C85C97CB3127)
FARM_K1 = np.uint64(0xB492B66FBE98F273)
FARM_K2 = np.uint64(0x9AE16A3B2F90404F)
FARM_SEED = np.uint64(81)
# y and z of long strings before the first block: seed * k1 + 113, and shift_mix(y * k2 + 113) * k2
FARM_Y0 = np.uint64((81 * 0xB492B66FBE98F273 + 113) % 2**64)
FARM_X0 = np.uint64((81 * 0x9AE16A3B2F90404F) % 2**64)


def require_hash(name: str) -> str:
    """The name itself. Raises ConfigError for an unknown one."""
    if name not in HASH_VERSIONS:
        raise ConfigError(f"hash function {name!r} isn't known; known: {', '.join(HASH_VERSIONS)}")
    return name


def hash_texts(name: str, texts: Sequence[str]) -> np.ndarray:
    """(n,) uint64: the hash of the UTF-8 bytes of each text."""
    encoded = [text.encode() for text in texts]
    stops = np.cumsum([len(item) for item in encoded], dtype=np.int64)
    starts = stops - np.array([len(item) for item in encoded], dtype=np.int64)
    return hash_ranges(name, np.frombuffer(b"".join(encoded), np.uint8), starts, stops)


def hash_ranges(name: str, data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """(n,) uint64: the hash of data[start:stop] for each range of a uint8 array."""
    words = _Words(data)
    function = _std if require_hash(name) == "std" else _farm
    return function(words, starts.astype(np.int64), (stops - starts).astype(np.int64))


class _Words:
    """Little-endian integers at any byte of a buffer."""

    def __init__(self, data: np.ndarray) -> None:
        padded = np.zeros(len(data) + 8, np.uint8)
        padded[: len(data)] = data
        self.u64 = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))

    def fetch(self, at: np.ndarray, num_bytes: int = 8) -> np.ndarray:
        words = self.u64[at]
        return words if num_bytes == 8 else words & np.uint64((1 << 8 * num_bytes) - 1)


# ---- std::hash of libstdc++


@shared
def std_mix(value):
    return value ^ (value >> np.uint64(47))


@shared
def std_word(state, word):
    return (state ^ (std_mix(word * STD_MULTIPLIER) * STD_MULTIPLIER)) * STD_MULTIPLIER


@shared
def std_tail(state, tail):
    return (state ^ tail) * STD_MULTIPLIER


@shared
def std_finish(state):
    return std_mix(std_mix(state) * STD_MULTIPLIER)


def _std(words: _Words, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    state = STD_SEED ^ (sizes.astype(np.uint64) * STD_MULTIPLIER)
    whole = sizes >> 3
    for k in range(int(whole.max(initial=0))):
        rows = np.flatnonzero(whole > k)
        state[rows] = std_word(state[rows], words.fetch(starts[rows] + 8 * k))
    rows = np.flatnonzero(sizes & 7)
    tails = words.fetch(starts[rows] + 8 * whole[rows])
    tails &= (np.uint64(1) << ((sizes[rows] & 7) * 8).astype(np.uint64)) - np.uint64(1)
    state[rows] = std_tail(state[rows], tails)
    return std_finish(state)


# ---- FarmHash Fingerprint64 (farmhashna::Hash64), Geoff Pike, https://github.com/google/farmhash


@shared
def farm_rotate(value, by):
    return (value >> np.uint64(by)) | (value << np.uint64(64 - by))


@shared
def farm_pair(u, v, multiplier):
    a = std_mix((u ^ v) * multiplier)
    return std_mix((v ^ a) * multiplier) * multiplier


@shared
def farm_upto_3(first, middle, last, size):
    y = first + (middle << np.uint64(8))
    z = size + (last << np.uint64(2))
    return std_mix((y * FARM_K2) ^ (z * FARM_K0)) * FARM_K2


@shared
def farm_upto_7(head, tail, size):
    """`head`, `tail`: the first and the last four bytes."""
    return farm_pair(size + (head << np.uint64(3)), tail, FARM_K2 + size * np.uint64(2))


@shared
def farm_upto_16(head, tail, size):
    multiplier = FARM_K2 + size * np.uint64(2)
    a = head + FARM_K2
    c = farm_rotate(tail, 37) * multiplier + a
    d = (farm_rotate(a, 25) + tail) * multiplier
    return farm_pair(c, d, multiplier)


@shared
def farm_upto_32(w0, w1, w_16, w_8, size):
    """`w0`, `w1`: words at bytes 0 and 8; `w_16`, `w_8`: words at 16 and 8 bytes before the end."""
    multiplier = FARM_K2 + size * np.uint64(2)
    a = w0 * FARM_K1
    c = w_8 * multiplier
    d = w_16 * FARM_K2
    u = farm_rotate(a + w1, 43) + farm_rotate(c, 30) + d
    return farm_pair(u, a + farm_rotate(w1 + FARM_K2, 18) + c, multiplier)


@shared
def farm_upto_64(w0, w1, w2, w3, w_32, w_24, w_16, w_8, size):
    multiplier = FARM_K2 + size * np.uint64(2)
    a = w0 * FARM_K2
    c = w_8 * multiplier
    y = farm_rotate(a + w1, 43) + farm_rotate(c, 30) + w_16 * FARM_K2
    z = farm_pair(y, a + farm_rotate(w1 + FARM_K2, 18) + c, multiplier)
    e = w2 * multiplier
    g = (y + w_32) * multiplier
    h = (z + w_24) * multiplier
    u = farm_rotate(e + w3, 43) + farm_rotate(g, 30) + h
    return farm_pair(u, e + farm_rotate(w3 + a, 18) + g, multiplier)


@shared
def farm_weak(w, x, y, z, a, b):
    a = a + w
    b = farm_rotate(b + a + z, 21)
    c = a
    a = a + x + y
    return a + z, b + farm_rotate(a, 44) + c


@shared
def farm_block(x, y, z, v0, v1, u0, u1, b0, b1, b2, b3, b4, b5, b6, b7):
    """One block of 64 bytes (eight words); the state comes back in the same order."""
    x = farm_rotate(x + y + v0 + b1, 37) * FARM_K1
    y = farm_rotate(y + v1 + b6, 42) * FARM_K1
    x = x ^ u1
    y = y + v0 + b5
    z = farm_rotate(z + u0, 33) * FARM_K1
    v0, v1 = farm_weak(b0, b1, b2, b3, v1 * FARM_K1, x + u0)
    u0, u1 = farm_weak(b4, b5, b6, b7, z + u1, y + b2)
    return z, y, x, v0, v1, u0, u1


@shared
def farm_last(x, y, z, v0, v1, u0, u1, rest, b0, b1, b2, b3, b4, b5, b6, b7):
    """The last 64 bytes; `rest` = (size - 1) & 63."""
    multiplier = FARM_K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    nine = np.uint64(9)
    u0 = u0 + rest
    v0 = v0 + u0
    u0 = u0 + v0
    x = farm_rotate(x + y + v0 + b1, 37) * multiplier
    y = farm_rotate(y + v1 + b6, 42) * multiplier
    x = x ^ (u1 * nine)
    y = y + v0 * nine + b5
    z = farm_rotate(z + u0, 33) * multiplier
    v0, v1 = farm_weak(b0, b1, b2, b3, v1 * multiplier, x + u0)
    u0, u1 = farm_weak(b4, b5, b6, b7, z + u1, y + b2)
    left = farm_pair(v0, u0, multiplier) + std_mix(y) * FARM_K0 + x
    return farm_pair(left, farm_pair(v1, u1, multiplier) + z, multiplier)


def farm_z0() -> np.uint64:
    y = int(FARM_Y0) * int(FARM_K2) + 113 & 2**64 - 1
    return np.uint64((y ^ (y >> 47)) * int(FARM_K2) & 2**64 - 1)


FARM_Z0 = farm_z0()


def _farm(words: _Words, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    hashes = np.full(len(sizes), FARM_K2)
    bounds = ((1, 3), (4, 7), (8, 16), (17, 32), (33, 64), (65, None))
    for (low, high), function in zip(bounds, _FARM_CLASSES, strict=True):
        rows = np.flatnonzero((sizes >= low) & ((sizes <= high) if high else True))
        if len(rows):
            hashes[rows] = function(words, starts[rows], sizes[rows])
    return hashes


def _farm_3(words: _Words, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    ends = at + sizes
    middle = words.fetch(at + (sizes >> 1), 1)
    return farm_upto_3(words.fetch(at, 1), middle, words.fetch(ends - 1, 1), sizes.astype(np.uint64))


def _farm_7(words: _Words, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return farm_upto_7(words.fetch(at, 4), words.fetch(at + sizes - 4, 4), sizes.astype(np.uint64))


def _farm_16(words: _Words, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return farm_upto_16(words.fetch(at), words.fetch(at + sizes - 8), sizes.astype(np.uint64))


def _farm_32(words: _Words, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    ends = at + sizes
    around = [words.fetch(where) for where in (at, at + 8, ends - 16, ends - 8)]
    return farm_upto_32(*around, sizes.astype(np.uint64))


def _farm_64(words: _Words, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    ends = at + sizes
    head = [words.fetch(at + 8 * k) for k in range(4)]
    tail = [words.fetch(ends - 8 * k) for k in (4, 3, 2, 1)]
    return farm_upto_64(*head, *tail, sizes.astype(np.uint64))


def _farm_long(words: _Words, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Strings over 64 bytes: all in step, a block at a time; each leaves when only its last 64 bytes remain."""
    zeros = np.zeros(len(at), np.uint64)
    w0 = words.fetch(at)
    state = np.stack([FARM_X0 + w0, zeros + FARM_Y0, zeros + FARM_Z0, zeros, zeros, zeros, zeros])
    blocks = (sizes - 1) >> 6
    for block in range(int(blocks.max())):
        rows = np.flatnonzero(blocks > block)
        content = [words.fetch(at[rows] + 64 * block + 8 * k) for k in range(8)]
        state[:, rows] = np.stack(farm_block(*state[:, rows], *content))
    content = [words.fetch(at + sizes - 64 + 8 * k) for k in range(8)]
    return farm_last(*state, ((sizes - 1) & 63).astype(np.uint64), *content)


_FARM_CLASSES = (_farm_3, _farm_7, _farm_16, _farm_32, _farm_64, _farm_long)
