"""Arrow streams: rows as the pieces of a body, and a body as rows."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import pyarrow as pa

from tidemill.testing.maxcompute.replies import invalid_argument

_CODECS = {"": None, "LZ4_FRAME": "lz4", "ZSTD": "zstd"}
# Arrow writes a message as many small parts; this many bytes are gathered before they reach Python.
_BUFFER_BYTES = 1 << 20


def codec(accept_encoding: str | None) -> str | None:
    """Arrow's name for the buffer compression that a read asks for. Raises ApiError for one that isn't known."""
    try:
        return _CODECS[(accept_encoding or "").strip()]
    except KeyError:
        raise invalid_argument(f"unknown compression {accept_encoding!r}; known: LZ4_FRAME, ZSTD or none") from None


def stream_pieces(schema: pa.Schema, batches: Iterable[pa.RecordBatch], compression: str | None) -> Iterator[bytes]:
    """An Arrow stream: first the schema's bytes, then one piece for each batch, last the end marker."""
    sink = _Pieces()
    out = pa.output_stream(sink, buffer_size=_BUFFER_BYTES)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    # Arrow writes the schema together with the first batch; here it goes ahead, so that a stream can end between the two.
    head = schema.serialize().to_pybytes()
    yield head
    with pa.ipc.new_stream(out, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
            out.flush()
            yield sink.take().removeprefix(head)
    out.flush()
    yield sink.take().removeprefix(head)


def read_stream(body: bytes) -> pa.Table:
    """The rows of an Arrow stream. Raises ApiError if it isn't a whole one."""
    # A stream without its end marker is one whose writer died: Arrow itself would take it for complete.
    if not body.endswith(b"\xff\xff\xff\xff\0\0\0\0"):
        raise invalid_argument(f"the body of {len(body)} bytes isn't a whole Arrow stream")
    try:
        return pa.ipc.open_stream(body).read_all()
    except pa.ArrowInvalid as error:
        raise invalid_argument(f"not an Arrow stream: {error}") from error


class _Pieces(io.RawIOBase):
    """A sink that hands over what was written since the last `take`."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        part = bytes(data)  # type: ignore[call-overload]
        self._parts.append(part)
        return len(part)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data
