"""Normalisers of raw features, stacked: those of one method are one NumPy operation over all their columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.errors import ConfigError

_METHODS: dict[str, dict[str, float | None]] = {
    "log10": {"threshold": 1e-10, "default": -10.0},
    "zscore": {"mean": None, "standard_deviation": None},
    "minmax": {"min": None, "max": None},
}


@dataclass(frozen=True, slots=True)
class Normalizer:
    """method "affine": (x - a) / b; "log10": log10(x) if x > a else b."""

    method: str
    a: float
    b: float


def parse_normalizer(name: str, text: str) -> Normalizer | None:
    """Read `method=...,key=value,...`; "" is None. Raises ConfigError that names the feature."""
    if not text:
        return None
    fields = dict(part.strip().partition("=")[::2] for part in text.split(","))
    method = fields.pop("method", "")
    if method not in _METHODS:
        raise ConfigError(f"feature {name!r}: normalizer method {method!r} isn't supported; use {', '.join(_METHODS)}")
    known = _METHODS[method]
    values = {key: _number(name, key, fields.pop(key, known[key])) for key in known}
    if fields:
        raise ConfigError(f"feature {name!r}: normalizer {method} has no {', '.join(fields)}; it has {', '.join(known)}")
    first, second = values.values()
    if method == "log10":
        if first < 0:
            raise ConfigError(f"feature {name!r}: normalizer threshold {first} is negative, which has no logarithm")
        return Normalizer("log10", first, second)
    scale = second if method == "zscore" else second - first
    if scale == 0:
        raise ConfigError(f"feature {name!r}: normalizer {text!r} divides by 0")
    return Normalizer("affine", first, scale)


def _number(name: str, key: str, value: str | float | None) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"feature {name!r}: normalizer needs {key}=<number>, not {value!r}") from None
    if not math.isfinite(number):
        raise ConfigError(f"feature {name!r}: normalizer {key} must be finite")
    return number


def normalize(values: np.ndarray, normalizer: Normalizer | None) -> np.ndarray:
    """One feature's values (any shape, float64); NaN stays NaN."""
    if normalizer is None:
        return values
    return NormalizerStack([normalizer]).apply(values.reshape(1, -1)).reshape(values.shape)


def bucketize(values: np.ndarray, boundaries: Sequence[float]) -> np.ndarray:
    """How many boundaries are <= each value, compared in float32; int64. NaN gets the last bucket."""
    with np.errstate(over="ignore"):
        return np.searchsorted(np.array(boundaries, np.float32), values.astype(np.float32), side="right")


class NormalizerStack:
    """The normalisers of all rows of a (features, values) block."""

    def __init__(self, normalizers: Sequence[Normalizer | None]) -> None:
        self._affine = self._rows(normalizers, "affine")
        self._log10 = self._rows(normalizers, "log10")

    @staticmethod
    def _rows(normalizers: Sequence[Normalizer | None], method: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chosen = [(row, n.a, n.b) for row, n in enumerate(normalizers) if n is not None and n.method == method]
        rows, a, b = zip(*chosen, strict=True) if chosen else ((), (), ())
        return np.array(rows, np.int64), np.array(a, np.float64)[:, None], np.array(b, np.float64)[:, None]

    def apply(self, block: np.ndarray) -> np.ndarray:
        """Normalise a (features, values) float64 block in place and return it; NaN stays NaN."""
        rows, shift, scale = self._affine
        if len(rows):
            block[rows] = (block[rows] - shift) / scale
        rows, threshold, default = self._log10
        if len(rows):
            chosen = block[rows]
            # NaN is not <= the threshold, so it takes the logarithm and stays NaN.
            low = chosen <= threshold
            logs = np.log10(chosen, out=np.broadcast_to(default, chosen.shape).copy(), where=~low)
            block[rows] = logs
        return block
