"""The shipped contract over a folder that is read as a stream."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from tidemill.config.data import FolderConfig
from tidemill.data.assignment import Assigned
from tidemill.data.progress import Progress
from tidemill.data.sources.folder import FolderSource
from tidemill.data.split import Split
from tidemill.testing.source_contract import SourceContract, numbered

FILES = {"a/1.parquet": (0, 20), "a/2.parquet": (20, 20), "b.arrow": (20, 31), "c.parquet": (31, 60)}


def write(path: Path, start: int, stop: int) -> None:
    path.parent.mkdir(exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    if path.suffix == ".arrow":
        pyarrow.feather.write_feather(numbered(start, stop), hidden, compression="lz4", chunksize=4)
    else:
        pq.write_table(numbered(start, stop), hidden, row_group_size=10)
    hidden.rename(path)


class TestFolder(SourceContract):
    def make(self, directory: Path) -> FolderSource:
        if not any(directory.iterdir()):
            for name, rows in FILES.items():
                write(directory / name, *rows)
        config = FolderConfig(pattern="*", num_splits=2, poll_s=0.01)
        return FolderSource(config, str(directory), {"event_id": None}, event_time_column="event_time")

    def num_rows(self) -> int:
        return 60

    def _left(self, directory: Path, splits: Sequence[Split], assigned: Sequence[Assigned], progress: Progress) -> int:
        source = self.make(directory)
        left = 0
        for part in assigned:
            number = int(part.split.id.name.rpartition(":")[2])
            own = sum(stop - start for name, (start, stop) in FILES.items() if source.split_of(name) == number)
            left += own - _rows_done(part)
        return left


def _rows_done(part: Assigned) -> int:
    """Positions done that are rows: those of a file begin at its number << 32."""
    sizes = {name: stop - start for name, (start, stop) in FILES.items()}
    files = part.split.fingerprint.get("files", {})
    done = 0
    for name, (number, *_) in files.items():
        first = number << 32
        rows = pa.array(range(first, first + sizes[name]), pa.int64()).to_numpy()
        done += int(part.done.holds(rows).sum()) if sizes[name] else 0
    return done
