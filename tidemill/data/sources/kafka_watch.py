"""What a reader has to know of its partitions besides their messages: where they end, whether there are new ones, and whether
their topics are still the same."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException

from tidemill.config.data import KafkaConfig
from tidemill.data.sources.kafka_client import EARLIEST, LATEST, KafkaClient, Topic, made_anew, without_secrets
from tidemill.data.split import SplitId
from tidemill.errors import DataError, DeadlineError, SourceChangedError

_ASK_S = 1.0
# The cluster may take a few seconds to answer; what it said before that is no news.
_FRESH_S = 10.0
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class _End:
    offset: int
    asked_at: float


class KafkaWatch:
    """Asks the cluster for the topics' identities and for ends once a second, and for partitions every `discovery_interval_s`, on
    a thread of its own: a cluster that is away or slow holds up no reading.

    `topic_ids`: topic -> the identity that it has to keep, None if unknown. `look_for_new`: whether new partitions matter.
    Threading: `is_at_end` and `end` may be called from any thread; all else belongs to the reading one.
    """

    def __init__(
        self, config: KafkaConfig, splits: Iterable[SplitId], *, topic_ids: Mapping[str, str | None], look_for_new: bool
    ) -> None:
        self._config = config
        self._splits = list(splits)
        self._topic_ids = dict(topic_ids)
        self._look_for_new = look_for_new
        self._ends: dict[SplitId, _End] = {}
        self._found: dict[SplitId, tuple[Topic, int]] = {}
        self._failed = ""
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._confirmed_at = -math.inf
        self.answered_at = time.monotonic()
        """When the last question that was answered had been asked (monotonic seconds)."""
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why the last question wasn't answered; empty if it was."""
        return self._failed

    def watch(self, splits: Iterable[SplitId]) -> None:
        """Ask for the ends of these from now on, instead of others."""
        self._splits = list(splits)

    def is_at_end(self, split: SplitId, offset: int) -> bool:
        """Whether the cluster has said, within the last seconds, that there is nothing at or behind an offset."""
        end = self._ends.get(split)
        return end is not None and offset >= end.offset and time.monotonic() - end.asked_at < _FRESH_S

    def end(self, split: SplitId) -> int | None:
        """The offset that the split's next message will have, as of the last answer; None: there was none."""
        known = self._ends.get(split)
        return None if known is None else known.offset

    def take_found(self) -> dict[SplitId, tuple[Topic, int]]:
        """Partitions that the cluster has named so far, each once, with their topics and earliest offsets."""
        with self._changed:
            found, self._found = self._found, {}
        return found

    def confirms(self, since: float, timeout_s: float) -> bool:
        """Whether a question asked at or after `since` (monotonic seconds) was answered by: the topics are the same still. Asks at
        once, and waits for the answer, if none is known."""
        if self._confirmed_at < since:
            self._wake.set()
        with self._changed:
            self._changed.wait_for(lambda: self._confirmed_at >= since or self._error is not None, timeout_s)
            return self._confirmed_at >= since and self._error is None

    def check(self) -> None:
        """Raise SourceChangedError if a topic was made anew, or the error of a bug."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop. A question under way is left to end by itself."""
        self._stopped = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        client = KafkaClient(self._config, patience_s=0.0)
        try:
            self._ask_on(client)
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever checks
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            client.close()

    def _ask_on(self, client: KafkaClient) -> None:
        named: set[SplitId] = set()
        look_at = time.monotonic()
        while not self._stopped:
            # What sets it from here on wants a question that is asked from here on.
            self._wake.clear()
            try:
                self._confirm(client)
                self._ask_ends(client)
                if time.monotonic() >= look_at:
                    self._look(client, named)
                    look_at = time.monotonic() + self._config.discovery_interval_s
            except SourceChangedError:
                raise
            except (DataError, DeadlineError) as error:
                self._failed = str(error)
            except KafkaException as exception:
                self._failed = without_secrets(self._config.client, exception.args[0].str())
            self._wake.wait(_ASK_S)

    def _confirm(self, client: KafkaClient) -> None:
        """Raises SourceChangedError for a topic that isn't the one any more that its offsets are of."""
        asked_at = time.monotonic()
        for name, topic_id in client.topic_ids(list(self._topic_ids)).items():
            was = self._topic_ids[name]
            if was is not None and topic_id is not None and topic_id != was:
                raise SourceChangedError(made_anew(f"kafka topic {name!r}", f"its topic_id was {was}", topic_id))
            self._topic_ids[name] = was or topic_id
        with self._changed:
            self._confirmed_at = asked_at
            self._changed.notify_all()

    def _ask_ends(self, client: KafkaClient) -> None:
        splits, asked_at = self._splits, time.monotonic()
        if not splits:
            return
        answers = client.ask_offsets(splits, LATEST)
        errors = [answer for answer in answers if isinstance(answer, KafkaError)]
        self._ends |= {s: _End(a, asked_at) for s, a in zip(splits, answers, strict=True) if isinstance(a, int)}
        if errors:
            raise KafkaException(errors[0])
        self._failed, self.answered_at = "", asked_at

    def _look(self, client: KafkaClient, named: set[SplitId]) -> None:
        for name in self._topic_ids:
            asked_at = time.monotonic()
            topic = client.topic(name)
            self._failed, self.answered_at = "", asked_at
            new = [split for split in topic.splits() if split not in named]
            if new and self._look_for_new:
                lows = client.offsets(new, EARLIEST)
                with self._changed:
                    self._found |= {split: (topic, low or 0) for split, low in zip(new, lows, strict=True)}
            named.update(new)
