"""Stream trainers in processes of their own, a reader of what they publish, and the proofs that must hold whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tests.e2e.topic import Topic
from tests.e2e.workshop import PIPELINE, Workshop, descendants, eventually, kill
from tidemill.checkpoint.discovery import read_checkpoint
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunRecord
from tidemill.contracts.release import CurrentHint, ReleaseManifest
from tidemill.data.click_world import World, write_day
from tidemill.data.split import SplitId
from tidemill.errors import NotFoundError
from tidemill.jobs.ledger import Ledger, check_ledger, read_steps, trained_positions
from tidemill.jobs.verify import Verification, verify
from tidemill.lineage.records import run_records
from tidemill.serving.generation import Generation, next_generation
from tidemill.serving.loader import LineageFolder, load_snapshot, read_changes
from tidemill.storage.open import open_storage

DAILY, LINEAGE = "daily/20260303", "lineages/20260303"
BOUNDARY = 1_772_582_400.0
"""Where day 1's table of the click world ends."""
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a test says about its streams; the rest is small and quick."""

    batch_size: int = 32
    boundary: float = BOUNDARY
    publish_s: float | None = 0.5
    publish_steps: int | None = None
    message_format: str = "json"
    max_wait_s: float = 0.1
    idle_timeout_s: float = 30.0
    checkpoint_steps: int = 20
    quorum: float = 0.5
    timeout_s: float = 60.0

    def edits(self, topic: Topic, checkpoint: Path) -> dict[str, object]:
        publish = {"interval_s": self.publish_s, "interval_steps": self.publish_steps}
        return {
            "data_config.dataset_type": "KafkaDataset",
            "data_config.batch_size": self.batch_size,
            "data_config.kafka": {
                "brokers": topic.broker.bootstrap,
                "topic": topic.name,
                "message_format": self.message_format,
                "max_wait_s": self.max_wait_s,
                "idle_timeout_s": self.idle_timeout_s,
            },
            "data_config.event_time.max_future_s": 1e10,
            "train_config.fine_tune_checkpoint": str(checkpoint),
            "train_config.lineage.boundary": self.boundary,
            "train_config.publish": {name: value for name, value in publish.items() if value is not None},
            "train_config.save_checkpoints_steps": self.checkpoint_steps,
            "train_config.fold_checkpoints_after": 2,
            "train_config.keep_checkpoint_max": 3,
            "train_config.save_checkpoints_timestamp_quorum": self.quorum,
            "train_config.log_step_count_steps": 5,
            "train_config.handover.report_interval_s": 0.2,
            "train_config.runtime.timeout_s": self.timeout_s,
            "train_config.runtime.threads": 1,
        }


def make_base(workshop: Workshop) -> None:
    """Train the day, and export it: what streams start from."""
    workshop.run("train", str(workshop.config), log="daily")
    edits = json.dumps({"train_config.lineage.boundary": BOUNDARY})
    workshop.run("export", str(workshop.config), f"--export_dir={workshop.root / LINEAGE}", f"--edit_config_json={edits}")


def small_base(folder: Path) -> Workshop:
    """A day of 2,000 rows, trained and exported, in `folder`; made once."""
    config = folder / "pipeline.yaml"
    workshop = Workshop(folder, config, folder)
    if not config.exists():
        write_day(World(7), 1, folder / "day1", 2000, num_files=1)
        config.write_text(PIPELINE.format(data=folder, root=folder / "root"))
        make_base(workshop)
    return workshop


def copy_base(base: Workshop, folder: Path) -> Workshop:
    """A workshop of its own with a copy of what `make_base` made."""
    shutil.copytree(base.root, folder / "root")
    return Workshop(folder, base.config, base.data)


@dataclass(frozen=True, slots=True)
class Stream:
    """One lineage of a workshop and its topic."""

    workshop: Workshop
    topic: Topic
    settings: StreamSettings
    lineage: str = LINEAGE

    @property
    def folder(self) -> Path:
        return self.workshop.root / self.lineage

    @contextmanager
    def trainer(self, *, ranks: int = 1, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen]:
        """A trainer that goes on from the newest checkpoint; killed with all its ranks at the latest when the block ends."""
        edits = json.dumps(self.settings.edits(self.topic, self.workshop.root / DAILY))
        process = self.workshop.tidemill(
            "train",
            str(self.workshop.config),
            f"--model_dir={self.folder}",
            "--continue_train",
            f"--edit_config_json={edits}",
            ranks=ranks,
            log="stream",
            environment=environment,
        )
        try:
            yield process
        finally:
            kill(process)

    def ledger(self) -> Ledger:
        return check_ledger(read_steps(open_storage(self.folder)), self.topic.expected(self.settings.boundary))

    def retired_ledger(self) -> Ledger:
        """The same up to where a lineage stopped in each partition, which must be where its last release does."""
        trained = read_steps(open_storage(self.folder))
        stops = {split: max(entry.rows.stop for entry in entries) for split, entries in trained_positions(trained).items()}
        released = {SplitId(state.kind, state.split): state.intervals for state in self.releases()[-1].splits}
        assert {split: intervals[-1][1] for split, intervals in released.items() if intervals} == stops
        listed = self.topic.expected(self.settings.boundary)
        return check_ledger(trained, {split: rows[rows < stops.get(split, 0)] for split, rows in listed.items()})

    def records(self) -> list[RunRecord]:
        return run_records(open_storage(self.folder))

    def progress(self) -> dict[str, Any]:
        """progress.json; empty if there is none."""
        try:
            return json.loads((self.folder / layout.PROGRESS).read_text())
        except FileNotFoundError:
            return {}

    def releases(self) -> list[ReleaseManifest]:
        found = sorted((self.folder / "releases").glob("*.json"))
        return [ReleaseManifest.parse(path.read_bytes(), where=str(path)) for path in found]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Rank 0's events of one name, of all runs."""
        logs = sorted((self.folder / "runs").glob(f"*/{layout.EVENTS}"))
        lines = [orjson.loads(line) for log in logs for line in log.read_bytes().splitlines()]
        return [line for line in lines if line["event"] == name]

    def await_steps(self, process: subprocess.Popen, *, number: int = 1) -> None:
        """Wait until a trainer has begun so many steps. torchrun's ranks are children of its own."""
        pids = {process.pid, *descendants(process.pid)}

        def enough() -> bool:
            pids.update(descendants(process.pid))
            own = [record.run_id for record in self.records() if record.pid in pids]
            logs = [log for run_id in own for log in (self.folder / layout.run(run_id)).glob("steps-*.jsonl")]
            return any(log.read_bytes().count(b"\n") >= number for log in logs)

        self.await_that(process, enough, f"{number} steps")

    def await_trained(self, process: subprocess.Popen) -> None:
        """Wait until all rows produced so far have entered a step."""
        self.await_that(process, lambda: self.ledger().lost == 0, "all rows to be trained")

    def await_that(self, process: subprocess.Popen, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, while the trainer lives."""
        eventually(
            lambda: condition() or process.poll() is not None, timeout_s=START_TIMEOUT_S, what=f"{what}: {self.log()}", pause_s=0.3
        )
        assert process.poll() is None or condition(), f"{what}: {self.log()}"

    def end(self, process: subprocess.Popen, *, expect: int = 75, timeout_s: float = 60.0) -> None:
        """SIGTERM, and the exit code that follows from it."""
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout_s) == expect, self.log()

    def log(self) -> str:
        return self.workshop.read_log("stream")

    def verify_head(self) -> Verification:
        """Served = trained, key by key: the newest release against the final checkpoint, both of one moment."""
        storage = open_storage(self.folder)
        _, checkpoint = read_checkpoint(storage)
        head = self.releases()[-1]
        assert (head.step, head.run_id) == (checkpoint.step, checkpoint.run_id)
        found = verify(str(self.folder))
        assert found.sequence == head.sequence
        assert found.keys_compared
        assert found.dense_compared
        assert found.is_equal, found
        return found


class ReleaseReader:
    """Follows a lineage's releases as a server does, all the while: each must be whole, and follow the one before."""

    def __init__(self, folder: Path) -> None:
        self._storage = open_storage(folder)
        self._folder = LineageFolder(self._storage, "")
        self._generation: Generation = load_snapshot(self._folder)
        self.positions: list[tuple[int, int]] = []
        self.faults: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="release-reader", daemon=True)

    def __enter__(self) -> ReleaseReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the worker edge: the test shows what was wrong
                self.faults.append(repr(error))
                return

    def _look(self) -> None:
        self._look_at_hint()
        news = read_changes(self._folder, self._generation)
        if news.error is not None:
            raise news.error
        self._generation = next_generation(self._generation, news.changes)
        self.positions += [(change.term, change.sequence) for change in news.changes]

    def _look_at_hint(self) -> None:
        """What the hint names is committed."""
        try:
            hint = CurrentHint.parse(self._storage.read(layout.CURRENT), where=layout.CURRENT)
        except NotFoundError:
            return
        self._storage.read(layout.release(hint.sequence))

    def assert_sound(self, releases: list[ReleaseManifest]) -> None:
        """Nothing torn was seen, nothing was missed, and order never went back."""
        assert not self.faults
        assert self.positions
        committed = [(release.term, release.sequence) for release in releases]
        assert [sequence for _, sequence in committed] == list(range(1, len(committed) + 1))
        assert committed == sorted(set(committed))
        assert self.positions == committed[: len(self.positions)]


def rank_pid(process: subprocess.Popen, rank: int) -> int:
    """The process of one rank below torchrun."""
    for pid in descendants(process.pid):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables:
            return pid
    raise AssertionError(f"no rank {rank} below process {process.pid}")


def is_alive(pid: int) -> bool:
    """Whether a process runs; a dead one whose parent hasn't looked yet doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def stop_process(pid: int) -> None:
    """SIGSTOP, as a machine that hangs would look."""
    os.kill(pid, signal.SIGSTOP)
