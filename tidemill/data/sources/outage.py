"""A store that fails for a while: which failures may pass, when to try again, and when to give up."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

from tidemill.clock import Clock, SystemClock
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import SplitReader
from tidemill.data.split import RawBatch, SplitId
from tidemill.errors import StorageError
from tidemill.logs import log

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
OUTAGE_TIMEOUT_S = 300.0
"""How long a file that can't be read is tried again, by default."""

_PASSING = {
    errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.EREMOTEIO,
}
# Clients that fsspec knows name an HTTP answer's status in one of these.
_STATUS = ("status", "status_code", "code")
_TRY_LATER = {408, 425, 429}


def is_passing(error: BaseException) -> bool:
    """Whether the same call of a store's client may succeed later: network faults, timeouts, the store's own errors (5xx), a disk
    that answers EIO. What a decoder says of bytes that it did get is not among them."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING:
        return True
    status = next((value for name in _STATUS if isinstance(value := getattr(error, name, None), int)), 0)
    return 500 <= status < 600 or status in _TRY_LATER


def pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row: doubling, and spread, so that many ranks don't come back at once."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * random.uniform(0.5, 1.0)


class Outage:
    """Failures in a row. `again_at`: when to try next, monotonic seconds."""

    def __init__(self, timeout_s: float, clock: Clock | None = None) -> None:
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._since: float | None = None
        self._failures = 0
        self.again_at = 0.0

    def failed(self, error: StorageError, where: str) -> None:
        """Note a failure. Raises the error itself if it can't pass, StorageError naming `where` if the time is over."""
        if error.__cause__ is None or not is_passing(error.__cause__):
            raise error
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        self._failures += 1
        self.again_at = now + pause_s(self._failures)
        if self.again_at - self._since > self._timeout_s:
            raise StorageError(f"{where}: nothing could be read for {self._timeout_s:g} s: {error}") from error
        log.warning("%s: %s; going on from there", where, error)

    def over(self) -> None:
        """Something was read."""
        self._since, self._failures, self.again_at = None, 0, 0.0


class PersistentReader(SplitReader):
    """The wanted rows of a file, in order; after a failure that may pass, from the next unread row on.

    `open_at` opens a reader of the rows that it is given, and checks that the file is still the same. Raises StorageError naming
    file and row once no row has come for `timeout_s`.
    """

    def __init__(
        self,
        split: SplitId,
        wanted: IntervalSet,
        open_at: Callable[[IntervalSet], SplitReader],
        *,
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._split = split
        self._wanted = wanted
        self._open_at = open_at
        self._clock = clock or SystemClock()
        self._outage = Outage(timeout_s, self._clock)
        self._next = wanted.intervals[0][0] if wanted else 0
        self._reader: SplitReader | None = None
        self._try(lambda: None)

    def read(self, timeout_s: float) -> RawBatch | None:
        wait_s = self._outage.again_at - self._clock.monotonic()
        if wait_s > 0:
            self._clock.sleep(min(wait_s, timeout_s))
            if wait_s > timeout_s:
                return None
        return self._try(lambda: self._rows(timeout_s))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _try(self, read: Callable[[], RawBatch | None]) -> RawBatch | None:
        try:
            if self._reader is None:
                self._reader = self._open_at(self._wanted - IntervalSet.of([(0, self._next)]))
            return read()
        except StorageError as error:
            self.close()
            self._outage.failed(error, f"{self._split}, row {self._next}")
            return None

    def _rows(self, timeout_s: float) -> RawBatch | None:
        assert self._reader is not None
        raw = self._reader.read(timeout_s)
        if raw is not None:
            self._outage.over()
            self._next = raw.runs[-1].stop
        return raw
