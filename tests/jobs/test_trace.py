from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.contracts import layout
from tidemill.contracts.release import ReleaseManifest
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import ConfigError, NotFoundError
from tidemill.jobs.trace import Event, Served, Trace, trace
from tidemill.logs import EventLog
from tidemill.storage.backends.local import LocalStorage

LINEAGE = "lineages/20240102"


@pytest.fixture
def root(lineage: Path) -> Path:
    return lineage.parent.parent


def only(event: str, path: Path, **given: object) -> Trace:
    (found,) = trace(Event.parse(event), str(path), **given)  # type: ignore[arg-type]
    return found


def releases(lineage: Path) -> list[ReleaseManifest]:
    return [ReleaseManifest.parse(path.read_bytes(), where=str(path)) for path in sorted(lineage.glob("releases/*.json"))]


def status(server: str, lineage: str, term: int, sequence: int) -> ServingStatus:
    return ServingStatus(
        server=server,
        url="http://127.0.0.1:1",
        heartbeat=1,
        ready=True,
        deployment=1,
        lineage=lineage,
        snapshot_digest="0" * 64,
        term=term,
        sequence=sequence,
        step=1,
        watermark=None,
        swapped_at=1000.0,
        updated_at=1001.0,
    )


def test_an_event_leads_to_its_step_and_to_the_first_release_that_holds_it(life) -> None:
    found = only("events:0:40", life.lineage)
    assert found.lineage == LINEAGE
    assert [(step.step, step.term, step.survives) for step in found.trained] == [(2, 1, True)]
    first = next(release for release in releases(life.lineage) if release.step > 2)
    assert found.release is not None
    assert (found.release.term, found.release.sequence) == (first.term, first.sequence)
    assert found.release.cut_at <= found.release.committed_at
    assert found.release.run_id == found.trained[0].run_id


def test_an_event_that_a_crash_undid_was_trained_twice_and_survives_once(life) -> None:
    """Step 6 of run 2 was lost with its checkpoint; run 3 trained those rows anew."""
    found = only("events:0:100", life.lineage)
    assert [(step.step, step.term, step.survives) for step in found.trained] == [(6, 2, False), (6, 3, True)]
    assert found.release is not None
    assert found.release.term == 2


def test_what_was_not_trained_yet_has_no_release(life) -> None:
    assert only("events:0:250", life.lineage) == Trace(LINEAGE, (), None, ())


def test_a_row_that_its_message_does_not_have_was_not_trained(life) -> None:
    assert only("events:0:40:1", life.lineage).trained == ()


def test_a_root_shows_all_its_lineages(life) -> None:
    assert only("events:0:40", life.root) == only("events:0:40", life.lineage)


def test_servers_are_told_apart_by_what_they_serve_now(root: Path, lineage: Path) -> None:
    storage = LocalStorage(root)
    newest = releases(lineage)[-1]
    for told in (
        status("behind", LINEAGE, 1, 1),
        status("elsewhere", "lineages/20240101", 9, 99),
        status("fresh", LINEAGE, newest.term, newest.sequence),
    ):
        storage.write(layout.serving_status(told.server), told.to_bytes())
    found = only("events:0:40", lineage).served
    assert [(server.server, server.reflected, server.exact) for server in found] == [
        ("behind", False, False),
        ("elsewhere", False, False),
        ("fresh", True, False),
    ]
    assert found[2].since == 1000.0


@pytest.mark.parametrize("name", [LINEAGE, "20240102"])
def test_a_servers_event_log_tells_when_it_first_reflected_the_event(root: Path, lineage: Path, tmp_path: Path, name: str) -> None:
    events = EventLog(tmp_path / "one.jsonl")
    for term, sequence, at in ((1, 1, 1.0), (3, 8, 2.0), (3, 9, 3.0)):
        events.write("serving.swapped", {"lineage": name, "term": term, "sequence": sequence, "swapped_at": at})
    events.write("serving.load_error", {"error": None})
    events.close()
    found = only("events:0:40", root, server_events=[tmp_path / "one.jsonl"])
    assert found.served == (Served("one", name, 3, 8, 2.0, reflected=True, exact=True),)


@pytest.mark.parametrize(
    "text", ["events", "events:0", "events:x:1", ":0:1", "events:0:1:2:3", "events:0:-1", f"events:0:1:{1 << 20}"]
)
def test_what_names_no_event_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Event.parse(text)


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="neither runs nor lineages"):
        trace(Event.parse("events:0:1"), str(tmp_path))
