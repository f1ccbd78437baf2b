"""Stories of the daily cycle: three days, two hand-overs, one fault at its worst moment, and what must hold all the while."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tests.chaos.cycle_age import Outage, ages, wrong_lineages
from tests.chaos.cycle_clients import Clients
from tests.chaos.cycle_faults import FAULTS, Switch
from tests.chaos.cycle_world import DATES, POLL_S, PUBLISH_S, SPEED, TOLERANCE_S, WAIT_S, CycleWorld, rows_of_day
from tests.e2e.topic import Topic
from tidemill.contracts import layout
from tidemill.data.split import SplitId
from tidemill.jobs.ledger import Ledger, check_ledger, read_steps
from tidemill.jobs.verify import verify
from tidemill.storage.open import open_storage
from tidemill.testing.broker import DevelopmentBroker

_AGE_S = PUBLISH_S + POLL_S + 10.0
_NOBODY_DIES = ("deployer_failing", "broker_away", "clock_off", "server_restarted")
"""Faults that leave every predecessor alive: nobody may take one for dead."""
_AFTER_S = 12.0
"""How long the clients go on once the last fault and the last hand-over are over."""


@dataclass(frozen=True, slots=True)
class CycleFigures:
    """What one story came to. Ages in seconds: `age_s` with the outage's share, `beyond_s` without, `bound_s` what it may be.

    `load`: factor of the bound; `retried`: requests that another server had to answer; `wrong`: answers of a lineage that isn't the
    one to be served, and what the supervisor got wrong; `different`: rows and dense weights that are served otherwise than trained;
    `story`: what happened when.
    """

    fault: str
    seed: int
    day: int
    wall_s: float
    load: float
    outage_s: float
    age_s: float
    beyond_s: float
    bound_s: float
    requests: int
    retried: int
    failed: int
    rows: int
    lost: int
    doubled: int
    deployments: int
    wrong: int
    different: int
    story: str

    @property
    def is_clean(self) -> bool:
        odd = (self.failed, self.lost, self.doubled, self.wrong, self.different)
        return not any(odd) and self.beyond_s <= self.bound_s and self.deployments == len(DATES)


def play(fault: str, seed: int, folder: Path, broker: DevelopmentBroker) -> CycleFigures:
    """One story. Raises AssertionError with the story and the processes' last words if something happens that never may."""
    rng = np.random.default_rng([seed, list(FAULTS).index(fault)])
    day = int(rng.integers(1, len(DATES)))
    began_at, load = time.time(), _crowding()
    world = CycleWorld(folder, broker, Topic(broker, name=f"cycle-{folder.name}"), DATES[int(rng.integers(1, len(DATES)))])
    world.tell(f"{fault}, seed {seed}, at the hand-over to {DATES[day]}; {world.two_ranks} has two ranks")
    with world:
        try:
            world.start()
            clients = world.begin_play()
            outage = None
            for number in range(1, len(DATES)):
                outage = _hand_over(world, number, fault if number == day else None, rng) or outage
            time.sleep(_AFTER_S)
            _end(world)
            return _figures(world, clients, outage, (fault, seed, day, time.time() - began_at, load))
        except (AssertionError, TimeoutError) as error:
            raise AssertionError("\n".join([*world.told, str(error), world.logs()])) from error


def _crowding() -> float:
    """How many others' threads there are for each core before a story begins, at least 1: by so much its age may be higher."""
    running = []
    for _ in range(20):
        running.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
        time.sleep(0.1)
    return max(1.0, float(np.mean(running)) / (os.cpu_count() or 1))


def _hand_over(world: CycleWorld, number: int, fault: str | None, rng: np.random.Generator) -> Outage | None:
    old, new = DATES[number - 1], DATES[number]
    world.end_day(new)
    switch = Switch(world, old, new, rng)
    world.make_due(new)
    outage = FAULTS[fault](switch) if fault else None
    world.wait_until(lambda: world.is_retired(old), f"{old} to retire")
    world.wait_until(lambda: world.serve(new), f"{new} to be served")
    world.tell(f"{new} has taken over")
    return outage


