"""The Open Inference Protocol, version 2, in JSON: requests to Arrow columns, scores to responses.

https://github.com/open-inference/open-inference-protocol, "HTTP/REST"
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from tidemill.errors import RequestError
from tidemill.serving.generation import Generation

_ARROW = {
    "BYTES": pa.string(),
    "BOOL": pa.bool_(),
    "INT32": pa.int32(),
    "INT64": pa.int64(),
    "FP32": pa.float32(),
    "FP64": pa.float64(),
}
_PYTHON: dict[str, tuple[tuple[type, ...], str]] = {
    "BYTES": ((str,), "text"),
    "BOOL": ((bool,), "true or false"),
    "INT32": ((int,), "a whole number of 32 bits"),
    "INT64": ((int,), "a whole number of 64 bits"),
    "FP32": ((int, float), "a number"),
    "FP64": ((int, float), "a number"),
}
_DATATYPES = {"f2": "FP16", "f4": "FP32", "f8": "FP64", "i4": "INT32", "i8": "INT64", "b1": "BOOL"}
_INPUT_TYPES = (("string", "BYTES"), ("int64", "INT64"), ("float32", "FP32"))


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request's feature columns: each has `num_rows` rows, or one that stands for all."""

    id: str | None
    columns: dict[str, pa.Array]
    num_rows: int
    outputs: list[str] | None
    """Asked for; None: all."""


def parse_request(body: bytes, features: Collection[str], *, max_rows: int) -> InferRequest:
    """The request in `body`. Inputs that aren't in `features` are left alone.

    Raises RequestError that names the input, the row and the expected type; for features that aren't given, their names.
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body isn't JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise RequestError('the body must be a JSON object with a list of "inputs"')
    columns: dict[str, pa.Array] = {}
    given: list[str] = []
    for tensor in request["inputs"]:
        name = _name_of(tensor)
        if name in given:
            raise RequestError(f"input {name!r} is given twice")
        given.append(name)
        if name in features:
            columns[name] = _column(name, tensor, max_rows)
    _require_all(features, given)
    lengths = {name: len(column) for name, column in columns.items()}
    num_rows = max(lengths.values(), default=1)
    for name, length in lengths.items():
        if length not in (1, num_rows):
            raise RequestError(f"input {name!r} has {length} rows, others have {num_rows}; give as many, or 1 for all")
    return InferRequest(_text_or_none(request.get("id"), "id"), columns, num_rows, _outputs(request.get("outputs")))


def response(request: InferRequest, model: str, generation: Generation, scores: Mapping[str, np.ndarray]) -> bytes:
    """The answer's JSON. Raises RequestError for an output that the model doesn't have."""
    names = list(scores) if request.outputs is None else request.outputs
    for name in names:
        if name not in scores:
            raise RequestError(f"no output {name!r}; the model has {', '.join(scores)}")
    body: dict[str, Any] = {
        "model_name": model,
        "model_version": f"{generation.term}.{generation.sequence}",
        "parameters": generation.name(),
        "outputs": [_tensor(name, scores[name]) for name in names],
    }
    if request.id is not None:
        body["id"] = request.id
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def model_metadata(model: str, generation: Generation) -> dict[str, Any]:
    """What `GET /v2/models/<model>` says."""
    inputs = [column for column in generation.model.features.input_columns if column.role == "feature"]
    return {
        "name": model,
        "versions": [f"{generation.term}.{generation.sequence}"],
        "platform": "tidemill",
        "inputs": [{"name": column.name, "datatype": _input_datatype(column.accepts), "shape": [-1]} for column in inputs],
        "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in generation.model.manifest.outputs],
        "parameters": generation.name(),
    }


def _name_of(tensor: object) -> str:
    name = tensor.get("name") if isinstance(tensor, dict) else None
    if not isinstance(name, str):
        raise RequestError('every input must be an object with "name", "shape", "datatype" and "data"')
    return name


def _column(name: str, tensor: Mapping[str, Any], max_rows: int) -> pa.Array:
    datatype, data, shape = tensor.get("datatype"), tensor.get("data"), tensor.get("shape")
    if not isinstance(datatype, str) or datatype not in _ARROW:
        raise RequestError(f"input {name!r}: datatype {datatype!r} isn't supported; use one of {', '.join(_ARROW)}")
    if not isinstance(data, list):
        raise RequestError(f'input {name!r}: "data" must be a list')
    if shape != [len(data)]:
        raise RequestError(f'input {name!r}: "shape" is {shape!r}, but "data" has {len(data)} values: give [{len(data)}]')
    if len(data) > max_rows:
        raise RequestError(f"input {name!r} has {len(data)} rows; at most {max_rows} are scored in one request")
    if not data:
        raise RequestError(f"input {name!r} has no rows")
    try:
        # Arrow is lenient where JSON is sloppy: true would become 1, and a list of numbers bytes.
        if datatype != "BOOL" and (True in data or False in data):
            _check_rows(name, datatype, data)
        return pa.array(data, _ARROW[datatype])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError) as error:
        _check_rows(name, datatype, data)
        raise RequestError(f"input {name!r}: {error}; expected {datatype}") from None


def _check_rows(name: str, datatype: str, data: list[Any]) -> None:
    """Raises RequestError that names the first row whose value isn't of the type; null is of every type."""
    types, words = _PYTHON[datatype]
    for row, value in enumerate(data):
        fits = value is None or (isinstance(value, types) and (datatype == "BOOL" or not isinstance(value, bool)))
        if fits and value is not None and datatype in ("INT32", "INT64"):
            fits = -(2 ** (int(datatype[3:]) - 1)) <= value < 2 ** (int(datatype[3:]) - 1)
        if not fits:
            raise RequestError(f"input {name!r}, row {row}: {value!r:.60} isn't {words} ({datatype})")


def _require_all(features: Collection[str], given: Collection[str]) -> None:
    missing = sorted(set(features) - set(given))
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], set(given) - set(features), n=1)
    hint = f" (is {near[0]!r} meant to be {missing[0]!r}?)" if near else ""
    raise RequestError(f"input {', '.join(map(repr, missing[:5]))} isn't given{hint}; send null for unknown values")


def _outputs(outputs: object) -> list[str] | None:
    if outputs is None:
        return None
    if not isinstance(outputs, list) or not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in outputs):
        raise RequestError('"outputs" must be a list of objects with "name"')
    return [item["name"] for item in outputs]


def _text_or_none(value: object, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f'"{key}" must be text')
    return value


def _tensor(name: str, values: np.ndarray) -> dict[str, Any]:
    values = np.ascontiguousarray(values)
    datatype = _DATATYPES.get(values.dtype.str[1:], "FP32")
    return {"name": name, "datatype": datatype, "shape": list(values.shape), "data": values.reshape(-1)}


def _input_datatype(accepts: Collection[str]) -> str:
    return next((datatype for arrow, datatype in _INPUT_TYPES if arrow in accepts), "BYTES")
