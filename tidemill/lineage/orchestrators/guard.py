"""Looks after serving once it has switched: back to the lineage before if the new one dies or turns out bad, and forward again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.clock import Clock, SystemClock
from tidemill.contracts.lineage import Deployment
from tidemill.errors import NotFoundError
from tidemill.lineage.by_hand import newest_good_release
from tidemill.lineage.cycle import CycleHandover
from tidemill.lineage.deployments import Decided, DeploymentHistory, OvertakenError, deploy, lineage_date
from tidemill.lineage.fallback import WELL, FallbackBounds, ServingState, Turn, Way, decide_turn, serving_state
from tidemill.lineage.records import snapshot_digest
from tidemill.lineage.watches import ConditionWatch
from tidemill.logs import event, log
from tidemill.storage.base import Storage


def followed_lineage(history: Sequence[Deployment]) -> str | None:
    """The lineage that is to be trained on: the one that is served and followed, also while the cycle has gone back from it.

    None if there is none, or a person has pinned what is served.
    """
    found = serving_state(history)
    return None if found is None or (found.left and found.by_person) else found.followed


class ServingGuard:
    """`look` decides and acts, by the deployments and the records of the lineage that is followed. Belongs to one thread.

    `has_ended(date)`: whether the stream of a date won't be started again. `before_deploy(date)`: what has to happen before a
    deployment is on record.
    """

    def __init__(
        self,
        root: Storage,
        handover: CycleHandover,
        run_id: str,
        has_ended: Callable[[str], bool],
        before_deploy: Callable[[str], None],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._root = root
        self.history = DeploymentHistory(root)
        self._liveness_s = handover.liveness_s
        fall_back = handover.fall_back
        self._bounds = FallbackBounds(fall_back.watch_s, fall_back.dead_s, fall_back.bad_s, fall_back.well_s)
        self._run_id = run_id
        self._has_ended = has_ended
        self._before_deploy = before_deploy
        self._clock = clock or SystemClock()
        self._watch: tuple[str, ConditionWatch] | None = None
        self._told = ""

    def look(self) -> Deployment | None:
        """One look; the deployment if it made one. Raises StorageError if the root can't be read."""
        history = self.history.read()
        found = serving_state(history)
        if found is None or self._bounds.watch_s == 0:
            return None
        condition = self._watch_of(found.followed).look(ended=self._has_ended(lineage_date(found.followed)))
        turn = decide_turn(found, condition, self._bounds, self._clock.time())
        self._tell(turn)
        if turn.way is Way.KEEP:
            return None
        try:
            return self._turn(found, turn, history[-1].number)
        except OvertakenError as error:
            log.info("%s", error)
        except NotFoundError as error:
            self._tell(Turn(Way.KEEP, f"{turn.reason}, but its snapshot isn't kept: {error}"))
        return None

    def _watch_of(self, lineage: str) -> ConditionWatch:
        if self._watch is None or self._watch[0] != lineage:
            self._watch = (lineage, ConditionWatch(self._root, lineage, self._liveness_s, clock=self._clock))
        return self._watch[1]

    def _turn(self, found: ServingState, turn: Turn, number: int) -> Deployment:
        lineage = found.followed if turn.way is Way.FORWARD else found.before
        assert lineage is not None
        digest = snapshot_digest(self._root, lineage)
        pin = newest_good_release(self._root, lineage) if turn.way is Way.BACK else None
        self._before_deploy(lineage_date(lineage))
        decided = Decided(self._run_id, number)
        deployment = deploy(self._root, lineage, digest, turn.reason, pin, decided=decided, clock=self._clock)
        event("cycle.turned", way=turn.way, number=deployment.number, lineage=lineage, reason=turn.reason)
        return deployment

    def _tell(self, turn: Turn) -> None:
        """In the log, when it is something else than before."""
        if turn.reason not in (self._told, WELL):
            log.warning("serving: %s: %s", turn.way, turn.reason)
        self._told = turn.reason
