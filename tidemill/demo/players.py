"""The click world's users, in a process of their own: they ask the server, see, click, and their outcomes go to the topic.

`python -m tidemill.demo.players FOLDER` reads FOLDER/options.json, waits until the server is ready, and plays until SIGTERM.
Requests are sent by the clock, whether or not earlier ones have been answered, so a slow server shows as latency or failures,
never as fewer requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import uvloop
from confluent_kafka import KafkaError, Message, Producer

from tidemill import logs
from tidemill.data.click_world import SCHEMA, Histories, Impressions, World
from tidemill.demo.client import Client, HttpError
from tidemill.demo.plan import demo_world
from tidemill.demo.playlog import (
    IMPRESSIONS,
    OPTIONS,
    REQUEST_SCHEMA,
    REQUESTS,
    ArrowLog,
    PlayStatus,
    impression_schema,
    write_status,
)

_READY_TIMEOUT_S = 120.0
_FLUSH_TIMEOUT_S = 20.0
_STATUS_S = 0.5
_POLL_S = 0.02
_RECENT = 400
INPUT_TYPES = {pa.string(): "BYTES", pa.int64(): "INT64", pa.float64(): "FP64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What any players need to know: whom they ask how often, and where their outcomes go."""

    url: str
    model: str
    bootstrap: str
    topic: str
    requests_per_s: float
    timeout_s: float = 30.0
    """A slow answer is not a failed one: latency is reported as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions(LoadOptions):
    """What the click world's users need to know. `day`: the day of the click world that they begin."""

    seed: int
    day: int
    speed: float
    candidates: int
    best_shown: int


AskT = TypeVar("AskT")


class Audience(Protocol[AskT]):
    """Those who ask. Requests are numbered from 0; all methods are called on one thread."""

    schema: pa.Schema
    """Of the rows."""

    def event_time(self, number: int) -> float | None:
        """When a request is sent, in event time, never decreasing; None: there are no more."""

    def ask(self, number: int) -> AskT:
        """What is asked, and what is remembered of it until the answer comes."""

    def body(self, ask: AskT) -> bytes:
        """The request's body."""

    def see(self, ask: AskT, scores: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray]:
        """What comes of the answer: rows as they go to the topic, with a `user_id`, and the scores that the server gave them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One user who asks for items at an event time. The first `best_shown` candidates are those that will be shown at random."""

    number: int
    event_time: float
    user: int
    items: np.ndarray
    click_seq: pa.StringArray


class Crowd:
    """The users: who asks when, what they are shown, and whether they click. Everything random comes from one seed."""

    schema = SCHEMA

    def __init__(self, world: World, options: PlayOptions) -> None:
        self._world = world
        self._options = options
        self._rng = np.random.default_rng([options.seed, 7])
        self._histories: Histories = world.histories(options.day)

    def event_time(self, number: int) -> float:
        """By the clock, without an end."""
        return self._world.day_start(self._options.day) + number / self._options.requests_per_s * self._options.speed

    def ask(self, number: int) -> Ask:
        """The next user, with fresh features and candidates drawn evenly from the items alive."""
        event_time = self.event_time(number)
        user = int(self._rng.integers(self._world.config.num_users))
        items = self._rng.choice(self._world.alive_items(event_time), self._options.candidates, replace=False)
        return Ask(number, event_time, user, items, self._histories.get(np.array([user])))

    def body(self, ask: Ask) -> bytes:
        """The request: user columns of one row that stand for all candidates."""
        columns = self._world.user_columns(np.array([ask.user]), ask.event_time, ask.click_seq) | self._world.item_columns(
            ask.items
        )
        inputs = [
            {"name": name, "shape": [len(column)], "datatype": INPUT_TYPES[column.type], "data": column.to_pylist()}
            for name, column in columns.items()
        ]
        return orjson.dumps({"inputs": inputs})

    def see(self, ask: Ask, scores: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray]:
        """Show the best candidates and as many random ones, shuffled; rows as they go to the topic, and their scores.

        The random ones are drawn before anything is scored, and left out of the ranking: which rows are flagged `is_random` does
        not depend on any model.
        """
        shown = self._options.best_shown
        best = shown + np.argsort(-scores[shown:], kind="stable")[:shown]
        places = self._rng.permutation(np.concatenate([np.arange(shown), best]))
        users = np.full(len(places), ask.user)
        times = np.full(len(places), ask.event_time)
        impressions: Impressions = self._world.show(users, ask.items[places], times, self._rng)
        clicked = impressions.clicks
        self._histories.update(users[clicked], impressions.items[clicked])
        event_ids = pa.array([f"{ask.number:07d}-{slot:02d}" for slot in range(len(places))])
        histories = ask.click_seq.take(pa.array(np.zeros(len(places), np.int64)))
        rows = self._world.rows(event_ids, impressions, histories, (places < shown).astype(np.int8))
        return rows, scores[places]


