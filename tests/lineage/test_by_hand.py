"""Promote, roll back and retire by hand: what is stored decides, mistakes are named, a repeated call changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.lineage import app
from tidemill.clock import ManualClock
from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry
from tidemill.contracts.lineage import RunRecord
from tidemill.contracts.release import ReleaseManifest, Stages
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import DeadlineError, LineageError, RetiredError, TidemillError
from tidemill.lineage.by_hand import newest_good_release, promote, retire_by_hand, roll_back, wait_until_served
from tidemill.lineage.deployments import Pin, deployments
from tidemill.lineage.records import open_lineage, read_lineage, record_key, snapshot_digest
from tidemill.lineage.terms import newest_term, require_unfenced
from tidemill.storage.backends.local import LocalStorage

DAY1, DAY2, DAY3 = "20240101", "20240102", "20240103"


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    """Two lineages; the first with three releases, the second with one."""
    root = LocalStorage(tmp_path / "root")
    for date, count in ((DAY1, 3), (DAY2, 1)):
        root.write(f"{layout.lineage(date)}/snapshot.json", date.encode())
        for sequence in range(1, count + 1):
            write_release(root, date, sequence)
    return root


def write_release(root: LocalStorage, date: str, sequence: int, *, digest: str | None = None) -> None:
    lineage = layout.lineage(date)
    key = f"{layout.segments(2, sequence)}/part.safetensors"
    root.write(f"{lineage}/{key}", b"rows")
    manifest = ReleaseManifest(
        sequence=sequence,
        term=2,
        cut=sequence,
        run_id="r",
        nonce="n",
        snapshot_digest=digest or snapshot_digest(root, lineage),
        step=1,
        examples=1,
        watermark=None,
        segments=[],
        files=[FileEntry(key=key, size=4, sha256="0" * 64)],
        dense=None,
        splits=[],
        stages=Stages(cut_at=0.0, written_at=0.0, gated_at=0.0, committed_at=0.0),
    )
    root.write(f"{lineage}/{layout.release(sequence)}", manifest.to_bytes())


def served(root: LocalStorage) -> list[tuple[int, str, int | None]]:
    return [(d.number, d.lineage.removeprefix("lineages/"), d.pin_sequence) for d in deployments(root)]


def test_a_rollback_goes_to_the_lineage_before_and_repeating_it_changes_nothing(root: LocalStorage) -> None:
    promote(root, DAY1, "first")
    promote(root, DAY2, "second")
    back = roll_back(root, "day 2 is bad")
    assert (back.pin_term, back.pin_sequence, back.reason) == (2, 3, "day 2 is bad")
    write_release(root, DAY1, 4)
    assert roll_back(root, "again") == back, "it doesn't move on with a lineage that trains on"
    assert served(root) == [(1, DAY1, None), (2, DAY2, None), (3, DAY1, 3)]


def test_a_named_date_and_a_named_release(root: LocalStorage) -> None:
    promote(root, DAY2, "first")
    assert roll_back(root, "x", date=DAY2, sequence=0).pin_sequence == 0
    assert roll_back(root, "x", date=DAY1, sequence=2).pin_sequence == 2
    assert roll_back(root, "x", date=DAY1, sequence=2).number == 3
    assert roll_back(root, "x", date=DAY1, sequence=1).number == 4


def test_a_promotion_ends_a_rollback_and_repeating_it_changes_nothing(root: LocalStorage) -> None:
    promote(root, DAY1, "first")
    promote(root, DAY2, "second")
    roll_back(root, "bad")
    again = promote(root, DAY2, "good after all")
    assert (again.number, again.pin_sequence) == (4, None)
    assert promote(root, DAY2, "again") == again
    with pytest.raises(LineageError, match=r"20240102 is deployed .* the older lineages/20240101 can't be: roll back"):
        promote(root, DAY1, "old")


Damage = Callable[[LocalStorage, str], None]
FILE = f"{layout.segments(2, 3)}/part.safetensors"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda r, f: r.write(f"{f}/{layout.release(3)}", b"{"), "not JSON", id="torn manifest"),
        pytest.param(lambda r, f: r.delete(f"{f}/{layout.release(3)}"), "has no release 3; its newest is 2", id="no manifest"),
        pytest.param(lambda r, f: r.delete(f"{f}/{FILE}"), "part.safetensors isn't there", id="no file"),
        pytest.param(lambda r, f: r.write(f"{f}/{FILE}", b"row"), "has 3 bytes, not 4", id="torn file"),
        pytest.param(lambda r, f: write_release(r, DAY1, 3, digest="f" * 64), "builds on snapshot ffff", id="other snapshot"),
    ],
)
def test_a_release_that_cannot_be_loaded_is_passed_over_and_refused_by_name(
    root: LocalStorage, damage: Damage, problem: str
) -> None:
    promote(root, DAY1, "first")
    damage(root, layout.lineage(DAY1))
    with pytest.raises(LineageError, match=problem):
        roll_back(root, "x", date=DAY1, sequence=3)
    assert roll_back(root, "x", date=DAY1).pin_sequence == 2


def test_releases_behind_a_gap_are_out_of_reach(root: LocalStorage) -> None:
    root.delete(f"{layout.lineage(DAY1)}/{layout.release(1)}")
    assert newest_good_release(root, layout.lineage(DAY1)) == Pin(0, 0)


def test_nothing_to_roll_back_to(root: LocalStorage) -> None:
    with pytest.raises(LineageError, match="no earlier lineage was deployed"):
        roll_back(root, "x")
    promote(root, DAY1, "first")
    with pytest.raises(LineageError, match="no earlier lineage was deployed"):
        roll_back(root, "x")
    with pytest.raises(LineageError, match="20240103 has no snapshot; lineages of this root: 20240101, 20240102"):
        roll_back(root, "x", date=DAY3)
    with pytest.raises(LineageError, match="20240103 has no snapshot"):
        promote(root, DAY3, "x")
    assert served(root) == [(1, DAY1, None)]


def run_record(root: LocalStorage, date: str, heartbeat: int, *, ended: bool = False) -> None:
    record = RunRecord(
        run_id="r",
        kind="train_stream",
        status="failed" if ended else "running",
        started_at=0.0,
        ended_at=1.0 if ended else None,
        heartbeat=heartbeat,
    )
    root.write(f"{layout.lineage(date)}/{record_key('r')}", record.to_bytes())


def test_retiring_is_for_good_and_fences_a_stalled_run(root: LocalStorage) -> None:
    folder = LocalStorage(root.root / layout.lineage(DAY1))
    open_lineage(folder, DAY1, 5.0)
    run_record(root, DAY1, 7)
    promote(root, DAY2, "x")
    record = retire_by_hand(root, DAY1, clock=ManualClock())
    assert (record.status, record.successor, record.last_sequence) == ("retired", "lineages/20240102", 3)
    assert newest_term(folder) == 1
    with pytest.raises(TidemillError, match="term 1 has taken over"):
        require_unfenced(folder, 0)
    with pytest.raises(RetiredError):
        open_lineage(folder, DAY1, 5.0)
    assert retire_by_hand(root, DAY1) == record
    assert newest_term(folder) == 1


def test_a_lineage_that_is_trained_does_not_retire(root: LocalStorage) -> None:
    class Beating(ManualClock):
        """While the watcher sleeps, the run's heart beats."""

        def sleep(self, seconds: float) -> None:
            run_record(root, DAY1, 8)
            super().sleep(seconds)

    run_record(root, DAY1, 7)
    with pytest.raises(LineageError, match="run r trains lineages/20240101: stop it first"):
        retire_by_hand(root, DAY1, clock=Beating())
    assert read_lineage(root, prefix=layout.lineage(DAY1)) is None


