"""Every rank writes its part, and rank 0 waits for exactly those parts: how checkpoints and release cuts are gathered."""

from __future__ import annotations

from tidemill.clock import Clock
from tidemill.errors import DeadlineError, NotFoundError, StorageError
from tidemill.storage.base import Storage

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


def part_key(prefix: str, rank: int) -> str:
    """The key of a rank's part below a prefix."""
    return f"{prefix}/part-{rank:05d}.json"


def write_part(storage: Storage, prefix: str, rank: int, document: bytes) -> str:
    """Write a rank's part and return its key. Write it last: it says that all the files it names are durable.

    The prefix must be new for each attempt (a term and a cut number), or a waiting rank 0 could read the part of an earlier one.
    """
    key = part_key(prefix, rank)
    storage.write(key, document)
    return key


def await_parts(storage: Storage, prefix: str, world_size: int, deadline_s: float, clock: Clock) -> list[bytes]:
    """Wait for the parts of ranks 0..world_size-1 and return them in rank order; other objects below the prefix are ignored.

    A store that fails meanwhile is asked again. Raises DeadlineError naming the missing ranks once `deadline_s` has passed.
    """
    deadline = clock.monotonic() + deadline_s
    parts: dict[int, bytes] = {}
    pause = _FIRST_PAUSE_S
    while True:
        failure = _collect(storage, prefix, world_size, parts)
        if len(parts) == world_size:
            return [parts[rank] for rank in range(world_size)]
        left = deadline - clock.monotonic()
        if left <= 0:
            missing = ", ".join(str(rank) for rank in range(world_size) if rank not in parts)
            reason = f"; the store's last failure: {failure}" if failure else ""
            raise DeadlineError(f"no part from rank {missing} under {prefix!r} in {storage.url} after {deadline_s:g} s{reason}")
        clock.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _collect(storage: Storage, prefix: str, world_size: int, parts: dict[int, bytes]) -> StorageError | None:
    """Read the parts that have arrived since the last look; the store's failure, if it failed."""
    try:
        arrived = {info.key for info in storage.list(f"{prefix}/part-")}
        for rank in range(world_size):
            if rank not in parts and part_key(prefix, rank) in arrived:
                parts[rank] = storage.read(part_key(prefix, rank))
    except NotFoundError:
        return None
    except StorageError as error:
        return error
    return None
