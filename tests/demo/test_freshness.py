from __future__ import annotations

import pyarrow as pa
import pytest

from tests.demo.conftest import RootWriter, impressions, kafka_run
from tidemill.demo.freshness import STAGES, measure
from tidemill.demo.playlog import REQUEST_SCHEMA

OLD, NEW = "lineages/20260302", "lineages/20260303"


def answers(*rows: tuple[float, str, int]) -> pa.Table:
    """(answered at, lineage, sequence)"""
    fields = [
        {
            "request": n,
            "event_time": 0.0,
            "sent_at": at - 0.01,
            "latency_s": 0.01,
            "status": 200,
            "lineage": lineage,
            "term": 1,
            "sequence": seq,
        }
        for n, (at, lineage, seq) in enumerate(rows)
    ]
    return pa.Table.from_pylist(fields, REQUEST_SCHEMA)


def event(offset: int, produced_at: float, *, partition: int = 0) -> dict[str, object]:
    return {
        "partition": partition,
        "offset": offset,
        "produced_at": produced_at,
        "delivered_at": produced_at + 0.05,
        "event_time": 1.0,
    }


def test_each_stage_ends_where_the_documents_say(root: RootWriter) -> None:
    root.steps(OLD, "run1", 1, [(0, 10.2, [kafka_run(0, 0, 2)]), (1, 10.5, [kafka_run(0, 2, 2)])])
    root.release(OLD, 1, {0: 2}, 11.0)
    swaps = [{"lineage": OLD, "sequence": 1, "found_at": 11.5}]
    found = measure(root.storage, [OLD], impressions(event(0, 10.0)), answers((11.2, OLD, 0), (12.0, OLD, 1)), swaps)
    assert found.total_s.tolist() == [pytest.approx(2.0)]
    assert {name: found.stages[name].tolist() for name in STAGES} == {
        "queue": [pytest.approx(0.05)],
        "batch": [pytest.approx(0.15)],
        "train": [pytest.approx(0.3)],
        "cut": [pytest.approx(0.5)],
        "write": [pytest.approx(0.1)],
        "gate": [pytest.approx(0.2)],
        "poll": [pytest.approx(0.2)],
        "swap": [pytest.approx(0.5)],
    }


def test_an_event_is_served_by_the_first_answer_of_its_release_or_a_later_one(root: RootWriter) -> None:
    root.steps(OLD, "run1", 1, [(0, 10.2, [kafka_run(0, 0, 3), kafka_run(1, 0, 1)]), (1, 10.5, [kafka_run(0, 3, 1)])])
    root.release(OLD, 1, {0: 2, 1: 1}, 10.4)
    root.release(OLD, 2, {0: 3, 1: 1}, 11.0)
    root.release(OLD, 3, {0: 4, 1: 1}, 12.0)
    rows = impressions(event(0, 10.0), event(2, 10.0), event(3, 10.0), event(0, 10.0, partition=1))
    found = measure(root.storage, [OLD], rows, answers((13.0, OLD, 2), (14.0, OLD, 1), (15.0, OLD, 3)), [])
    assert found.total_s.tolist() == pytest.approx([3.0, 3.0, 5.0, 3.0])
    assert found.not_served == 0


def test_the_lineage_that_is_served_first_counts(root: RootWriter) -> None:
    for lineage, cut_at in ((OLD, 11.0), (NEW, 20.0)):
        root.steps(lineage, f"run-{lineage[-1]}", 1, [(0, cut_at - 0.5, [kafka_run(0, 0, 2)])])
        root.release(lineage, 1, {0: 2}, cut_at)
    rows = impressions(event(0, 10.0), event(1, 10.0))
    found = measure(root.storage, [OLD, NEW], rows, answers((12.0, OLD, 1), (21.0, NEW, 1)), [])
    assert found.total_s.tolist() == pytest.approx([2.0, 2.0])
    only_new = measure(root.storage, [OLD, NEW], rows, answers((12.0, OLD, 0), (21.0, NEW, 1)), [])
    assert only_new.total_s.tolist() == pytest.approx([11.0, 11.0])


def test_what_no_answer_reflects_is_counted_apart(root: RootWriter) -> None:
    root.steps(OLD, "run1", 1, [(0, 10.2, [kafka_run(0, 0, 2)])])
    root.release(OLD, 1, {0: 1}, 11.0)
    found = measure(root.storage, [OLD, NEW], impressions(event(0, 10.0), event(1, 10.0)), answers((12.0, OLD, 1)), [])
    assert (len(found.total_s), found.not_served) == (1, 1)
    assert found.to_json()["p50"] == pytest.approx(2.0)


def test_a_run_that_goes_on_from_an_older_checkpoint_takes_nothing_back(root: RootWriter) -> None:
    root.steps(OLD, "run1", 1, [(0, 10.2, [kafka_run(0, 0, 2)]), (1, 10.5, [kafka_run(0, 2, 2)])])
    root.steps(OLD, "run2", 2, [(1, 20.0, [kafka_run(0, 2, 2)])])
    root.release(OLD, 1, {0: 4}, 11.0)
    root.release(OLD, 2, {0: 2}, 19.0, term=2)
    found = measure(root.storage, [OLD], impressions(event(3, 10.0)), answers((12.0, OLD, 1), (21.0, OLD, 2)), [])
    assert found.total_s.tolist() == pytest.approx([2.0])
    assert sum(seconds[0] for seconds in found.stages.values()) == pytest.approx(2.0)
