"""Two jobs that write one folder: it holds all of one job's output, and the other is refused; never a mix."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.test_output_contracts import age
from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.output import Json, OutputConfig
from tidemill.data.writers.parquet import ParquetOutput
from tidemill.errors import ConfigError, FencedError, StorageError, TidemillError
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.testing.faulty_storage import FaultyStorage, SimulatedCrash
from tidemill.testing.output_contract import rows

WAIT_S = 60.0
OLD, OURS, THEIRS = rows(500, 504), rows(0, 6), rows(100, 109)


class Job:
    """One job that has delivered its rows, a row or two a part, and is about to commit."""

    def __init__(self, storage: Storage, table: pa.Table, *, overwrite: bool = True, clock: ManualClock | None = None) -> None:
        config = OutputConfig(path="unused", overwrite=overwrite)
        self.output = ParquetOutput(config, storage, part_bytes=60, clock=clock or ManualClock())
        self.output.check(table.schema)
        for start in range(0, table.num_rows, 2):
            self.output.write(table.slice(start, 2))
        self.receipts: list[Json] = [self.output.deliver({}, 0)]
        self.error: TidemillError | None = None

    def commit(self) -> None:
        """Commit and end; a refusal is kept."""
        try:
            self.output.commit({}, self.receipts)
        except TidemillError as error:
            self.error = error
        finally:
            self.output.abort()


def held(folder: Path) -> pa.Table | None:
    """What the folder holds, as one that trusts the manifest and one that takes all parts see it; None without `_SUCCESS`."""
    storage = LocalStorage(folder)
    if not storage.list(layout.SUCCESS):
        return None
    manifest = OutputManifest.parse(storage.read(layout.SUCCESS), where=layout.SUCCESS)
    assert [entry.key for entry in manifest.files] == [info.key for info in storage.list("part-")]
    return pa.concat_tables([pq.read_table(folder / entry.key) for entry in manifest.files])


class PausedStorage(FaultyStorage):
    """Stops before operation `number`, from 1, until the other job is done or waits; tells that it has stopped."""

    def __init__(self, inner: Storage, go_on: threading.Event) -> None:
        super().__init__(inner)
        self._go_on = go_on
        self.number = 0
        self.stopped = threading.Event()

    def _operate(self, method, key, call):  # type: ignore[no-untyped-def]
        if len(self.operations) + 1 == self.number:
            self.stopped.set()
            assert self._go_on.wait(WAIT_S)
        return super()._operate(method, key, call)


class WaitingClock(ManualClock):
    """Whoever sleeps by it lets the other job go on to its end."""

    def __init__(self, go_on: threading.Event, ended: threading.Event) -> None:
        super().__init__()
        self._go_on = go_on
        self._ended = ended

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._go_on.set()
        assert self._ended.wait(WAIT_S)


def interleave(folder: Path, number: int, *, overwrite: bool) -> tuple[Job, Job, bool]:
    """Our job is stopped before operation `number` of its commit while their job commits; whether it came that far."""
    go_on, ended = threading.Event(), threading.Event()
    storage = PausedStorage(LocalStorage(folder), go_on)
    ours = Job(storage, OURS, overwrite=overwrite)
    theirs = Job(LocalStorage(folder), THEIRS, overwrite=overwrite, clock=WaitingClock(go_on, ended))
    storage.number = storage.num_operations + number

    def run() -> None:
        ours.commit()
        ended.set()
        storage.stopped.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert storage.stopped.wait(WAIT_S)
        reached = not ended.is_set()
        theirs.commit()
    finally:
        go_on.set()
        thread.join(WAIT_S)
    return ours, theirs, reached


@pytest.mark.parametrize("overwrite", [True, False])
def test_wherever_one_job_is_while_another_commits_the_folder_holds_one_whole(tmp_path: Path, overwrite: bool) -> None:
    outcomes = set()
    for number in range(1, 200):
        folder = tmp_path / str(number)
        if overwrite:
            Job(LocalStorage(folder), OLD).commit()
        ours, theirs, reached = interleave(folder, number, overwrite=overwrite)
        found = held(folder)
        assert found is not None, f"stopped at {number}: {ours.error}, {theirs.error}"
        mine = found.equals(OURS)
        assert mine or found.equals(THEIRS), f"stopped at operation {number}: {found.num_rows} rows"
        assert (ours if mine else theirs).error is None
        if not overwrite:
            # One alone says that it has written.
            assert isinstance((theirs if mine else ours).error, ConfigError | FencedError)
        assert {info.key for info in LocalStorage(folder).list() if not info.key.startswith("part-")} == {"_SUCCESS"}
        outcomes.add((mine, type(ours.error), type(theirs.error)))
        if not reached:
            break
    else:
        raise AssertionError("200 operations, and no end")
    assert (False, FencedError, type(None)) in outcomes


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_killed_commit_is_taken_over_by_the_run_that_is_started_again(tmp_path: Path, overwrite: bool) -> None:
    """Died before storage operation k of the commit, for each k."""
    for number in range(1, 200):
        folder = tmp_path / str(number)
        storage = FaultyStorage(LocalStorage(folder))
        killed = Job(storage, OURS, overwrite=overwrite)
        storage.crash_at(storage.num_operations + number)
        try:
            killed.commit()
            break
        except SimulatedCrash:
            pass
        assert held(folder) is None or held(folder).equals(OURS)
        if not overwrite and any(folder.glob("part-*")):
            with pytest.raises(ConfigError, match="--overwrite"):
                Job(LocalStorage(folder), THEIRS, overwrite=False)
            continue
        again = Job(LocalStorage(folder), THEIRS, overwrite=overwrite)
        again.commit()
        assert again.error is None
        assert held(folder).equals(THEIRS)
    else:
        raise AssertionError("200 operations, and no end")
    assert number > 10


def test_a_job_that_commits_leaves_the_hidden_parts_of_one_that_still_scores(tmp_path: Path) -> None:
    """They were deleted, and the other job's commit then failed after it had deleted the output that was there."""
    scoring, quick = Job(LocalStorage(tmp_path), OURS), Job(LocalStorage(tmp_path), THEIRS)
    quick.commit()
    assert held(tmp_path).equals(THEIRS)
    scoring.commit()
    assert (scoring.error, held(tmp_path).equals(OURS)) == (None, True)
    assert not (tmp_path / "_temporary").exists()


