from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.data.click_world import CHUNK_ROWS, DAY_S, HISTORY_LENGTH, SCHEMA, Histories, World, WorldConfig, write_day
from tidemill.data.intervals import IntervalSet
from tidemill.data.sources.synthetic import SyntheticSource
from tidemill.data.split import RawBatch, Split
from tidemill.errors import ConfigError, DataError, SourceChangedError
from tidemill.registry import resolve

ROWS = 3 * CHUNK_ROWS + 1000


@pytest.fixture(scope="module")
def world() -> World:
    return World(seed=1)


@pytest.fixture(scope="module")
def table(world: World) -> pa.Table:
    return world.day_table(2, ROWS)


def auc(clicks: np.ndarray, scores: np.ndarray) -> float:
    """Probability that a clicked row scores above another one; no ties expected."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positives = clicks.sum()
    return float((ranks[clicks].sum() - positives * (positives + 1) / 2) / (positives * (len(clicks) - positives)))


def column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy(zero_copy_only=False)


def numbers(ids: np.ndarray) -> np.ndarray:
    return np.array([int(text[1:]) for text in ids])


# ---- the world


def test_same_seed_gives_the_same_table_and_another_seed_another(table: pa.Table) -> None:
    assert World(seed=1).day_table(2, ROWS).equals(table)
    assert not World(seed=2).day_table(2, ROWS)["click"].equals(table["click"])


def test_chunks_do_not_depend_on_where_reading_begins(world: World, table: pa.Table) -> None:
    rest = pa.Table.from_batches(list(world.chunks(2, ROWS, first_chunk=2)))
    assert rest.equals(table.slice(2 * CHUNK_ROWS))


def test_table_has_the_schema_and_unique_event_ids(table: pa.Table) -> None:
    assert table.schema == SCHEMA
    assert table.num_rows == ROWS
    assert len(set(table["event_id"].to_pylist())) == ROWS
    assert all(table[name].null_count == 0 for name in SCHEMA.names)


def test_event_times_cover_the_day_in_order(world: World, table: pa.Table) -> None:
    times = column(table, "event_time")
    start = world.day_start(2)
    assert (np.diff(times) > 0).all()
    assert start <= times[0] < start + 60
    assert start + DAY_S - 60 < times[-1] < start + DAY_S
    assert (column(table, "hour") == (times - start) // 3600).all()


def test_only_living_items_are_shown_and_all_of_them(world: World, table: pa.Table) -> None:
    times, items = column(table, "event_time"), numbers(column(table, "item_id"))
    for hour in (0, 11, 23):
        start = world.day_start(2) + hour * 3600
        shown = set(items[(times >= start) & (times < start + 3600)])
        alive = set(world.alive_items(start))
        assert shown <= alive
        assert len(shown) > 0.8 * len(alive)


def test_items_are_born_at_midnight_and_through_the_day(world: World, table: pa.Table) -> None:
    config, midnight = world.config, world.day_start(2)
    before, after = (set(world.alive_items(time)) for time in (midnight - 1, midnight))
    assert len(after - before) == config.born_at_midnight
    assert len(set(world.alive_items(midnight + 3600)) - after) == config.born_each_hour
    unknown = numbers(column(table, "item_id")) > max(before)
    assert 0.28 < unknown.mean() < 0.40


def test_probability_is_calibrated_in_every_decile(table: pa.Table) -> None:
    clicks, probabilities = column(table, "click"), column(table, "true_probability")
    for rows in np.array_split(np.argsort(probabilities), 10):
        expected = probabilities[rows].mean()
        error = np.sqrt((probabilities[rows] * (1 - probabilities[rows])).sum()) / len(rows)
        assert abs(clicks[rows].mean() - expected) < 4 * error


def test_probability_of_a_row_can_be_asked_again(world: World, table: pa.Table) -> None:
    users, items = numbers(column(table, "user_id")), numbers(column(table, "item_id"))
    again = world.true_probability(users, items, column(table, "event_time"))
    assert (again == column(table, "true_probability")).all()
    assert ((again > 0) & (again < 1)).all()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_knowing_all_of_yesterday_is_clearly_worse_than_knowing_today(seed: int) -> None:
    world = World(seed)
    table = world.day_table(2, ROWS)
    clicks = column(table, "click").astype(bool)
    best = auc(clicks, column(table, "true_probability"))
    # Yesterday's last hour, with some item of the same category in place of one that wasn't born yet.
    users, items = numbers(column(table, "user_id")), numbers(column(table, "item_id"))
    last_hour = world.day_start(2) - 1
    known = world.alive_items(last_hour)
    stand_in = np.array([known[world.categories[known] == c][0] for c in range(world.config.num_categories)])
    seen = np.where(items > known[-1], stand_in[world.categories[items]], items)
    stale = auc(clicks, world.true_probability(users, seen, last_hour))
    assert 0.75 < best < 0.82
    assert stale < best - 0.05


def test_taste_fades_with_the_hours(world: World) -> None:
    rng = np.random.default_rng(0)
    users = rng.integers(world.config.num_users, size=5000)
    items = rng.choice(world.alive_items(world.day_start(2)), 5000)

    def moved(hours: float) -> float:
        now, then = (world.true_probability(users, items, world.day_start(2) + h * 3600) for h in (0, hours))
        return float(np.abs(np.log(now / (1 - now)) - np.log(then / (1 - then))).mean())

    assert moved(0.5) == 0
    assert 0 < moved(1) < moved(6) < moved(24)


def test_times_outside_the_world_are_refused(world: World) -> None:
    with pytest.raises(DataError, match="day 8 is outside"):
        world.day_start(8)
    with pytest.raises(DataError, match="leave the click world"):
        world.alive_items(world.config.start_time + 8 * DAY_S)


def test_config_must_start_at_midnight() -> None:
    with pytest.raises(ConfigError, match="midnight"):
        World(1, WorldConfig(start_time=5.0))


def test_another_size_of_world_works() -> None:
    world = World(3, WorldConfig(num_users=10, num_alive=20, born_at_midnight=5, born_each_hour=1, num_categories=2))
    table = world.day_table(0, 500)
    assert table.num_rows == 500
    assert len(world.alive_items(world.day_start(0))) == 20


# ---- histories


def test_histories_hold_exactly_the_clicks_before_the_row(world: World, table: pa.Table) -> None:
    recent: dict[str, list[str]] = {}
    before = world.histories(2).get(np.arange(world.config.num_users)).to_pylist()
    for user, text in zip(world.user_ids.to_pylist(), before, strict=True):
        recent[user] = text.split(";") if text else []
    names = ["user_id", "item_id", "click", "click_seq"]
    for user, item, click, history in zip(*(table[name].to_pylist() for name in names), strict=True):
        assert history == ";".join(recent[user])
        if click:
            recent[user] = [*recent[user], item][-HISTORY_LENGTH:]


def test_days_begin_with_histories_of_items_alive_the_day_before(world: World) -> None:
    for day in (0, 3):
        texts = world.histories(day).get(np.arange(world.config.num_users)).to_pylist()
        assert np.mean([len(text.split(";")) for text in texts if text]) > 10
        items = numbers(np.array([item for text in texts if text for item in text.split(";")]))
        assert items.max() <= world.alive_items(world.day_start(day))[-1] - world.config.born_at_midnight * (day > 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12), max_size=5))
def test_updates_keep_the_newest_clicks_in_order(batches: list[list[tuple[int, int]]]) -> None:
    histories = Histories(pa.array([f"i{n}" for n in range(10)]), num_users=4, length=3)
    expected: list[list[str]] = [[], [], [], []]
    for batch in batches:
        users, items = (np.array([pair[k] for pair in batch], np.int64) for k in (0, 1))
        histories.update(users, items)
        for user, item in batch:
            expected[user] = [*expected[user], f"i{item}"][-3:]
    assert histories.get(np.arange(4)).to_pylist() == [";".join(items) for items in expected]


# ---- the closed loop


def test_rows_shown_by_a_player_look_like_those_of_a_table(world: World) -> None:
    rng = np.random.default_rng(5)
    histories = world.histories(2)
    times = world.day_start(2) + np.arange(8.0)
    users = np.full(8, 7)
    shown = world.show(users, world.random_items(times, rng), times, rng)
    rows = world.rows(pa.array([f"s-{n}" for n in range(8)]), shown, histories.play(shown), np.zeros(8, np.int8))
    assert rows.schema == SCHEMA
    after = histories.get(np.array([7]))[0].as_py().split(";")
    clicked = [item for item, click in zip(rows["item_id"].to_pylist(), rows["click"].to_pylist(), strict=True) if click]
    assert clicked == after[len(after) - len(clicked) :]
    user = world.user_columns(np.array([7]), times[0], histories.get(np.array([7])))
    assert user["user_id"].to_pylist() == ["u00007"]
    assert world.item_columns(shown.items)["category_id"].equals(rows["category_id"])


# ---- Parquet


@pytest.mark.parametrize(("num_rows", "num_files"), [(ROWS, 4), (10, 3), (2, 4)])
def test_written_days_hold_the_table_in_order(world: World, tmp_path: Path, num_rows: int, num_files: int) -> None:
    paths = write_day(world, 2, tmp_path / "day", num_rows, num_files)
    assert [path.name for path in paths] == [f"part-{n}.parquet" for n in range(num_files)]
    parts = [pq.read_table(path) for path in paths]
    sizes = [part.num_rows for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert pa.concat_tables(parts).equals(world.day_table(2, num_rows))


# ---- the source


def source(**settings: int) -> SyntheticSource:
    return SyntheticSource(SyntheticSource.Config(**{"seed": 1, "day": 2, "num_rows": ROWS, "num_splits": 2, **settings}))


def read_all(synthetic: SyntheticSource, split: Split, remaining: IntervalSet) -> list[RawBatch]:
    reader = synthetic.open(split, remaining, IntervalSet())
    batches: list[RawBatch] = []
    try:
        while True:
            batches.append(reader.read(1.0))
    except EOFError:
        reader.close()
    return batches


def test_splits_together_are_the_table(table: pa.Table) -> None:
    synthetic = source()
    splits = synthetic.discover()
    assert len(splits) == 2
    assert sum(split.num_rows for split in splits) == ROWS
    batches = [b for split in splits for b in read_all(synthetic, split, IntervalSet.of([(0, split.num_rows)]))]
    assert pa.concat_tables([batch.table for batch in batches]).equals(table)


def test_there_are_no_more_splits_than_chunks() -> None:
    assert [split.num_rows for split in source(num_rows=10, num_splits=8).discover()] == [10]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2 * CHUNK_ROWS), st.integers(0, 3000)), max_size=3))
def test_exactly_the_remaining_rows_are_given(intervals: list[tuple[int, int]]) -> None:
    synthetic = source()
    first, split = synthetic.discover()
    remaining = IntervalSet.of(
        (start, min(start + length, split.num_rows)) for start, length in intervals if start < split.num_rows
    )
    batches = read_all(synthetic, split, remaining)
    assert all(run.split == split.id for batch in batches for run in batch.runs)
    runs = [run for batch in batches for run in batch.runs]
    assert IntervalSet.of((run.start, run.stop) for run in runs) == remaining
    assert sum(run.rows for run in runs) == remaining.count()
    expected = [f"20260304-{first.num_rows + n}" for start, stop in remaining for n in range(start, stop)]
    assert [event for batch in batches for event in batch.table["event_id"].to_pylist()] == expected
    for batch in batches:
        assert (batch.event_time == batch.table["event_time"].to_numpy()).all()
        ends = np.cumsum([run.rows for run in batch.runs])
        assert [run.event_time for run in batch.runs] == batch.event_time[ends - 1].tolist()


def test_a_changed_config_is_refused() -> None:
    split = source().discover()[1]
    synthetic = source(num_rows=ROWS - 1)
    with pytest.raises(SourceChangedError, match="table_rows was 50152, is 50151"):
        synthetic.verify(synthetic.discover()[1], split.fingerprint)
    with pytest.raises(SourceChangedError, match="isn't a split"):
        source(seed=9).open(split, None, IntervalSet())
    with pytest.raises(SourceChangedError, match="was read before"):
        source().open(split, IntervalSet(), IntervalSet.of([(0, split.num_rows + 1)]))


def test_the_registry_knows_the_source() -> None:
    assert resolve("source", "synthetic") is SyntheticSource
