"""Ranks whose partitions are silent, on the virtual clock: nobody waits for them, and nobody loses them (DCL 9.7)."""

from __future__ import annotations

from tidemill.testing.simulation.story import Chances, Story
from tidemill.testing.simulation.trainer import TIMEOUT_S, LineSettings, RunSettings
from tidemill.testing.simulation.world import Part, World

SILENCE_S = 3 * TIMEOUT_S
MAX_WAIT_S = 0.2


def silent_story():
    """Two ranks; each second a row comes to one partition, and to the other one a row after three collective timeouts."""
    story = Story(1)
    story.world = World(bounded=False, parts=[Part("part:0"), Part("part:1")])
    busy, silent = story.world.parts
    for second in range(int(SILENCE_S) + 5):
        story.world.add(busy, position=second, time=1000.0 + second, cost=1.0, arrival=float(second))
    story.world.add(silent, position=0, time=1000.0 + SILENCE_S, cost=1.0, arrival=SILENCE_S)
    story.line = LineSettings(idle_timeout_s=2.0)
    return story, story.world.num_ids - 1


def test_a_silent_rank_holds_up_neither_steps_nor_watermark_and_is_trained_when_it_speaks():
    story, late_id = silent_story()
    seen = {}

    def told():
        ranks = story.start(RunSettings(world_size=2, batch_size=8, max_wait_s=MAX_WAIT_S), Chances())
        run = ranks.run
        story.scheduler.sleep(SILENCE_S - 1.0)
        seen["rows"], seen["watermark"] = len(run.trained), run.points[-1].watermark
        story.scheduler.sleep(1.0 + 5 * MAX_WAIT_S)
        seen["late"] = late_id in {one for _, one in run.trained}
        assert not run.errors, run.errors
        story.ask_to_end(ranks)
        story.await_end(ranks)
        seen["reasons"] = {outcome.reason.name for outcome in run.outcomes.values()}

    story.play(told)
    assert seen["rows"] >= SILENCE_S - 3, "single rows go out within the time that a batch waits"
    assert seen["watermark"] >= 1000.0 + SILENCE_S - 5
    assert seen["late"]
    assert seen["reasons"] == {"PREEMPTED"}
