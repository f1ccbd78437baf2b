"""A small world of users who click, in which the true click probability of every impression is known.

The log odds of a click are a sum of what an item is worth, what a user is like, and what is in fashion:

    bias + user + price sensitivity(age level) * price + hour of day x category
         + item quality(hour) + category trend(hour) + taste(hidden segment, category, hour)

The parts marked (hour) drift: each is a stationary first-order random walk over the hours, so a model that stopped
learning yesterday is worse today. Items are numbered in the order of their birth and only the newest `num_alive` are
shown, so what is alive at an hour is one range of numbers: a batch is born at midnight, the rest hour by hour.

Users and items are numbers here, and strings ("u00042", "i00007") in tables. Everything follows from (seed, day, chunk):
a chunk is `CHUNK_ROWS` consecutive rows of one day's table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tidemill.errors import ConfigError, DataError

HOUR_S = 3600
DAY_S = 24 * HOUR_S
CHUNK_ROWS = 16384
HISTORY_LENGTH = 20
NUM_AGE_LEVELS = 6
# Hours before day 0 for which the world exists, so that day 0 begins with histories too.
_LEAD_HOURS = 24
# First words of the random streams: the world itself, the rows of a table, the evening before a day.
_WORLD, _TABLE, _EVENING = 0, 1, 2

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FEATURE_FIELDS = (
    pa.field("user_id", pa.string()),
    pa.field("age_level", pa.int64()),
    pa.field("hour", pa.int64()),
    pa.field("click_seq", pa.string()),
    pa.field("item_id", pa.string()),
    pa.field("category_id", pa.string()),
    pa.field("price", pa.float64()),
)
SCHEMA = pa.schema(
    [
        pa.field("event_id", pa.string()),
        pa.field("event_time", pa.float64()),
        *FEATURE_FIELDS,
        pa.field("click", pa.int64()),
        pa.field("is_random", pa.int8()),
        pa.field("true_probability", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The constants of the world. Standard deviations are in log odds; memories are in hours.

    Chosen so that on a day whose eve a small model was trained on, a third of the impressions show items that it never
    saw, and what it knew of trend and taste has faded: AUC near 0.67 if it stays as it was, near 0.73 if it learns on,
    0.79 at best.
    """

    start_time: float = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
    num_days: int = 8
    num_users: int = 2000
    num_segments: int = 6
    num_categories: int = 12
    num_alive: int = 800
    born_at_midnight: int = 200
    born_each_hour: int = 6
    bias: float = -1.2
    user_std: float = 0.25
    price_std: float = 0.2
    hour_std: float = 0.15
    quality_std: float = 1.0
    quality_drift_std: float = 0.3
    quality_memory: float = 24.0
    trend_std: float = 0.7
    trend_memory: float = 16.0
    taste_std: float = 0.3
    taste_memory: float = 24.0
    evening_rows_per_user: int = 60


@dataclass(frozen=True, slots=True)
class Impressions:
    """Who was shown what and when, in time order; how likely a click was, and whether it came. One element an impression."""

    event_times: Floats
    users: Ints
    items: Ints
    probabilities: Floats
    clicks: NDArray[np.bool_]


