from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from tests.serving.conftest import LineageMaker, columns_of, random_rows, request_of
from tidemill.clock import ManualClock, SystemClock
from tidemill.errors import DataError, DeadlineError, NotReadyError
from tidemill.serving.app import Limits, Service
from tidemill.serving.batcher import Answer, Batcher, Job
from tidemill.serving.follower import Follower, Identity
from tidemill.serving.loader import load_generation
from tidemill.serving.metrics import Metrics
from tidemill.serving.predictor import Predictor
from tidemill.storage.backends.local import LocalStorage

ROWS = random_rows(np.random.default_rng(7), 30)
INFER = "/v2/models/click/infer"


class Client:
    """Sends requests straight into an application, each on an event loop of its own."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def get(self, path: str) -> httpx.Response:
        return asyncio.run(self._send("GET", path))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return asyncio.run(self._send("POST", path, **body))

    async def _send(self, method: str, path: str, **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, timeout=20, **body)


async def two_chunks() -> AsyncIterator[bytes]:
    yield b" " * 15_000
    yield b" " * 15_000


@dataclass
class Running:
    client: Client
    follower: Follower
    batcher: Batcher


@pytest.fixture
def serve(root: LocalStorage) -> Iterator[Any]:
    """Starts a service over the root; its follower is polled by hand."""
    with ExitStack() as stack:

        def start(*, limits: Limits | None = None, capacity: int = 256, scoring: bool = True) -> Running:
            clock = SystemClock()
            metrics = Metrics(clock)
            follower = Follower(root, Identity("a", "http://127.0.0.1:1"), metrics, clock)
            metrics.watch(lambda: follower.generation)
            batcher = Batcher(lambda: follower.predictor, metrics, clock, capacity=capacity)
            if scoring:
                batcher.start()
            stack.callback(batcher.close)
            service = Service(follower, batcher, metrics, clock, limits=limits or Limits())
            follower.poll()
            return Running(Client(service.app()), follower, batcher)

        yield start


def outputs_of(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    return {output["name"]: np.array(output["data"], np.float32) for output in answer["outputs"]}


def test_scores_name_their_generation(serve, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.release()
    lineage.deploy(4)
    answer = serve().client.post(INFER, json=request_of(ROWS, id="q1")).json()
    assert answer["id"] == "q1"
    assert answer["model_name"] == "click"
    assert answer["parameters"] == {
        "deployment": 4,
        "lineage": lineage.folder,
        "snapshot": lineage.digest,
        "term": 1,
        "sequence": 1,
        "step": 10,
        "watermark": 1_700_000_001.0,
    }
    assert [(output["name"], output["datatype"], output["shape"]) for output in answer["outputs"]] == [
        ("logits", "FP32", [30]),
        ("probs", "FP32", [30]),
    ]
    assert np.array_equal(outputs_of(answer)["logits"], lineage.state.scores(ROWS))


def test_user_columns_of_one_row_stand_for_all_candidates(serve, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    lineage.deploy(1)
    rows = [{**row, "user_id": 3, "clicked": "1;2"} for row in ROWS]
    request = request_of(rows, outputs=[{"name": "logits"}])
    for tensor in request["inputs"]:
        if tensor["name"] in ("user_id", "clicked"):
            tensor["data"], tensor["shape"] = tensor["data"][:1], [1]
    answer = serve().client.post(INFER, json=request).json()
    assert list(outputs_of(answer)) == ["logits"]
    assert np.array_equal(outputs_of(answer)["logits"], lineage.state.scores(rows))


def test_inputs_that_no_feature_reads_are_left_alone(serve, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)
    request = request_of(ROWS)
    request["inputs"].append({"name": "event_id", "datatype": "BYTES", "shape": [2], "data": [{}, []]})
    assert serve().client.post(INFER, json=request).status_code == 200


def _tensor(name: str, **changes: Any) -> Any:
    def change(request: dict[str, Any]) -> None:
        next(tensor for tensor in request["inputs"] if tensor["name"] == name).update(changes)

    return change


def _drop(name: str, *, rename: str | None = None) -> Any:
    def change(request: dict[str, Any]) -> None:
        tensor = next(tensor for tensor in request["inputs"] if tensor["name"] == name)
        if rename:
            tensor["name"] = rename
        else:
            request["inputs"].remove(tensor)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tensor("price", data=[1.0, "x", 2.0]), "input 'price', row 1: 'x' isn't a number (FP32)"),
        (_tensor("item_id", data=[1, 2, 3.5]), "input 'item_id', row 2: 3.5 isn't a whole number of 64 bits (INT64)"),
        (_tensor("item_id", data=[1, True, 3]), "input 'item_id', row 1: True isn't a whole number of 64 bits (INT64)"),
        (_tensor("item_id", data=[2**63, 1, 1]), "input 'item_id', row 0: 9223372036854775808 isn't a whole number"),
        (_tensor("item_id", data=[1, 2, 100]), "feature 'item_id', column 'item_id', row 2: value 100 isn't in 0..99"),
        (_tensor("tags", data=["1", 2, "3"]), "input 'tags', row 1: 2 isn't text (BYTES)"),
        (_tensor("tags", data=["1", ["2"], "3"]), "input 'tags', row 1: ['2'] isn't text (BYTES)"),
        (_tensor("tags", datatype="UINT8"), "input 'tags': datatype 'UINT8' isn't supported"),
        (_tensor("tags", datatype=["BYTES"]), "input 'tags': datatype ['BYTES'] isn't supported"),
        (_tensor("tags", shape=[4]), 'input \'tags\': "shape" is [4], but "data" has 3 values'),
        (_tensor("tags", data=["1", "2"], shape=[2]), "input 'tags' has 2 rows, others have 3; give as many, or 1 for all"),
        (_tensor("tags", data=[], shape=[0]), "input 'tags' has no rows"),
        (_tensor("tags", data="1"), "input 'tags': \"data\" must be a list"),
        (_drop("tags"), "input 'tags' isn't given; send null"),
        (_drop("tags", rename="tag"), "input 'tags' isn't given (is 'tag' meant to be 'tags'?)"),
        (lambda request: request["inputs"].append(request["inputs"][0]), "input 'user_id' is given twice"),
        (lambda request: request["inputs"].append({"data": []}), 'every input must be an object with "name"'),
        (lambda request: request.update(outputs=[{"name": "ctr"}]), "no output 'ctr'; the model has logits, probs"),
        (lambda request: request.update(outputs="probs"), '"outputs" must be a list'),
        (lambda request: request.update(id=3), '"id" must be text'),
        (lambda request: request.update(inputs={}), 'a list of "inputs"'),
    ],
)
def test_bad_requests_are_explained(serve, new_lineage: LineageMaker, change: Any, message: str) -> None:
    new_lineage().deploy(1)
    request = request_of(ROWS[:3])
    change(request)
    response = serve().client.post(INFER, json=request)
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_other_errors_have_their_status(serve, new_lineage: LineageMaker) -> None:
    running = serve(limits=Limits(body_bytes=20_000, candidates=20))
    client = running.client
    assert client.get("/v2/health/live").status_code == 200
    for path in ("/v2/health/ready", "/v2/models/click", "/v2/models/click/ready"):
        assert client.get(path).status_code == 503
    early = client.post(INFER, json=request_of(ROWS[:1]))
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    assert "neither deployments nor a snapshot" in early.json()["error"]
    new_lineage().deploy(1)
    running.follower.poll()
    for path in ("/v2", "/v2/health/ready", "/v2/models/click/ready"):
        assert client.get(path).status_code == 200
    assert client.post("/v2/models/other/infer", json={}).json() == {"error": "no model 'other'; this server has 'click'"}
    assert client.get("/v2/models/other").status_code == 404
    assert client.get("/elsewhere").status_code == 404
    assert client.get(INFER).status_code == 405
    assert client.post(INFER, content=b"{").json()["error"].startswith("the body isn't JSON")
    assert client.post(INFER, content=b" " * 20_001).status_code == 413
    assert client.post(INFER, content=two_chunks()).status_code == 413
    assert "at most 20" in client.post(INFER, json=request_of(ROWS[:21])).json()["error"]
    assert client.post(INFER, json=request_of(ROWS[:20])).status_code == 200
    text = client.get("/metrics").text
    assert 'tidemill_requests_total{code="200"} 1.0' in text
    assert 'tidemill_requests_total{code="413"} 2.0' in text
    assert 'tidemill_requests_total{code="404"} 1.0' in text
    assert "tidemill_ready 1.0" in text


def test_metadata_lists_what_a_request_needs(serve, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)
    answer = serve().client.get("/v2/models/click").json()
    assert {column["name"] for column in answer["inputs"]} == {"user_id", "item_id", "tags", "clicked", "price"}
    assert [output["name"] for output in answer["outputs"]] == ["logits", "probs"]
    assert answer["parameters"]["sequence"] == 0


def test_a_full_queue_refuses_at_once(serve, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)
    running = serve(capacity=1, scoring=False)
    running.batcher.submit(Job({}, 1, 1e18, lambda answer: None))
    response = running.client.post(INFER, json=request_of(ROWS[:1]))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "waiting already" in response.json()["error"]
    running.batcher.start()


def test_an_answer_that_comes_too_late_is_an_error(serve, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)
    running = serve(limits=Limits(deadline_s=0.05), scoring=False)
    response = running.client.post(INFER, json=request_of(ROWS[:1]))
    assert (response.status_code, response.json()) == (503, {"error": "not scored within 0.05 s"})
    running.batcher.start()


def test_a_body_that_never_ends_is_an_error(serve, new_lineage: LineageMaker) -> None:
    new_lineage().deploy(1)

    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    response = serve(limits=Limits(body_s=0.05)).client.post(INFER, content=stuck())
    assert response.status_code == 408


class _Replies:
    """Collects the replies to jobs, by name."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Exception] = {}
        self._changed = threading.Condition()

    def to(self, name: str) -> Any:
        def reply(answer: Answer | Exception) -> None:
            with self._changed:
                self.answers[name] = answer
                self._changed.notify_all()

        return reply

    def wait(self, count: int) -> dict[str, Answer | Exception]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) == count, 20)
            return self.answers


