"""Arrow columns brought into the few forms that the kernels read, without copying the common ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.errors import DataError, SchemaError
from tidemill.features.plan import DensePlan, IdPlan

ID_TYPES = ("string", "large_string", "int32", "int64", "dictionary<string>", "list of those")
NUMBER_ID_TYPES = (*ID_TYPES, "float32", "float64")
FLOAT_TYPES = ("float32", "float64", "int32", "int64", "string", "large_string", "list of those")

_NATIVE = (pa.string(), pa.large_string(), pa.int32(), pa.int64())
_Lists: TypeAlias = pa.ListArray | pa.LargeListArray


@dataclass(frozen=True, slots=True)
class Column:
    """`rows` rows of items: text (string, large_string) or integers (int32, int64); with `lists`, rows are its lists
    and `items` are their elements, addressed by the lists' offsets."""

    rows: int
    items: pa.Array
    lists: _Lists | None = None


def single_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array; copies only if it has several chunks."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def id_column(array: pa.Array, owner: str, *, numbers: bool) -> Column:
    """The column of an id feature. `numbers`: values are ids already, so whole floats are accepted.

    Raises SchemaError, naming `owner` (feature and column), for a type that has no one text form.
    """
    if array.type in _NATIVE:
        return Column(len(array), array)
    lists = list_array(array)
    if lists is None:
        return Column(len(array), _native_items(array, owner, numbers))
    items = lists.values
    return Column(len(lists), items if items.type in _NATIVE else _native_items(items, owner, numbers), lists)


def list_array(array: pa.Array) -> _Lists | None:
    """The array as a plain list array; None if it isn't one."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return array
    if pa.types.is_fixed_size_list(array.type):
        return array.cast(pa.list_(array.type.value_type))
    return None


def _native_items(array: pa.Array, owner: str, numbers: bool) -> pa.Array:
    type_ = array.type
    if pa.types.is_dictionary(type_):
        return _native_items(array.dictionary_decode(), owner, numbers)
    if type_ in _NATIVE:
        return array
    if pa.types.is_null(type_) or pa.types.is_string_view(type_):
        return array.cast(pa.string())
    if pa.types.is_integer(type_) or (numbers and pa.types.is_floating(type_)):
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(f"{owner}: not a whole number below 2**63: {error}") from None
    if pa.types.is_floating(type_):
        raise SchemaError(f"{owner} has type {type_}, whose text isn't unique; cast it to string or integer")
    raise SchemaError(f"{owner} has type {type_}; accepted: {', '.join(NUMBER_ID_TYPES if numbers else ID_TYPES)}")


@dataclass(frozen=True, slots=True)
class Floats:
    """Row r holds values[offsets[r]:offsets[r + 1]], or values[r] if there are no offsets. NaN is missing."""

    values: np.ndarray
    """float64"""
    offsets: np.ndarray | None = None


def float_column(array: pa.Array, owner: str, plan: IdPlan | DensePlan) -> Floats:
    """The numbers of a raw column; text is split by the plan's separator. A missing row is one NaN, or has no values.

    Raises SchemaError for another type, DataError for text that isn't a number (with row and value).
    """
    array = _plain(array)
    if _is_text(array.type) and _contains(array, plan.separator):
        array = pc.split_pattern(array, plan.separator)
    return _floats(array, owner)


def step_column(array: pa.Array, owner: str, plan: IdPlan) -> Floats:
    """The steps of a raw sequence: text is split by the delimiter, and only a step's first value counts."""
    array = _plain(array)
    if _is_text(array.type):
        array = pc.split_pattern(array, plan.delimiter)
    lists = list_array(array)
    if lists is None or not _is_text(lists.type.value_type):
        return _floats(array, owner)
    steps = _flatten(lists)
    texts = steps.values
    if _contains(texts, plan.separator):
        texts = pc.list_element(pc.split_pattern(pc.utf8_ltrim(texts, plan.separator), plan.separator), 0)
    return Floats(_float64(texts, owner), steps.offsets)


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _floats(array: pa.Array, owner: str) -> Floats:
    lists = list_array(array)
    if lists is None:
        return Floats(_float64(array, owner))
    flat = _flatten(lists)
    return Floats(_float64(_plain(flat.values), owner), flat.offsets)


@dataclass(frozen=True, slots=True)
class _Flat:
    values: pa.Array
    offsets: np.ndarray


def _flatten(lists: _Lists) -> _Flat:
    """The elements of all rows end to end; a null list has none (its offsets may span some)."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return _Flat(lists.flatten(), offsets)


def _contains(array: pa.Array, character: str) -> bool:
    return bool(pc.any(pc.match_substring(array, character)).as_py())


def _is_text(type_: pa.DataType) -> bool:
    return type_ in (pa.string(), pa.large_string())


def _float64(array: pa.Array, owner: str) -> np.ndarray:
    type_ = array.type
    if _is_text(type_):
        array = _parse(array, owner)
    elif pa.types.is_null(type_):
        array = array.cast(pa.float64())
    elif not (pa.types.is_floating(type_) or pa.types.is_integer(type_)):
        raise SchemaError(f"{owner} has type {type_}; accepted: {', '.join(FLOAT_TYPES)}")
    return np.asarray(array.to_numpy(zero_copy_only=False), np.float64)


def _parse(array: pa.Array, owner: str) -> pa.Array:
    filled = pc.if_else(pc.equal(array, ""), pa.scalar(None, array.type), array)
    try:
        return filled.cast(pa.float64())
    except pa.ArrowInvalid:
        row, text = next((row, text) for row, text in enumerate(filled.to_pylist()) if not _is_number(text))
        raise DataError(f"{owner}: value {text!r} (number {row} of the column) isn't a number") from None


def _is_number(text: str | None) -> bool:
    try:
        pa.array([text], pa.string()).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True