def test_the_lineage_that_is_followed_does_not_retire(root: LocalStorage) -> None:
    run_record(root, DAY1, 1, ended=True)
    promote(root, DAY1, "x")
    with pytest.raises(LineageError, match="is served and followed"):
        retire_by_hand(root, DAY1)
    roll_back(root, "frozen", date=DAY1)
    assert retire_by_hand(root, DAY1).successor is None, "what is pinned is served on"
    with pytest.raises(LineageError, match="there is no lineages/20240103; lineages of this root: 20240101, 20240102"):
        retire_by_hand(root, DAY3)


def say(root: LocalStorage, server: str, deployment: int, heartbeat: int, *, error: str | None = None) -> None:
    status = ServingStatus(
        server=server,
        url="u",
        heartbeat=heartbeat,
        ready=True,
        deployment=deployment,
        lineage="lineages/20240101",
        snapshot_digest=None,
        term=2,
        sequence=3,
        step=None,
        watermark=None,
        swapped_at=None,
        error=error,
        updated_at=0.0,
    )
    root.write(layout.serving_status(server), status.to_bytes())


class Fleet(ManualClock):
    """While somebody waits, server a follows at its third beat, b never does, c is dead."""

    def __init__(self, root: LocalStorage, names: str) -> None:
        super().__init__()
        self.root, self.names, self.beats = root, names, 0
        say(root, "c", 1, 1)

    def sleep(self, seconds: float) -> None:
        self.beats += 1
        for name in self.names:
            say(self.root, name, 2 if name == "a" and self.beats > 2 else 1, self.beats, error="torn" if name == "b" else None)
        super().sleep(seconds)


