"""The HTTP side of a server: the Open Inference Protocol's routes and Prometheus metrics, over a follower and a batcher."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.clock import Clock
from tidemill.errors import DataError, DeadlineError, NotReadyError, RequestError
from tidemill.serving.batcher import Answer, Batcher, Job
from tidemill.serving.follower import Follower
from tidemill.serving.generation import Generation
from tidemill.serving.metrics import Metrics
from tidemill.serving.protocol import model_metadata, parse_request, response

RETRY_AFTER_S = "1"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may cost."""

    body_bytes: int = 16 * 2**20
    candidates: int = 5000
    deadline_s: float = 5.0
    """From the body's arrival to the answer."""
    body_s: float = 30.0
    """From a request's first byte to its body's last."""


class Service:
    """One server's parts, and the handlers over them. Handlers run on the event loop; scoring doesn't."""

    def __init__(
        self, follower: Follower, batcher: Batcher, metrics: Metrics, clock: Clock, *, limits: Limits, model: str | None = None
    ) -> None:
        self._follower = follower
        self._batcher = batcher
        self._metrics = metrics
        self._clock = clock
        self._limits = limits
        self._model = model

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2", self._server_metadata),
            Route("/v2/models/{model}", self._model_metadata),
            Route("/v2/models/{model}/ready", self._model_ready),
            Route("/v2/models/{model}/infer", self._infer, methods=["POST"]),
            Route("/metrics", self._metrics_text),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, NotReadyError: _not_ready})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        self._generation()
        return _json({"ready": True})

    async def _server_metadata(self, request: Request) -> Response:
        return _json({"name": "tidemill", "version": _version(), "extensions": []})

    async def _model_metadata(self, request: Request) -> Response:
        generation = self._named(request)
        return _json(model_metadata(request.path_params["model"], generation))

    async def _model_ready(self, request: Request) -> Response:
        self._named(request)
        return _json({"name": request.path_params["model"], "ready": True})

    async def _metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _infer(self, request: Request) -> Response:
        started = self._clock.monotonic()
        try:
            answer = await self._answer(request)
        except (RequestError, DataError) as error:
            answer = _error(400, str(error))
        except (NotReadyError, DeadlineError) as error:
            answer = _error(503, str(error))
        except HTTPException as error:
            answer = _error(error.status_code, error.detail)
        except Exception as error:  # noqa: BLE001 - the request edge; the scoring thread has logged it
            answer = _error(500, f"the request can't be scored: {type(error).__name__}: {error}")
        self._metrics.requests.labels(code=str(answer.status_code)).inc()
        self._metrics.latency.observe(self._clock.monotonic() - started)
        return answer

    async def _answer(self, request: Request) -> Response:
        generation = self._named(request)
        body = await self._body(request)
        parsed = parse_request(body, generation.model.feature_columns, max_rows=self._limits.candidates)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        deadline = self._clock.monotonic() + self._limits.deadline_s
        self._batcher.submit(Job(parsed.columns, parsed.num_rows, deadline, _reply_to(future, loop)))
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                answer = await future
        except TimeoutError:
            raise DeadlineError(f"not scored within {self._limits.deadline_s:g} s") from None
        body = response(parsed, request.path_params["model"], answer.generation, answer.scores)
        return Response(body, media_type="application/json")

    async def _body(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await _read_body(request, self._limits.body_bytes)
        except TimeoutError:
            raise HTTPException(408, f"the body didn't arrive within {self._limits.body_s:g} s") from None

    def _generation(self) -> Generation:
        generation = self._follower.generation
        if generation is None:
            raise NotReadyError(f"no generation is warm yet: {self._follower.error or 'loading'}")
        return generation

    def _named(self, request: Request) -> Generation:
        """The generation, if the request names its model. Raises HTTPException (404) otherwise, NotReadyError without one."""
        generation = self._generation()
        model = self._model or generation.model.manifest.model
        if request.path_params["model"] != model:
            raise HTTPException(404, f"no model {request.path_params['model']!r}; this server has {model!r}")
        return generation


def _version() -> str:
    try:
        return importlib.metadata.version("tidemill")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _reply_to(future: asyncio.Future[Answer], loop: asyncio.AbstractEventLoop) -> Callable[[Answer | Exception], None]:
    """A reply that may be given on any thread; nothing happens if the client has gone, or the loop has ended."""

    def settle(answer: Answer | Exception) -> None:
        if future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def reply(answer: Answer | Exception) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, answer)

    return reply


async def _read_body(request: Request, limit: int) -> bytes:
    """The body. Raises HTTPException (413) as soon as it is known to be longer than `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise HTTPException(413, f"the body has {declared} bytes; at most {limit} are taken")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise HTTPException(413, f"the body is longer than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    answer = _json({"error": message}, status)
    if status == 503:
        answer.headers["Retry-After"] = RETRY_AFTER_S
    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _not_ready(request: Request, error: Exception) -> Response:
    return _error(503, str(error))
