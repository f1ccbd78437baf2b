"""What a demo plays: how long, how fast, how many rows and requests."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.data.click_world import DAY_S, World, WorldConfig

TOPIC = "impressions"
PARTITIONS = 2
FIRST_DAY = 0
"""Day T-1 of the click world: its table is made; day T is played."""
# Far more days than are played: on a machine that is busy with other things, event time goes on while a job takes long.
_WORLD_DAYS = 16


def demo_world(seed: int) -> World:
    """The click world of a demo; the director and the players each make it from the seed."""
    return World(seed, WorldConfig(num_days=_WORLD_DAYS))


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The sizes of one demo. Times ending in `_s` are wall seconds unless they say event time."""

    first_day_rows: int
    """Rows of day T-1's table."""
    day_s: float
    """How long day T lasts."""
    requests_per_s: float
    candidates: int
    """Items that one request asks the server to rank."""
    best_shown: int
    """Items that a user sees because the model ranks them highest; as many random ones are shown with them."""
    after_switch_s: float
    """How long the successor runs on after the predecessor has retired."""
    tolerance_wall_s: float = 4.0
    """How far the successor may trail, in wall time."""
    kills: int = 0
    """How often chaos kills the stream trainer."""

    @property
    def speed(self) -> float:
        """Seconds of event time in a second of wall time."""
        return DAY_S / self.day_s

    @property
    def tolerance_s(self) -> float:
        """How far the successor may trail, in event time."""
        return self.tolerance_wall_s * self.speed


def demo_plan(*, fast: bool, chaos: bool) -> DemoPlan:
    """The sizes of the short and of the long demo. Both show well over the 20,000 random impressions that an AUC needs."""
    if fast:
        plan = DemoPlan(
            first_day_rows=130_000,
            day_s=50.0,
            requests_per_s=80.0,
            candidates=64,
            best_shown=7,
            after_switch_s=4.0,
            kills=3 * chaos,
        )
    else:
        plan = DemoPlan(
            first_day_rows=400_000,
            day_s=200.0,
            requests_per_s=40.0,
            candidates=96,
            best_shown=10,
            after_switch_s=20.0,
            kills=3 * chaos,
        )
    return plan