def _end(world: CycleWorld) -> None:
    """No more rows; the last stream trains and releases what is left, and all ends."""
    world.stack.close()
    last = world.stream(DATES[-1])
    world.wait_until(lambda: last.ledger().lost == 0, "all rows to be trained", pause_s=1.0)
    assert world.supervisor is not None
    world.supervisor.send_signal(signal.SIGTERM)
    code = world.supervisor.wait(WAIT_S)
    assert code == 0, f"the supervisor ended with {code}"
    world.tell("the supervisor has ended")


def _figures(world: CycleWorld, clients: Clients, outage: Outage | None, told: tuple[str, int, int, float, float]) -> CycleFigures:
    fault, seed, day, wall_s, load = told
    assert world.clock is not None
    deployments = world.deployments()
    retired_at = {layout.lineage(date): (world.root / layout.lineage(date) / "lineage.json").stat().st_mtime for date in DATES[:-1]}
    wrong = wrong_lineages(clients.answers, {entry.lineage: at for entry, at in reversed(deployments)}, retired_at)
    if fault in _NOBODY_DIES:
        wrong += [line for line in (world.folder / "supervisor.log").read_text().splitlines() if "predecessor is dead" in line]
    found = ages(clients.answers, world.watermarks(), world.clock, outage, _AGE_S * load)
    ledgers = [*(_table(world, date) for date in DATES), world.stream(DATES[-1]).ledger()]
    retired = [world.stream(date).retired_ledger() for date in DATES[:-1]]
    different = [verify(str(world.root / layout.lineage(date))) for date in DATES]
    world.stream(DATES[-1]).verify_head()
    for problem in [*wrong[:5], *clients.failed[:5]]:
        world.tell(problem)
    return CycleFigures(
        fault=fault,
        seed=seed,
        day=day + 1,
        wall_s=round(wall_s, 1),
        load=round(load, 2),
        outage_s=round(outage.ended_at - outage.began_at, 1) if outage else 0.0,
        age_s=round(found.worst_s, 2),
        beyond_s=round(found.beyond_s, 2),
        bound_s=round(_AGE_S * load + TOLERANCE_S / SPEED, 2),
        requests=len(clients.answers) + len(clients.failed),
        retried=sum(answer.attempts > 0 for answer in clients.answers),
        failed=len(clients.failed),
        rows=sum(one.rows for one in ledgers),
        lost=sum(one.lost for one in [*ledgers, *retired]),
        # A row that another part of the line holds is trained there too.
        doubled=sum(one.doubled + one.unlisted for one in [*ledgers, *retired]),
        deployments=len(deployments),
        wrong=len(wrong),
        different=sum(one.keys_different + one.dense_different for one in different),
        story="\n".join(world.told),
    )


def _table(world: CycleWorld, date: str) -> Ledger:
    """What a date's daily job trained of its table, which holds the rows that the producer lists."""
    paths = sorted(world.table(date).glob("*.parquet"))
    rows = {SplitId("parquet", str(path)): np.arange(pq.read_metadata(path).num_rows, dtype=np.int64) for path in paths}
    if date != DATES[0]:
        assert sum(map(len, rows.values())) == rows_of_day(world.topic, date), f"the table of {date}"
    return check_ledger(read_steps(open_storage(world.root), prefix=layout.daily(date)), rows)


def row(figures: CycleFigures) -> str:
    """One line of the table, without the story."""
    return "  ".join(f"{value!s:>{width}}" for width, value in zip(_WIDTHS, asdict(figures).values(), strict=False))


def head() -> str:
    """The table's first line."""
    return "  ".join(f"{name:>{width}}" for width, name in zip(_WIDTHS, CycleFigures.__dataclass_fields__, strict=False))


_WIDTHS = (18, 5, 3, 6, 5, 8, 6, 8, 7, 8, 7, 6, 6, 4, 7, 11, 5, 9)
