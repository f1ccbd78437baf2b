"""A cycle with real processes: a supervisor on its schedule, a topic, tables, two servers and their clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import yaml
from confluent_kafka import Consumer, TopicPartition

from tests.chaos.cycle_age import EventClock, Generation
from tests.chaos.cycle_clients import Clients
from tests.chaos.cycle_process import STORY, write_number
from tests.e2e.stream import BOUNDARY, Stream, StreamSettings
from tests.e2e.topic import Topic
from tests.e2e.workshop import PIPELINE, Workshop, eventually, kill
from tidemill.contracts import layout
from tidemill.contracts.lineage import Deployment
from tidemill.contracts.serving import ServingStatus
from tidemill.data.click_world import SCHEMA, World, write_day
from tidemill.demo.table import write_table
from tidemill.testing.broker import DevelopmentBroker

DATES = ("20260303", "20260304", "20260305")
DAY_S = 120.0
"""Event time from one boundary to the next."""
SPEED = 4.0
ROWS_PER_S = 60.0
REQUESTS_PER_S = 10.0
SERVERS = ("a", "b")
PUBLISH_S, POLL_S = 1.0, 0.25
TOLERANCE_S = 2.0
"""Event time by which a successor may trail."""
WAIT_S = 400.0
"""For whatever must happen some time; a machine that others load is slow."""
BOUNDARIES = {date: BOUNDARY + number * DAY_S for number, date in enumerate(DATES)}


@dataclass(slots=True)
class CycleWorld:
    """One story's machine. Leaving the block kills every process that carries the story's name, whoever its parent is."""

    folder: Path
    broker: DevelopmentBroker
    topic: Topic
    two_ranks: str
    """The date whose stream has two ranks."""
    clock: EventClock | None = None
    supervisor: subprocess.Popen | None = None
    servers: dict[str, subprocess.Popen] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    told: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.time)

    def __enter__(self) -> CycleWorld:
        self.folder.mkdir(parents=True)
        self._write_configs()
        write_number(self.folder / f"ranks-train-lineages-{self.two_ranks}", 2)
        write_day(World(7), 1, self.table(DATES[0]), 2000, num_files=1)
        (self.table(DATES[0]) / "_SUCCESS").touch()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stack.close()
        finally:
            for pid in self._own_processes():
                _signal(pid, signal.SIGKILL)
            for process in [self.supervisor, *self.servers.values()]:
                if process is not None:
                    kill(process)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def tell(self, what: str) -> None:
        self.told.append(f"{time.time() - self._began:6.1f} s  {what}")

    def table(self, date: str) -> Path:
        return self.folder / "tables" / date

    def stream(self, date: str) -> Stream:
        """A date's lineage, to look at."""
        workshop = Workshop(self.folder, self.folder / "pipeline.yaml", self.folder)
        return Stream(workshop, self.topic, _settings(date), layout.lineage(date))

    # Processes

    def start(self) -> None:
        """The supervisor, and the servers; returns when both serve the first day."""
        self.make_due(DATES[0])
        self.start_supervisor()
        for name in SERVERS:
            self.start_server(name)
        self.wait_until(lambda: self.serve(DATES[0]), "the first day to be served")
        self.wait_until(lambda: bool(self.stream(DATES[0]).progress() or self.stream(DATES[0]).records()), "the first stream")

    def start_supervisor(self) -> None:
        self.supervisor = self._start("supervisor", "cycle", "run", str(self.folder / "cycle.yaml"))

    def start_server(self, name: str) -> None:
        self.port_file(name).unlink(missing_ok=True)
        options = ["--port=0", f"--port-file={self.port_file(name)}", f"--server-name={name}", f"--poll-interval={POLL_S}"]
        options += [
            "--model-name=clicks",
            "--torch-threads=1",
            "--deadline=20",
            f"--events={self.folder / f'serving-{name}.jsonl'}",
        ]
        self.servers[name] = self._start(f"serve-{name}", "serve", str(self.root), *options)

    def port_file(self, name: str) -> Path:
        return self.folder / f"port-{name}"

    def trainers(self, date: str) -> list[int]:
        """All processes of a date's stream: torchrun and its ranks, or the one."""
        mark = f"--model_dir={self.root / layout.lineage(date)}\0".encode()
        return [pid for pid in self._own_processes() if mark in _read(pid, "cmdline")]

    def kill_trainers(self, date: str) -> float:
        """SIGKILL to all of them; when."""
        at = time.time()
        for pid in self.trainers(date):
            _signal(pid, signal.SIGKILL)
        self.tell(f"SIGKILL to the stream of {date}")
        return at

    def _start(self, name: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.chaos.cycle_process", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", STORY: str(self.folder)}
        with (self.folder / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                # So that all find this very package, and the tests.
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )

    def _own_processes(self) -> list[int]:
        mark = f"{STORY}={self.folder}\0".encode()
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if mark in _read(int(path.name), "environ")]

    # Days

    def begin_play(self) -> Clients:
        """Rows from the first boundary on, and requests, all until the block ends."""
        clients = self.stack.enter_context(Clients({name: self.port_file(name) for name in SERVERS}, REQUESTS_PER_S))
        self.clock = EventClock(time.time(), BOUNDARY, SPEED)
        self.stack.enter_context(self.topic.feeding(ROWS_PER_S, BOUNDARY, speed=SPEED))
        self.tell("events and requests begin")
        return clients

    def end_day(self, date: str) -> None:
        """Wait for a date's end in event time, then write its table from what the topic holds. The date isn't due yet."""
        clock, last = self.clock, BOUNDARIES[date]
        assert clock is not None
        # Half a second more: what the feeder sends late.
        self.wait_until(lambda: time.time() > clock.wall(last) + 0.5, f"the end of {date}")
        write_table(_read_topic(self.topic), (last - DAY_S, last), self.table(date))
        (self.table(date) / "_SUCCESS").touch()
        self.tell(f"the table of {date} is complete")

    def make_due(self, date: str) -> None:
        """Turn the supervisor's clock, which is that of the simulated days, to where its schedule starts a date."""
        # From there it goes as fast as ours: a later date is due after minutes, and waits for its table then.
        write_number(self.folder / "clock-cycle", BOUNDARIES[date] + 1.0 - time.time())

    # What is seen

    def wait_until(self, condition: Callable[[], bool], what: str, *, pause_s: float = 0.2) -> None:
        """Wait, while the supervisor lives."""

        def done() -> bool:
            assert self.supervisor is None or self.supervisor.poll() is None, f"the supervisor ended while waiting for {what}"
            return condition()

        eventually(done, timeout_s=WAIT_S, what=what, pause_s=pause_s)

    def serve(self, date: str) -> bool:
        """Whether all servers say that they serve a date's lineage."""
        found = {name: _parse(self.root / "serving" / f"{name}.json", ServingStatus.parse) for name in SERVERS}
        return all(status is not None and status.ready and status.lineage == layout.lineage(date) for status in found.values())

    def is_retired(self, date: str) -> bool:
        """Whether a date's lineage has retired."""
        record = self.root / layout.lineage(date) / "lineage.json"
        return record.exists() and json.loads(record.read_bytes())["status"] == "retired"

    def deployments(self) -> list[tuple[Deployment, float]]:
        """In order, and when each was written, by the file system's clock: the supervisor's is that of the days."""
        paths = sorted((self.root / "deployments").glob("*.json"))
        return [(Deployment.parse(path.read_bytes(), where=str(path)), path.stat().st_mtime) for path in paths]

    def watermarks(self) -> dict[Generation, float]:
        """What each generation has reached; a snapshot, and a release that has no event time yet, its boundary."""
        found: dict[Generation, float] = {}
        for date in DATES:
            stream, lineage = self.stream(date), layout.lineage(date)
            found[lineage, 0, 0] = BOUNDARIES[date]
            for release in stream.releases():
                found[lineage, release.term, release.sequence] = (
                    BOUNDARIES[date] if release.watermark is None else release.watermark
                )
        return found

    def logs(self) -> str:
        """The last lines of every process."""
        paths = [*sorted(self.folder.glob("*.log")), *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def _write_configs(self) -> None:
        pipeline = PIPELINE.format(data=self.folder, root=self.root)
        (self.folder / "pipeline.yaml").write_text(pipeline)
        (self.folder / "cycle.yaml").write_text(yaml.safe_dump(_cycle(self.topic), sort_keys=False))


def _settings(date: str) -> StreamSettings:
    return StreamSettings(boundary=BOUNDARIES[date], publish_s=PUBLISH_S, checkpoint_steps=20)


def _cycle(topic: Topic) -> dict[str, Any]:
    edits = _settings(DATES[0]).edits(topic, Path())
    # What the cycle says itself.
    for path in ("train_config.fine_tune_checkpoint", "train_config.lineage.boundary", "train_config.handover.report_interval_s"):
        del edits[path]
    return {
        "root": "root",
        "pipeline_config": "pipeline.yaml",
        "logs": "logs",
        "launcher": [sys.executable, "-m", "tests.chaos.cycle_process"],
        "daily": {
            "input_path": "tables/${bizdate}/*.parquet",
            "complete": {"marker": "tables/${bizdate}/_SUCCESS", "wait_s": WAIT_S},
            "edits": {"data_config.event_time.max_future_s": 1e10},
        },
        "stream": {"input_path": f"kafka://{topic.broker.bootstrap}/{topic.name}?group.id=stream-${{bizdate}}", "edits": edits},
        "boundary": {"times": BOUNDARIES},
        "handover": {"policy": "served", "tolerance_s": TOLERANCE_S, "report_interval_s": 0.2, "liveness_s": 20.0},
        "serving": {"model_name": "clicks"},
        "limits": {"stop_s": 60.0},
        "schedule": {"cron": "* * * * *", "first_date": DATES[0], "retry_s": 1.0},
    }


def _read_topic(topic: Topic) -> pa.Table:
    """All rows, as whoever writes a day's table finds them."""
    ends = topic.ends
    settings = {"bootstrap.servers": topic.broker.bootstrap, "group.id": "tables", "enable.auto.commit": False}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest", "log_level": 0})
    try:
        consumer.assign([TopicPartition(topic.name, partition, 0) for partition in range(topic.partitions)])
        rows: list[dict[str, Any]] = []
        until = time.monotonic() + WAIT_S
        while len(rows) < sum(ends.values()):
            assert time.monotonic() < until, f"{len(rows)} rows of {ends}"
            rows += [orjson.loads(message.value()) for message in consumer.consume(1000, 1.0) if message.error() is None]
    finally:
        consumer.close()
    return pa.Table.from_pylist(rows, SCHEMA)


def rows_of_day(topic: Topic, date: str) -> int:
    """How many rows the producer lists for a date's table."""
    first, last = (
        {split: len(rows) for split, rows in topic.expected(at).items()} for at in (BOUNDARIES[date] - DAY_S, BOUNDARIES[date])
    )
    return sum(first.values()) - sum(last.values())


def _parse(path: Path, parse: Callable[..., Any]) -> Any:
    try:
        return parse(path.read_bytes(), where=str(path))
    except FileNotFoundError:
        return None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