def test_waiting_for_the_servers(root: LocalStorage) -> None:
    assert wait_until_served(root, 2, 60.0, clock=Fleet(root, "a")) == ["a"]
    with pytest.raises(DeadlineError, match=r"deployment 2 isn't served by all after 60 s: b \(torn\)"):
        wait_until_served(root, 2, 60.0, clock=Fleet(root, "ab"))


def test_waiting_without_servers_says_so(root: LocalStorage) -> None:
    with pytest.raises(DeadlineError, match="no live server"):
        wait_until_served(root, 1, 0.0, clock=ManualClock())


def lineage_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands(root: LocalStorage) -> None:
    path = root.root
    assert lineage_command("show", path).output.splitlines() == [
        "lineages/20240101  new      never deployed, release 3",
        "lineages/20240102  new      never deployed, release 1",
        "nothing is deployed",
    ]
    assert (
        lineage_command("promote", path, "--date", DAY1).output
        == "deployment 1: lineages/20240101, deployed because: promoted by hand\n"
    )
    lineage_command("promote", path, "--date", DAY2)
    result = lineage_command("rollback", path, "--reason", "AUC fell")
    assert result.output == "deployment 3: lineages/20240101, pinned to release 3, deployed because: AUC fell\n"
    assert lineage_command("retire", path, "--date", DAY2).output == "lineages/20240102 has retired, last release 1\n"
    say(root, "a", 3, 1)
    run_record(root, DAY1, 1, ended=True)
    assert lineage_command("show", path).output.splitlines() == [
        "lineages/20240101  new      deployed, release 3, run r failed",
        "lineages/20240102  retired  deployed, release 1, by hand",
        "deployment 3: lineages/20240101, pinned to release 3, deployed because: AUC fell",
        "server a: lineages/20240101 release 3",
    ]


def test_scripts_can_require_a_retirement(root: LocalStorage) -> None:
    """A20: a hand-over is told from any other normal exit."""
    result = lineage_command("show", root.root, "--date", DAY1, "--require-retired")
    assert isinstance(result.exception, LineageError)
    assert "the lineage of 20240101 has not retired" in str(result.exception)
    retire_by_hand(root, DAY1)
    assert lineage_command("show", root.root, "--date", DAY1, "--require-retired").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "ROOT", "--require-retired"], "needs --date"),
        (["show", "ROOT", "--date", DAY3], "there is no lineage of 20240103"),
        (["promote", "ROOT", "--date", "2024-01-01"], "write YYYYMMDD"),
        (["rollback", "ROOT", "--date", DAY1, "--release", "9"], "has no release 9; its newest is 3"),
        (["retire", "ROOT", "--date", "1"], "write YYYYMMDD"),
    ],
)
def test_mistakes_are_named(root: LocalStorage, arguments: list[str], message: str) -> None:
    error = lineage_command(*[str(root.root) if argument == "ROOT" else argument for argument in arguments]).exception
    assert isinstance(error, TidemillError)
    assert message in str(error)
    assert not deployments(root)


def test_racing_rollbacks_make_one_deployment_each_at_most(root: LocalStorage) -> None:
    promote(root, DAY1, "first")
    promote(root, DAY2, "second")
    threads = [threading.Thread(target=roll_back, args=(root, "panic")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert served(root)[2:] == [(3, DAY1, 3)]