class Histories:
    """The last `length` items that each user clicked, oldest first. Not thread-safe."""

    def __init__(self, item_ids: pa.StringArray, num_users: int, length: int = HISTORY_LENGTH) -> None:
        self._item_ids = item_ids
        self._length = length
        # Right-aligned, so that appending is a shift; -1 is an empty place.
        self._recent = np.full((num_users, length), -1, np.int64)

    def get(self, users: Ints) -> pa.StringArray:
        """One string a user: item ids joined by ';', the newest last; empty before the first click."""
        return self._join(self._recent[users])

    def update(self, users: Ints, items: Ints) -> None:
        """Append clicked items; `users` may repeat, and within a user the given order is the order of the clicks."""
        self._replay(users, items, np.ones(len(users), np.bool_))

    def play(self, shown: Impressions) -> pa.StringArray:
        """The history before each row, clicks of earlier rows of `shown` included; then append all their clicks."""
        return self._join(self._replay(shown.users, shown.items, shown.clicks))

    def _replay(self, users: Ints, items: Ints, clicks: NDArray[np.bool_]) -> Ints:
        """Histories [rows, length] before each row. Lays out, user by user, the known history and then the new clicks:
        the history before a row is the window of that layout that ends at the row's own clicks so far."""
        length = self._length
        seen, place = np.unique(users, return_inverse=True)
        order = np.argsort(place, kind="stable")
        clicked = order[clicks[order]]
        new = np.bincount(place[clicked], minlength=len(seen))
        first_click = np.cumsum(new) - new
        starts = first_click + length * np.arange(len(seen))
        layout = np.empty(len(seen) * length + len(clicked), np.int64)
        layout[starts[:, None] + np.arange(length)] = self._recent[seen]
        layout[np.arange(len(clicked)) + length * (place[clicked] + 1)] = items[clicked]

        sorted_clicks = clicks[order].astype(np.int64)
        before = np.empty(len(users), np.int64)
        before[order] = np.cumsum(sorted_clicks) - sorted_clicks
        windows = layout[(before + length * place)[:, None] + np.arange(length)]
        self._recent[seen] = layout[(starts + new)[:, None] + np.arange(length)]
        return windows

    def _join(self, windows: Ints) -> pa.StringArray:
        present = windows >= 0
        offsets = np.zeros(len(windows) + 1, np.int32)
        np.cumsum(present.sum(axis=1), out=offsets[1:])
        lists = pa.ListArray.from_arrays(pa.array(offsets), self._item_ids.take(pa.array(windows[present])))
        return pc.binary_join(lists, ";")