class Play(Generic[AskT]):
    """Requests by the clock, outcomes to Kafka, and the logs of both. Runs on one event loop."""

    def __init__(self, folder: Path, options: LoadOptions, audience: Audience[AskT]) -> None:
        self._folder = folder
        self._options = options
        self._audience = audience
        self._producer = Producer(
            {"bootstrap.servers": options.bootstrap, "linger.ms": 20, "acks": "all", "enable.idempotence": True}
        )
        self._impressions = ArrowLog(folder / IMPRESSIONS, impression_schema(audience.schema))
        self._requests = ArrowLog(folder / REQUESTS, REQUEST_SCHEMA)
        self._delivered: list[dict[str, object]] = []
        self._answered: list[dict[str, object]] = []
        # Request -> event time, from its sending until the last of its impressions is in `_delivered`.
        self._open: dict[int, float] = {}
        self._next_event_time = audience.event_time(0)
        self._event_time = self._next_event_time
        self._latencies: list[float] = []
        self._counts = {"requests": 0, "failed": 0, "impressions": 0, "undelivered": 0}
        self._last_error: str | None = None
        self._started_at: float | None = None
        self._fault: BaseException | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Play until stopped; then settle what is in flight and close the logs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        client = Client(self._options.url, self._options.timeout_s)
        if not await self._await_server(client):
            return
        status = asyncio.create_task(self._write_status())
        poll = asyncio.create_task(self._poll())
        await self._send_all(client)
        await self._settle()
        for task in (status, poll):
            task.cancel()
        await client.close()
        self._flush_logs()
        self._impressions.close()
        self._requests.close()
        if self._fault is not None:
            raise self._fault

    async def _await_server(self, client: Client) -> bool:
        until = time.monotonic() + _READY_TIMEOUT_S
        while not self._stopping.is_set():
            try:
                if (await client.request("GET", "/v2/health/ready"))[0] == 200:
                    return True
            except HttpError as error:
                logs.log.info("the server isn't there yet: %s", error)
            if time.monotonic() > until:
                raise SystemExit(f"the server at {self._options.url} wasn't ready within {_READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.1)
        return False

    async def _send_all(self, client: Client) -> None:
        self._started_at = time.time()
        started = time.monotonic()
        asking: set[asyncio.Task[None]] = set()
        number = 0
        while not self._stopping.is_set():
            # By the schedule's time, not by when this loop got to it: what lags behind is sent at once, at its own event time.
            due = number / self._options.requests_per_s
            wait = started + due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            event_time = self._audience.event_time(number)
            if event_time is None:
                break
            self._open[number] = event_time
            task = asyncio.create_task(self._one(client, number, event_time))
            asking.add(task)
            task.add_done_callback(asking.discard)
            task.add_done_callback(self._end_on_fault)
            number += 1
            self._next_event_time = self._audience.event_time(number)
            await asyncio.sleep(0)
        if asking:
            await asyncio.wait(asking, timeout=self._options.timeout_s)

    def _end_on_fault(self, task: asyncio.Task[None]) -> None:
        """A fault of ours, not of the server: end the play, and with an error."""
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self._stopping.set()

    async def _settle(self) -> None:
        """Wait until the broker has acknowledged everything."""
        until = time.monotonic() + _FLUSH_TIMEOUT_S
        while len(self._producer) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        if len(self._producer):
            self._counts["undelivered"] += len(self._producer)
            self._last_error = f"the broker hasn't acknowledged {len(self._producer)} impressions within {_FLUSH_TIMEOUT_S:.0f} s"

    async def _one(self, client: Client, number: int, event_time: float) -> None:
        ask = self._audience.ask(number)
        body = self._audience.body(ask)
        sent_at, sent = time.time(), time.perf_counter()
        status, error, answer = await self._post(client, body)
        latency = time.perf_counter() - sent
        generation = answer.get("parameters", {})
        self._answered.append(
            {
                "request": number,
                "event_time": event_time,
                "sent_at": sent_at,
                "latency_s": latency,
                "status": status,
                "error": error,
                "lineage": generation.get("lineage"),
                "term": generation.get("term"),
                "sequence": generation.get("sequence"),
            }
        )
        self._counts["requests"] += 1
        self._latencies = [*self._latencies[-_RECENT:], latency]
        if error is not None:
            self._counts["failed"] += 1
            self._last_error = error
            self._open.pop(number)
            return
        rows, scores = self._audience.see(ask, np.asarray(answer["outputs"][0]["data"]))
        self._produce(number, rows, scores)

    async def _post(self, client: Client, body: bytes) -> tuple[int, str | None, dict[str, Any]]:
        try:
            status, answer = await client.request("POST", f"/v2/models/{self._options.model}/infer", body)
        except HttpError as error:
            return 0, str(error), {}
        if status != 200:
            return status, f"{status}: {answer.decode(errors='replace'):.200}", {}
        return 200, None, orjson.loads(answer)

    def _produce(self, number: int, rows: pa.RecordBatch, scores: np.ndarray) -> None:
        remaining = [rows.num_rows]
        for row, score in zip(rows.to_pylist(), scores.tolist(), strict=True):
            entry = {**row, "request": number, "served_score": score, "produced_at": time.time()}

            def delivered(error: KafkaError | None, message: Message, entry: dict[str, object] = entry) -> None:
                remaining[0] -= 1
                if error is not None:
                    self._counts["undelivered"] += 1
                    self._last_error = str(error)
                else:
                    self._counts["impressions"] += 1
                    entry |= {"partition": message.partition(), "offset": message.offset(), "delivered_at": time.time()}
                    self._delivered.append(entry)
                if not remaining[0]:
                    self._open.pop(number)

            self._producer.produce(self._options.topic, orjson.dumps(row), key=row["user_id"].encode(), on_delivery=delivered)

    async def _poll(self) -> None:
        while True:
            self._producer.poll(0)
            await asyncio.sleep(_POLL_S)

    async def _write_status(self) -> None:
        while True:
            self._flush_logs()
            await asyncio.sleep(_STATUS_S)

    def _flush_logs(self) -> None:
        """Write the logs, then the status: what it says to be complete can be read."""
        assert self._started_at is not None
        # Behind the last request there is nothing that could still come.
        next_time = math.inf if self._next_event_time is None else self._next_event_time
        complete_until = min([next_time, *self._open.values()])
        self._event_time = self._event_time if self._next_event_time is None else self._next_event_time
        delivered, self._delivered = self._delivered, []
        answered, self._answered = self._answered, []
        self._impressions.append(delivered)
        self._requests.append(answered)
        recent = np.array(self._latencies) if self._latencies else None
        write_status(
            self._folder,
            PlayStatus(
                started_at=self._started_at,
                event_time=self._event_time,
                complete_until=complete_until,
                last_error=self._last_error,
                latency_p50_s=None if recent is None else float(np.quantile(recent, 0.5)),
                latency_p99_s=None if recent is None else float(np.quantile(recent, 0.99)),
                **self._counts,
            ),
        )


def main() -> None:
    """Play in the folder that the command line names."""
    logs.set_up()
    folder = Path(sys.argv[1])
    options = PlayOptions(**json.loads((folder / OPTIONS).read_text(encoding="utf-8")))

    async def play() -> None:
        await Play(folder, options, Crowd(demo_world(options.seed), options)).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


if __name__ == "__main__":
    main()
