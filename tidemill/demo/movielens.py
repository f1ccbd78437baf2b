"""MovieLens-100k: its files, its terms, and its interactions in time order, cut into blocks that play the days."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from tidemill.errors import ConfigError, DataError
from tidemill.lineage.cycle import next_date

TERMS = (
    "MovieLens 100K was collected by the GroupLens Research Project at the University of Minnesota. Its terms: use it for research,"
    " name it in publications, imply no endorsement by the University of Minnesota or GroupLens, don't redistribute it without"
    " separate permission, and don't use it for commercial or revenue-bearing purposes without permission from GroupLens. It is"
    " read from your own copy; tidemill contains none of it. To be cited as: F. Maxwell Harper and Joseph A. Konstan, The MovieLens"
    " Datasets: History and Context, ACM Transactions on Interactive Intelligent Systems 5 (4), 2015, article 19,"
    " https://doi.org/10.1145/2827872."
)
BLOCK_ROWS = 10_000
LIKED = 4.0
"""Ratings from here on are the positive label."""

_NAME = "ml-100k"
_PACKAGE = "recbole"
_HISTORY = 20
_FIRST_DATE = "20000101"

FEATURES = ("user_id", "age", "gender", "occupation", "item_id", "genres", "release_year", "like_seq")
SCHEMA = pa.schema(
    [
        pa.field("event_id", pa.string()),
        pa.field("event_time", pa.float64()),
        pa.field("user_id", pa.string()),
        pa.field("age", pa.int64()),
        pa.field("gender", pa.string()),
        pa.field("occupation", pa.string()),
        pa.field("item_id", pa.string()),
        pa.field("genres", pa.string()),
        pa.field("release_year", pa.int64()),
        pa.field("like_seq", pa.string()),
        pa.field("click", pa.int64()),
        pa.field("is_random", pa.int8()),
    ]
)
"""`click`: 1 for a rating of 4 or 5. `is_random`: 1 everywhere, no model of ours chose what was rated. `like_seq`: the newest
movies that the user had liked before."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """All interactions in time order. Block k (from 1) is the table of the k-th date; the rest of the last block is left out."""

    rows: pa.Table
    block_rows: int

    @property
    def count(self) -> int:
        return self.rows.num_rows // self.block_rows

    @property
    def dates(self) -> tuple[str, ...]:
        """A business date for each block; only a name: the days of the data are not calendar days."""
        dates = [_FIRST_DATE]
        while len(dates) < self.count:
            dates.append(next_date(dates[-1]))
        return tuple(dates)

    def block(self, number: int) -> pa.Table:
        """The rows of a block."""
        return self.rows.slice((number - 1) * self.block_rows, self.block_rows)

    def boundary(self, number: int) -> float:
        """Event time at which a block ends: that of the next one's first row."""
        times = self.rows["event_time"]
        end = number * self.block_rows
        return times[end].as_py() if end < self.rows.num_rows else times[-1].as_py() + 1.0

    def first(self, count: int) -> Blocks:
        """Only the first blocks."""
        return Blocks(self.rows.slice(0, count * self.block_rows), self.block_rows)

    def write(self, number: int, folder: Path) -> None:
        """A block as the table of its day."""
        folder.mkdir(parents=True)
        pq.write_table(self.block(number), folder / "part-0.parquet", compression="zstd")


def find(folder: Path | None) -> Path:
    """Where the files are: in the folder that the user names, or in an installed recbole, which is never imported.

    Raises ConfigError, saying how to get them.
    """
    if folder is not None:
        for place in (folder, folder / _NAME):
            if (place / f"{_NAME}.inter").is_file():
                return place
        raise ConfigError(f"--data movielens:{folder}: no {_NAME}.inter there; it must hold {_NAME}.inter, .user and .item")
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == f"{_NAME}.inter" and Path(str(file.locate())).is_file():
            return Path(str(file.locate())).parent
    raise ConfigError(
        f"--data movielens: the files of MovieLens-100k aren't there. Install the package that holds them, without what it depends"
        f" on (`pip install --no-deps {_PACKAGE}==1.2.1`), or name a folder with {_NAME}.inter, .user and .item:"
        " `--data movielens:FOLDER`"
    )