class World:
    """Users, items and their tastes over `num_days` days. Immutable after construction, so threads may share it."""

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        config = config or WorldConfig()
        _check(config)
        self.seed = seed
        self.config = config
        rng = np.random.default_rng([seed, _WORLD])
        hours = _LEAD_HOURS + 24 * config.num_days
        self._first_alive = _first_alive(config, hours)
        num_items = int(self._first_alive[-1]) + config.num_alive
        self.user_ids = _names("u", config.num_users)
        self.item_ids = _names("i", num_items)
        self.category_ids = _names("c", config.num_categories)
        self.categories: Ints = rng.integers(config.num_categories, size=num_items)
        self.prices: Floats = rng.lognormal(3.0, 0.5, num_items).round(2)
        self.age_levels: Ints = rng.integers(NUM_AGE_LEVELS, size=config.num_users)
        self._segments: Ints = rng.integers(config.num_segments, size=config.num_users)
        self._user_effects = rng.normal(0.0, config.user_std, config.num_users)
        sensitivity = np.linspace(-config.price_std, config.price_std, NUM_AGE_LEVELS)
        self._price_effects = sensitivity[:, None] * ((np.log(self.prices) - 3.0) / 0.5)
        self._hour_effects = rng.normal(0.0, config.hour_std, (24, config.num_categories))
        self._quality = rng.normal(0.0, config.quality_std, num_items) + _drift(
            rng, (hours, num_items), config.quality_drift_std, config.quality_memory
        )
        self._taste = _drift(rng, (hours, config.num_segments, config.num_categories), config.taste_std, config.taste_memory)
        self._taste += _drift(rng, (hours, 1, config.num_categories), config.trend_std, config.trend_memory)

    def day_start(self, day: int) -> float:
        """Event time at which a day begins. Raises DataError for a day outside the world."""
        if not 0 <= day < self.config.num_days:
            raise DataError(f"day {day} is outside the click world: it has days 0 to {self.config.num_days - 1}")
        return self.config.start_time + day * DAY_S

    def alive_items(self, event_time: float) -> Ints:
        """The items that can be shown at a time: a range of numbers, the oldest first."""
        first = int(self._first_alive[self._hours(np.asarray([event_time]))[0]])
        return np.arange(first, first + self.config.num_alive)

    def true_probability(self, users: Ints, items: Ints, event_time: float | Floats) -> Floats:
        """Click probability of each (user, item) at its time; one time may stand for all. An item keeps a probability
        when it is no longer alive, since it may still stand in a list that was made when it was."""
        hours = self._hours(np.broadcast_to(np.asarray(event_time, np.float64), np.shape(users)))
        categories = self.categories[items]
        log_odds = (
            self.config.bias
            + self._user_effects[users]
            + self._price_effects[self.age_levels[users], items]
            + self._hour_effects[hours % 24, categories]
            + self._quality[hours, items]
            + self._taste[hours, self._segments[users], categories]
        )
        return 1.0 / (1.0 + np.exp(-log_odds))

    def random_items(self, event_times: Floats, rng: np.random.Generator) -> Ints:
        """For each time one of the items alive then, all equally likely."""
        first = self._first_alive[self._hours(event_times)]
        return first + rng.integers(self.config.num_alive, size=first.shape)

    def show(self, users: Ints, items: Ints, event_times: Floats, rng: np.random.Generator) -> Impressions:
        """Show items to users, who click or don't by the true probability."""
        probabilities = self.true_probability(users, items, event_times)
        return Impressions(event_times, users, items, probabilities, rng.random(len(users)) < probabilities)

    def histories(self, day: int) -> Histories:
        """Every user's history as a day begins: what random impressions of the day before left behind."""
        histories = Histories(self.item_ids, self.config.num_users)
        num_rows = self.config.evening_rows_per_user * self.config.num_users
        for chunk in range(num_chunks(num_rows)):
            shown = self._draw(_EVENING, self.day_start(day) - DAY_S, chunk, num_rows)
            histories.update(shown.users[shown.clicks], shown.items[shown.clicks])
        return histories

    def draw(self, day: int, chunk: int, num_rows: int) -> Impressions:
        """The chunk's rows of a day's table of `num_rows` rows: uniformly random users and alive items, event times
        spread evenly over the day. Depends on nothing but the seed and the arguments."""
        return self._draw(_TABLE, self.day_start(day), chunk, num_rows)

    def chunks(self, day: int, num_rows: int, first_chunk: int = 0) -> Iterator[pa.RecordBatch]:
        """A day's table as one batch (schema SCHEMA) a chunk, in time order, beginning with `first_chunk`: earlier
        chunks are drawn too, since their clicks are in the histories, but cost far less than reading them."""
        histories = self.histories(day)
        date = self.date(day)
        for chunk in range(num_chunks(num_rows)):
            shown = self.draw(day, chunk, num_rows)
            if chunk < first_chunk:
                histories.update(shown.users[shown.clicks], shown.items[shown.clicks])
                continue
            rows = np.arange(len(shown.users)) + chunk * CHUNK_ROWS
            event_ids = pc.binary_join_element_wise(date, pa.array(rows).cast(pa.string()), "-")
            yield self.rows(event_ids, shown, histories.play(shown), np.ones(len(rows), np.int8))

    def day_table(self, day: int, num_rows: int) -> pa.Table:
        """A day's table (schema SCHEMA) of random impressions, in time order."""
        return pa.Table.from_batches(list(self.chunks(day, num_rows)), SCHEMA)

    def date(self, day: int) -> str:
        """A day's name, such as 20260303; its event ids are "<date>-<row>"."""
        return datetime.fromtimestamp(self.day_start(day), UTC).strftime("%Y%m%d")

    def user_columns(self, users: Ints, event_time: float | Floats, click_seq: pa.StringArray) -> dict[str, pa.Array]:
        """Raw feature columns that belong to the user and the moment."""
        hours = self._hours(np.broadcast_to(np.asarray(event_time, np.float64), np.shape(users))) % 24
        return {
            "user_id": self.user_ids.take(pa.array(users)),
            "age_level": pa.array(self.age_levels[users]),
            "hour": pa.array(hours),
            "click_seq": click_seq,
        }

    def item_columns(self, items: Ints) -> dict[str, pa.Array]:
        """Raw feature columns that belong to the item."""
        return {
            "item_id": self.item_ids.take(pa.array(items)),
            "category_id": self.category_ids.take(pa.array(self.categories[items])),
            "price": pa.array(self.prices[items]),
        }

    def rows(
        self, event_ids: pa.StringArray, shown: Impressions, click_seq: pa.StringArray, is_random: NDArray[np.int8]
    ) -> pa.RecordBatch:
        """Complete rows (schema SCHEMA), as they stand in a table or flow through a topic. `click_seq`: the histories
        before each impression."""
        columns = {
            "event_id": event_ids,
            "event_time": pa.array(shown.event_times),
            **self.user_columns(shown.users, shown.event_times, click_seq),
            **self.item_columns(shown.items),
            "click": pa.array(shown.clicks.astype(np.int64)),
            "is_random": pa.array(is_random),
            "true_probability": pa.array(shown.probabilities),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    def _draw(self, stream: int, start: float, chunk: int, num_rows: int) -> Impressions:
        day = round((start - self.config.start_time) / DAY_S) + 1
        rng = np.random.default_rng([self.seed, stream, day, chunk])
        rows = np.arange(chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, num_rows))
        times = start + DAY_S * (rows + rng.random(len(rows))) / num_rows
        # The sum may round up to midnight, which is the next day's.
        times = np.minimum(times, np.nextafter(start + DAY_S, start))
        users = rng.integers(self.config.num_users, size=len(rows))
        return self.show(users, self.random_items(times, rng), times, rng)

    def _hours(self, event_times: Floats) -> Ints:
        """Hours since the world began. Raises DataError for a time outside it."""
        hours = np.floor((event_times - self.config.start_time) / HOUR_S).astype(np.int64) + _LEAD_HOURS
        if hours.size and not (hours.min() >= 0 and hours.max() < len(self._first_alive)):
            raise DataError(
                f"event times {event_times.min()} to {event_times.max()} leave the click world: it lasts from "
                f"{self.config.start_time} for {self.config.num_days} days"
            )
        return hours


