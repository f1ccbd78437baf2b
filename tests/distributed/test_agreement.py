"""Agreement between real processes."""

import dataclasses
import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from tidemill.cadence import RankReport, StopReason
from tidemill.distributed.agreement import Agreement
from tidemill.errors import PeerLostError
from tidemill.testing.ranks import RankError, run_ranks, single_process


def _report(rank, weights=(1.0, 2.0)):
    return RankReport(
        event_time=None if rank else 12.5,
        abstains=bool(rank),
        stop=StopReason(rank),
        writer_ready=True,
        weights=weights,
        clock=7.0 + rank,
    )


def _exchange(runtime):
    agreement = Agreement(runtime)
    shared = agreement.share({"term": 3, "run": "r"} if runtime.rank == 0 else None)
    first = agreement.issue(_report(runtime.rank))
    # A gather in flight doesn't keep others from being issued, in the same order on all ranks.
    second = agreement.issue(_report(runtime.rank, (float(runtime.rank), 0.0)))
    arrays = agreement.collect({"a": np.arange(runtime.rank * 3), "b": np.full((2, 2), runtime.rank, np.float32)})
    return shared, first.wait(), second.wait(), arrays


def test_all_ranks_hear_the_same():
    results = run_ranks(2, _exchange)
    for shared, first, second, arrays in results:
        assert shared == {"term": 3, "run": "r"}
        assert first == [_report(0), _report(1)]
        assert [report.weights for report in second] == [(0.0, 0.0), (1.0, 0.0)]
        np.testing.assert_array_equal(arrays[0]["a"], [])
        np.testing.assert_array_equal(arrays[1]["a"], [0, 1, 2])
        np.testing.assert_array_equal(arrays[1]["b"], np.ones((2, 2), np.float32))


def _side_backend(runtime):
    return dist.get_backend(runtime.side)


def test_agreement_runs_on_the_cpu():
    """DCL 9.19: whatever the device of the model."""
    assert run_ranks(2, _side_backend) == ["gloo", "gloo"]


def test_one_rank_agrees_with_itself():
    with single_process() as runtime:
        agreement = Agreement(runtime)
        assert agreement.issue(_report(0)).wait() == [_report(0)]
        assert agreement.share([1, "x"]) == [1, "x"]
        assert agreement.collect({})[0] == {}


def _rank_one_is_late(runtime):
    # A group of its own: the runtime's timeout also covers the start of the processes.
    side = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    impatient = dataclasses.replace(runtime, side=side, timeout_s=1.0)
    if runtime.rank == 1:
        time.sleep(3)
        return None
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"the reports of round 0 \(rank 0 of 2, 1 s\)"):
        Agreement(impatient).issue(_report(0)).wait()
    return time.monotonic() - began


def test_a_late_rank_is_a_lost_peer():
    waited, _ = run_ranks(2, _rank_one_is_late)
    assert waited < 2.9


def _rank_one_raises(runtime):
    if runtime.rank == 1:
        raise ValueError("of rank one")
    Agreement(runtime).issue(_report(0)).wait()


def test_the_harness_names_the_rank_that_raised():
    with pytest.raises(RankError, match=r"rank 1 raised:.*of rank one|rank 0 raised:.*PeerLostError"):
        _one_line(run_ranks, 2, _rank_one_raises)


def _one_line(function, *args):
    try:
        function(*args)
    except RankError as error:
        raise RankError(str(error).replace("\n", " ")) from None


def _hang(runtime):
    time.sleep(60)


def test_the_harness_ends_ranks_that_take_too_long():
    began = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0\] weren't done"):
        run_ranks(1, _hang, timeout_s=2)
    assert time.monotonic() - began < 30
