"""What can go wrong with a hand-over, each at its worst moment. A fault ends with the outage that it made, if it made any."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.chaos.cycle_age import Outage
from tests.chaos.cycle_process import read_number, write_number
from tests.chaos.cycle_world import SERVERS, TOLERANCE_S, CycleWorld
from tests.e2e.workshop import kill
from tidemill.contracts import layout
from tidemill.jobs.ledger import TrainedRun, read_steps
from tidemill.storage.open import open_storage

OUTAGE_S = 30.0
CLOCK_OFF_S = 600.0
_LOOK_S = 0.02
_SLOW_S = 3.0


@dataclass(frozen=True, slots=True)
class Switch:
    """One hand-over of a story, and what is random about it."""

    world: CycleWorld
    old: str
    new: str
    rng: np.random.Generator

    def await_caught_up(self) -> None:
        """The moment at which the successor's report is within the tolerance, or its predecessor has seen it to be."""

        def caught_up() -> bool:
            old, new = (self.world.stream(date).progress() for date in (self.old, self.new))
            return bool(old and new) and new["data_ts"] >= old["data_ts"] - TOLERANCE_S

        self.world.wait_until(lambda: caught_up() or self._has_mark(), f"{self.new} to catch up", pause_s=_LOOK_S)

    def await_mark(self) -> None:
        """The moment at which the predecessor has seen that its successor has caught up."""
        self.world.wait_until(self._has_mark, f"{self.old} to set its mark", pause_s=_LOOK_S)

    def await_deployed(self) -> None:
        """The moment at which serving is to switch."""
        self.world.wait_until(
            lambda: self.world.deployments()[-1][0].lineage == layout.lineage(self.new),
            f"{self.new} to be deployed",
            pause_s=_LOOK_S,
        )

    def await_first_report(self) -> None:
        """The moment at which the successor has begun to catch up."""
        self.world.wait_until(lambda: bool(self.world.stream(self.new).progress()), f"{self.new} to report", pause_s=_LOOK_S)

    def await_step(self, date: str, since: float) -> float:
        """Wait for a stream's first step after a moment; when that was."""

        def steps() -> list[float]:
            return [entry.at for entry in self._trained(date) if entry.at > since]

        self.world.wait_until(lambda: bool(steps()), f"a step of {date}")
        return min(steps())

    def runs(self, date: str) -> set[str]:
        """A stream's runs so far."""
        return {record.run_id for record in self.world.stream(date).records()}

    def await_restart(self, date: str, known: set[str]) -> float:
        """Wait for the first step of a stream's run that isn't known, or its retirement by one that is; when it was seen.

        Not by the step's own time: the clock of its process may be off.
        """
        self.world.wait_until(
            lambda: any(entry.run_id not in known for entry in self._trained(date)) or self.world.is_retired(date),
            f"a step of {date} after its restart",
        )
        self.world.tell(f"{date} is back")
        return time.time()

    def _trained(self, date: str) -> list[TrainedRun]:
        return read_steps(open_storage(self.world.root / layout.lineage(date)))

    def _has_mark(self) -> bool:
        return self.world.stream(self.old).progress().get("handover_mark") is not None


def successor_killed(switch: Switch) -> Outage:
    """SIGKILL just after it reported that it has caught up."""
    switch.await_caught_up()
    return _killed(switch, switch.new)


def predecessor_killed(switch: Switch) -> Outage:
    """SIGKILL while it waits for the switch that it has asked for."""
    switch.await_mark()
    return _killed(switch, switch.old)


def _killed(switch: Switch, date: str) -> Outage:
    known, killed_at = switch.runs(date), switch.world.kill_trainers(date)
    return Outage(killed_at, switch.await_restart(date, known))


def supervisor_killed(switch: Switch) -> Outage:
    """SIGKILL right before it deploys, or right after; its children go with it, ranks of torchrun don't."""
    before = switch.rng.random() < 0.5
    (switch.await_mark if before else switch.await_deployed)()
    world, killed_at = switch.world, time.time()
    assert world.supervisor is not None
    world.supervisor.send_signal(signal.SIGKILL)
    world.supervisor.wait(10.0)
    world.tell(f"SIGKILL to the supervisor, {'before' if before else 'after'} the deployment")
    # What orphans train meanwhile doesn't count.
    known = switch.runs(switch.new)
    world.start_supervisor()
    return Outage(killed_at, switch.await_restart(switch.new, known))


def deployer_failing(switch: Switch) -> None:
    """It fails twice with all that it tries, and then the answer to its success is lost."""
    # Each of the two is tried five times.
    fails = switch.world.folder / "deployer-fails"
    write_number(fails, 11)
    switch.world.tell("the deployer will fail twice")
    switch.await_deployed()
    assert read_number(fails) == 0


def folder_slow(switch: Switch) -> Outage:
    """One lineage's folder takes seconds for each operation, for half a minute."""
    slow = switch.old if switch.rng.random() < 0.5 else switch.new
    switch.await_mark()
    began_at, path = time.time(), switch.world.folder / f"slow-{slow}"
    write_number(path, _SLOW_S)
    switch.world.tell(f"the folder of {slow} is slow")
    time.sleep(OUTAGE_S)
    path.unlink()
    switch.world.tell("the folder is quick again")
    return Outage(began_at, time.time())


def broker_away(switch: Switch) -> Outage:
    """The broker is killed, and comes back after half a minute."""
    (switch.await_mark if switch.rng.random() < 0.5 else switch.await_first_report)()
    broker, began_at = switch.world.broker, time.time()
    broker.kill()
    switch.world.tell("the broker is away")
    time.sleep(OUTAGE_S)
    broker.restart()
    back_at = time.time()
    switch.world.tell("the broker is back")
    return Outage(began_at, switch.await_step(switch.new, back_at))


def clock_off(switch: Switch) -> Outage | None:
    """One process's clock jumps by ten minutes; the successor's may also be that of a machine on which it is started again."""
    part = str(switch.rng.choice([_trainer(switch.old), _trainer(switch.new), f"serve-{SERVERS[0]}"]))
    shift = float(switch.rng.choice([-CLOCK_OFF_S, CLOCK_OFF_S]))
    dies = part == _trainer(switch.new) and switch.rng.random() < 0.5
    if dies:
        switch.await_first_report()
    write_number(switch.world.folder / f"clock-{part}", shift)
    switch.world.tell(f"the clock of {part} is {shift:+.0f} s off")
    return _killed(switch, switch.new) if dies else None


def _trainer(date: str) -> str:
    return f"train-lineages-{date}"


def server_restarted(switch: Switch) -> None:
    """The switch comes in the middle of one server's restart."""
    switch.await_caught_up()
    world, name = switch.world, str(switch.rng.choice(SERVERS))
    if switch.rng.random() < 0.5:
        world.servers[name].terminate()
        world.servers[name].wait(60.0)
        world.tell(f"server {name} has ended")
    else:
        kill(world.servers[name])
        world.tell(f"SIGKILL to server {name}")
    world.start_server(name)


FAULTS: dict[str, Callable[[Switch], Outage | None]] = {
    fault.__name__: fault
    for fault in (
        successor_killed,
        predecessor_killed,
        supervisor_killed,
        deployer_failing,
        folder_slow,
        broker_away,
        clock_off,
        server_restarted,
    )
}
