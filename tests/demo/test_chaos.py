from __future__ import annotations

import threading

from tidemill.demo.chaos import Chaos


def test_the_same_seed_gives_the_same_moments_each_in_its_part_of_the_day() -> None:
    first, again, other = (Chaos(lambda: None, seed, 100.0, 3) for seed in (1, 1, 2))
    assert first.moments_s == again.moments_s
    assert first.moments_s != other.moments_s
    assert 10 <= first.moments_s[0] <= 50 <= first.moments_s[1] <= 90


def test_it_kills_as_often_as_told_and_waits_for_a_trainer_that_is_down() -> None:
    tries: list[int] = []
    killed = threading.Semaphore(0)

    def kill() -> str | None:
        tries.append(len(tries))
        if len(tries) == 1:
            return None
        killed.release()
        return "lineages/20260302"

    chaos = Chaos(kill, 1, 0.05, 3)
    chaos.start()
    try:
        assert killed.acquire(timeout=5.0)
        assert killed.acquire(timeout=5.0)
        assert not chaos.is_done
        chaos.kill_soon()
        assert killed.acquire(timeout=10.0)
    finally:
        chaos.stop()
    assert len(tries) == 4
    assert chaos.is_done


def test_a_stop_ends_it_without_a_kill() -> None:
    tries: list[int] = []
    chaos = Chaos(lambda: tries.append(1), 1, 1000.0, 3)
    chaos.start()
    chaos.stop()
    assert not tries
