"""Event times of columns, and those that can't be true."""

import numpy as np
import pyarrow as pa
import pytest

from tidemill.data.event_times import FirstTimes, column_times, usable
from tidemill.errors import DataError

NOW = 1_700_000_000


def times(values):
    return column_times(pa.chunked_array([values]), where="day.parquet: column 'time'")


@pytest.mark.parametrize(
    ("per_second", "unit"), [(1000, "milliseconds"), (1_000_000, "microseconds"), (1_000_000_000, "nanoseconds")]
)
@pytest.mark.parametrize("dtype", [pa.int64(), pa.float64()])
def test_a_column_in_another_unit_is_an_error_that_says_so(per_second, unit, dtype):
    values = pa.array([NOW * per_second, None, *range(NOW * per_second, NOW * per_second + 150)], pa.int64()).cast(
        dtype, safe=False
    )
    with pytest.raises(
        DataError, match=rf"column 'time': none of 151 event times can be Unix seconds, for example 17\d+: .*{unit}"
    ):
        times(values)


def test_infinities_are_an_error_too():
    with pytest.raises(DataError, match="for example inf: Give Unix seconds"):
        times(pa.array([np.inf] * 100))


def test_a_few_wrong_times_are_counted_only():
    few = times(pa.array([NOW * 1000] * 99))
    some = times(pa.array([NOW * 1000] * 500 + [NOW]))
    assert usable(few, np.inf)[1] == 99
    kept, refused = usable(some, np.inf)
    assert refused == 500
    assert np.nansum(kept) == NOW


def test_wrong_times_in_many_small_reads_are_an_error_too():
    """Messages of a few rows each: the first hundred rows tell, unless one of them is right."""
    wrong = np.array([1.77e12, np.nan])
    first = FirstTimes()
    for _ in range(99):
        first.look(wrong, where="clicks")
    with pytest.raises(DataError, match=r"clicks: none of 100 event times can be Unix seconds.*milliseconds"):
        first.look(wrong, where="clicks")
    first = FirstTimes()
    for number in range(300):
        first.look(np.array([1.77e9]) if number == 50 else wrong, where="clicks")


def test_nulls_alone_are_no_error():
    assert np.isnan(times(pa.nulls(200, pa.float64()))).all()
    assert np.isnan(times(pa.array([np.nan] * 200))).all()