def test_waiting_jobs_are_scored_together_and_a_bad_one_fails_alone(root: LocalStorage, new_lineage: LineageMaker) -> None:
    lineage = new_lineage()
    predictor = Predictor(load_generation(root, lineage.folder))
    clock = ManualClock()
    metrics = Metrics(clock)
    batcher = Batcher(lambda: predictor, metrics, clock)
    replies = _Replies()
    now = clock.monotonic()
    shared = columns_of([{**row, "user_id": 5, "clicked": "7;8"} for row in ROWS])
    shared |= {name: shared[name].slice(0, 1) for name in ("user_id", "clicked")}
    batcher.submit(Job(shared, 30, now, replies.to("shared")))
    batcher.submit(Job(columns_of(ROWS[:4]), 4, now, replies.to("four")))
    batcher.submit(Job(columns_of([{**ROWS[0], "item_id": 100}]), 1, now, replies.to("bad")))
    batcher.submit(Job(columns_of(ROWS[:1]), 1, now - 1, replies.to("late")))
    batcher.submit(
        Job({**columns_of(ROWS[:2]), "user_id": columns_of(ROWS[:2])["user_id"].cast("string")}, 2, now, replies.to("text"))
    )
    batcher.start()
    answers = replies.wait(5)
    batcher.close()
    expected = {
        "shared": [{**row, "user_id": 5, "clicked": "7;8"} for row in ROWS],
        "four": ROWS[:4],
        "text": ROWS[:2],
    }
    for name, rows in expected.items():
        answer = answers[name]
        assert isinstance(answer, Answer), answer
        assert np.array_equal(answer.scores["logits"], lineage.state.scores(rows))
    assert isinstance(answers["bad"], DataError)
    assert "row 0: value 100" in str(answers["bad"])
    assert isinstance(answers["late"], DeadlineError)
    with pytest.raises(NotReadyError, match="stopping"):
        batcher.submit(Job({}, 1, now, replies.to("closed")))


def test_good_neighbours_share_a_batch(root: LocalStorage, new_lineage: LineageMaker) -> None:
    predictor = Predictor(load_generation(root, new_lineage().folder))
    clock = ManualClock()
    metrics = Metrics(clock)
    batcher = Batcher(lambda: predictor, metrics, clock)
    replies = _Replies()
    for number in range(3):
        batcher.submit(Job(columns_of(ROWS[:10]), 10, clock.monotonic(), replies.to(str(number))))
    batcher.start()
    replies.wait(3)
    batcher.close()
    assert "tidemill_batch_rows_count 1.0" in metrics.text().decode()
    assert "tidemill_batch_rows_sum 30.0" in metrics.text().decode()
