"""What ranks do side by side, with ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tidemill.errors import ConfigError, DataError, PeerLostError, TidemillError
from tidemill.jobs import ranks as module
from tidemill.jobs.ranks import Ranks, exchange, lead, together
from tidemill.testing.rank_threads import Result, ThreadAgreement, ThreadGroup, run_threads


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)


def run(world_size: int, function: Callable[[Ranks], Any]) -> list[Result[Any]]:
    return run_threads(world_size, lambda group, rank: function(of(group, rank)))


def of(group: ThreadGroup, rank: int) -> Ranks:
    return Ranks(rank, group.world_size, ThreadAgreement(group, rank))


def values(results: list[Result[Any]]) -> list[Any]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.value for result in results]


def test_values_come_in_rank_order_on_every_rank() -> None:
    assert values(run(3, lambda ranks: exchange(ranks, {"rank": ranks.rank}))) == [[{"rank": n} for n in range(3)]] * 3
    assert values(run(3, lambda ranks: together(ranks, lambda: ranks.rank * 2))) == [[0, 2, 4]] * 3
    assert values(run(2, lambda ranks: lead(ranks, lambda: f"of rank {ranks.rank}"))) == ["of rank 0"] * 2


def test_who_is_done_waits_for_the_slow_one_in_rounds() -> None:
    """No collective lasts as long as the work does: here the work ends only after the others have gone through several."""
    rounds = threading.Semaphore(0)

    def work(ranks: Ranks) -> list[Any]:
        if ranks.rank == 0:
            return together(ranks, lambda: [rounds.acquire(timeout=20) for _ in range(5)])
        agreement = ranks.agreement
        counting = type("Counting", (), {"collect": lambda self, arrays: (rounds.release(), agreement.collect(arrays))[1]})()
        return together(Ranks(ranks.rank, ranks.world_size, counting), lambda: "quick")

    assert values(run(2, work)) == [[[True] * 5, "quick"]] * 2


def test_one_ranks_error_is_every_ranks_after_its_own_work_has_ended() -> None:
    failed, ended = threading.Event(), []

    def work(rank: int) -> Any:
        if rank == 1:
            failed.set()
            raise ConfigError("a bad address")
        assert failed.wait(20)
        ended.append(rank)
        return rank

    zero, one, two = run(3, lambda ranks: together(ranks, lambda: work(ranks.rank)))
    assert sorted(ended) == [0, 2]
    assert str(one.error) == "a bad address"
    for other in (zero, two):
        assert isinstance(other.error, ConfigError)
        assert str(other.error) == "rank 1: a bad address"


def test_a_defect_of_one_rank_ends_the_others_too() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            raise ZeroDivisionError

    zero, one = run(2, lambda ranks: together(ranks, lambda: work(ranks.rank)))
    assert isinstance(zero.error, ZeroDivisionError)
    assert isinstance(one.error, PeerLostError)


def test_who_loses_a_peer_first_ends_its_own_work() -> None:
    ended = threading.Event()

    def work(group: ThreadGroup, rank: int) -> None:
        if rank == 0:
            together(of(group, 0), lambda: (threading.Event().wait(0.1), ended.set())[1])

    zero, _ = run_threads(2, work)
    assert isinstance(zero.error, PeerLostError)
    assert ended.is_set()


def test_an_error_that_isnt_known_by_name_stays_an_error() -> None:
    class OwnError(DataError):
        pass

    def work(rank: int) -> None:
        if rank == 0:
            raise OwnError("odd")

    _, one = run(2, lambda ranks: together(ranks, lambda: work(ranks.rank)))
    assert type(one.error) is TidemillError
    assert str(one.error) == "rank 0: odd"
