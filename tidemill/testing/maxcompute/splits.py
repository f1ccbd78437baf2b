"""How a read session divides its rows. Rows are numbered over all partitions of the session, in order."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, pairwise

from tidemill.testing.maxcompute.replies import invalid_argument

Ranges = tuple[tuple[int, int], ...]
"""What one split holds: half-open ranges of row numbers."""


class SplitMode(StrEnum):
    SIZE = "Size"
    PARALLELISM = "Parallelism"
    ROW_OFFSET = "RowOffset"
    BUCKET = "Bucket"


def by_size(partition_rows: Sequence[int], num_bytes: int, split_bytes: int, cross_partition: bool) -> list[Ranges]:
    """Splits of about `split_bytes` on disk each; none spans two partitions unless `cross_partition`."""
    if split_bytes < 1:
        raise invalid_argument(f"SplitNumber must be a positive number of bytes, not {split_bytes}")
    rows = sum(partition_rows)
    step = max(1, rows * split_bytes // max(num_bytes, 1))
    return [((place, min(place + step, stop)),) for start, stop in _groups(partition_rows, cross_partition)
            for place in range(start, stop, step)]  # fmt: skip


def by_parallelism(partition_rows: Sequence[int], number: int, cross_partition: bool) -> list[Ranges]:
    """At most `number` splits of about equal rows, but at least one for each partition with rows unless `cross_partition`."""
    if number < 1:
        raise invalid_argument(f"SplitNumber must be positive, not {number}")
    groups = _groups(partition_rows, cross_partition)
    step = max(1, -(-sum(partition_rows) // number))
    return [((place, min(place + step, stop)),) for start, stop in groups for place in range(start, stop, step)]


def by_bucket(partition_rows: Sequence[int], buckets: int | None, required: Sequence[int]) -> list[Ranges]:
    """One split for each (required) bucket: the same share of every partition's rows. Raises ApiError without buckets."""
    if not buckets:
        raise invalid_argument("Bucket splits need a clustered table")
    wanted = list(required) or list(range(buckets))
    if not all(0 <= bucket < buckets for bucket in wanted):
        raise invalid_argument(f"RequiredBucketIds {list(required)}: the table has {buckets} buckets")
    starts = _groups(partition_rows, cross_partition=False)
    return [
        tuple((start + (stop - start) * bucket // buckets, start + (stop - start) * (bucket + 1) // buckets)
              for start, stop in starts)
        for bucket in wanted
    ]  # fmt: skip


def _groups(partition_rows: Sequence[int], cross_partition: bool) -> list[tuple[int, int]]:
    """Ranges of rows that a split may not cross."""
    if cross_partition:
        return [(0, sum(partition_rows))]
    return list(pairwise(accumulate(partition_rows, initial=0)))