def test_a_job_whose_hidden_parts_have_gone_changes_nothing(tmp_path: Path) -> None:
    """Taken for those of a run that was killed weeks ago."""
    old, quick = Job(LocalStorage(tmp_path), OURS), Job(LocalStorage(tmp_path), THEIRS)
    for path in (tmp_path / "_temporary").rglob("part-*"):
        if any(str(path).endswith(file["key"]) for file in old.receipts[0]["files"]):
            path.touch()
    age(tmp_path, 30 * 86400.0)
    fresh = Job(LocalStorage(tmp_path), THEIRS)
    fresh.commit()
    old.commit()
    quick.commit()
    for job in (old, quick):
        assert isinstance(job.error, StorageError)
        assert "run the job again" in str(job.error)
    assert held(tmp_path).equals(THEIRS)


def test_a_takeover_waits_and_one_without_another_job_does_not(tmp_path: Path) -> None:
    """A holder that lives has done what it was at by then."""
    clock = ManualClock()
    before = clock.monotonic()
    Job(LocalStorage(tmp_path), OURS, clock=clock).commit()
    assert clock.monotonic() == before
    storage = FaultyStorage(LocalStorage(tmp_path))
    killed = Job(storage, OURS)
    storage.crash_at(storage.num_operations + 8)
    with pytest.raises(SimulatedCrash):
        killed.commit()
    Job(LocalStorage(tmp_path), THEIRS, clock=clock).commit()
    assert clock.monotonic() >= before + 30
    assert held(tmp_path).equals(THEIRS)