def read(folder: Path, block_rows: int = BLOCK_ROWS) -> Blocks:
    """All interactions, with what was known of user and movie before each. Raises DataError for files of another form."""
    interactions = _read(folder / f"{_NAME}.inter", ("user_id", "item_id", "rating", "timestamp"))
    users = _read(folder / f"{_NAME}.user", ("user_id", "age", "gender", "occupation"))
    items = _read(folder / f"{_NAME}.item", ("item_id", "release_year", "class"))
    order = [("timestamp", "ascending"), ("user_id", "ascending"), ("item_id", "ascending")]
    times = pc.cast(interactions["timestamp"], pa.float64())
    ordered = interactions.set_column(interactions.schema.get_field_index("timestamp"), "timestamp", times).sort_by(order)
    user, item = _places(ordered["user_id"], users["user_id"]), _places(ordered["item_id"], items["item_id"])
    likes = pc.greater_equal(pc.cast(ordered["rating"], pa.float64()), LIKED)
    columns = {
        "event_id": [f"{number:06d}" for number in range(ordered.num_rows)],
        "event_time": _increasing(ordered["timestamp"].to_numpy()),
        "user_id": ordered["user_id"],
        "age": pc.cast(users["age"].take(user), pa.int64()),
        "gender": users["gender"].take(user),
        "occupation": users["occupation"].take(user),
        "item_id": ordered["item_id"],
        "genres": pc.replace_substring(items["class"].take(item), " ", ";"),
        "release_year": _years(items["release_year"].take(item)),
        "like_seq": _histories(ordered["user_id"].to_pylist(), ordered["item_id"].to_pylist(), likes.to_pylist()),
        "click": pc.cast(likes, pa.int64()),
        "is_random": np.ones(ordered.num_rows, np.int8),
    }
    return Blocks(pa.table(columns, SCHEMA).combine_chunks(), block_rows)


def _read(path: Path, columns: tuple[str, ...]) -> pa.Table:
    """An atomic file: tab-separated, `name:type` in the first line; all columns as text."""
    try:
        names = path.read_text(encoding="utf-8").partition("\n")[0].split("\t")
        types = pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
        table = pa_csv.read_csv(path, parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False), convert_options=types)
    except (OSError, UnicodeDecodeError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: can't read it as a tab-separated file: {error}") from None
    table = table.rename_columns([name.partition(":")[0] for name in names])
    missing = [name for name in columns if name not in table.column_names]
    if missing or not table.num_rows:
        raise DataError(f"{path}: lacks {', '.join(missing) or 'rows'}; it isn't a file of MovieLens-100k")
    return table.select(columns)


def _places(values: pa.ChunkedArray, keys: pa.ChunkedArray) -> pa.Array:
    places = pc.index_in(values, keys.combine_chunks())
    if places.null_count:
        missing = values.filter(pc.is_null(places))[0].as_py()
        raise DataError(f"MovieLens-100k: {missing!r} has interactions but no row in its own file")
    return places


def _increasing(times: np.ndarray) -> np.ndarray:
    """Sorted whole seconds, made distinct by milliseconds, so that a block can end between any two rows."""
    starts = np.flatnonzero(np.diff(times, prepend=times[0] - 1))
    within = np.arange(len(times)) - np.repeat(starts, np.diff(starts, append=len(times)))
    return times + within / 1000.0


def _years(years: pa.ChunkedArray) -> pa.ChunkedArray:
    """0 for movies without one."""
    return pc.cast(pc.if_else(pc.match_substring_regex(years, r"^\d+$"), years, "0"), pa.int64())


def _histories(users: list[str], items: list[str], likes: list[bool]) -> list[str]:
    """For each row, what its user had liked before, the newest last."""
    liked: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_HISTORY))
    histories = []
    for user, item, like in zip(users, items, likes, strict=True):
        histories.append(";".join(liked[user]))
        if like:
            liked[user].append(item)
    return histories
