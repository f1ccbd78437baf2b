"""However a session divides its rows, each row is in one split."""

from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.testing.maxcompute.replies import ApiError
from tidemill.testing.maxcompute.splits import Ranges, by_bucket, by_parallelism, by_size

PARTITIONS = st.lists(st.integers(0, 50), max_size=6)


def rows(splits: list[Ranges]) -> list[int]:
    return list(chain.from_iterable(range(start, stop) for split in splits for start, stop in split))


def partitions_of(splits: list[Ranges], partition_rows: list[int]) -> list[int]:
    """How many partitions each split touches."""
    bounds = list(pairwise(accumulate(partition_rows, initial=0)))
    return [sum(any(a < stop and start < b for start, stop in split) for a, b in bounds) for split in splits]


@given(PARTITIONS, st.integers(1, 20), st.booleans())
def test_by_parallelism(partition_rows: list[int], number: int, cross: bool) -> None:
    splits = by_parallelism(partition_rows, number, cross)

    assert rows(splits) == list(range(sum(partition_rows)))
    if cross:
        assert len(splits) <= number
    else:
        assert all(count == 1 for count in partitions_of(splits, partition_rows))


@given(PARTITIONS, st.integers(1, 10_000), st.booleans())
def test_by_size(partition_rows: list[int], split_bytes: int, cross: bool) -> None:
    bytes_a_row = 10
    splits = by_size(partition_rows, bytes_a_row * sum(partition_rows), split_bytes, cross)

    assert rows(splits) == list(range(sum(partition_rows)))
    assert all(len(rows([split])) <= max(1, split_bytes // bytes_a_row) for split in splits)
    if not cross:
        assert all(count == 1 for count in partitions_of(splits, partition_rows))


@given(PARTITIONS, st.integers(1, 8))
def test_by_bucket(partition_rows: list[int], buckets: int) -> None:
    splits = by_bucket(partition_rows, buckets, [])

    assert len(splits) == buckets
    assert sorted(rows(splits)) == list(range(sum(partition_rows)))
    assert by_bucket(partition_rows, buckets, [buckets - 1]) == splits[-1:]


@pytest.mark.parametrize("number", [0, -1])
def test_a_split_holds_something(number: int) -> None:
    with pytest.raises(ApiError, match="SplitNumber"):
        by_size([10], 100, number, True)
    with pytest.raises(ApiError, match="SplitNumber"):
        by_parallelism([10], number, True)
    with pytest.raises(ApiError, match="has 2 buckets"):
        by_bucket([10], 2, [2])