def num_chunks(num_rows: int) -> int:
    """Chunks of a table of `num_rows` rows; the last one may be short."""
    return -(-num_rows // CHUNK_ROWS)


def write_day(world: World, day: int, folder: Path, num_rows: int, num_files: int = 4) -> list[Path]:
    """Write a day's table into `folder` as `part-<n>.parquet`, in time order; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part-{n}.parquet" for n in range(num_files)]
    batches = world.chunks(day, num_rows)
    rest = pa.Table.from_batches([], SCHEMA)
    for n, path in enumerate(paths):
        wanted = num_rows * (n + 1) // num_files - num_rows * n // num_files
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
            while wanted:
                if not rest.num_rows:
                    rest = pa.Table.from_batches([next(batches)])
                part = rest.slice(0, wanted)
                writer.write_table(part)
                rest = rest.slice(part.num_rows)
                wanted -= part.num_rows
    return paths


def _names(prefix: str, count: int) -> pa.StringArray:
    return pa.array([f"{prefix}{n:05d}" for n in range(count)], pa.string())


def _first_alive(config: WorldConfig, hours: int) -> Ints:
    """The oldest item alive at each hour: each birth ends the oldest item's life."""
    births = np.full(hours, config.born_each_hour, np.int64)
    births[::24] = config.born_at_midnight
    births[0] = 0
    return np.cumsum(births)


def _drift(rng: np.random.Generator, shape: tuple[int, ...], std: float, memory: float) -> Floats:
    """Independent random walks along the first axis with that standard deviation at every hour; the correlation
    between two hours is exp(-distance / memory) (an Ornstein-Uhlenbeck process at whole hours)."""
    keep = np.exp(-1.0 / memory)
    walks = rng.normal(0.0, std, shape)
    walks[1:] *= np.sqrt(1.0 - keep**2)
    for hour in range(1, shape[0]):
        walks[hour] += keep * walks[hour - 1]
    return walks


def _check(config: WorldConfig) -> None:
    if config.start_time % DAY_S:
        raise ConfigError(f"start_time {config.start_time} isn't a midnight (UTC)")
    for name in ("num_days", "num_users", "num_segments", "num_categories", "num_alive"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}, but a click world needs at least 1")
