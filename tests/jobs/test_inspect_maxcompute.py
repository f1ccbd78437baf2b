"""What `tidemill inspect` says of MaxCompute partitions: what was read, what is left, and through which session."""

from __future__ import annotations

from pathlib import Path

from tidemill.contracts.progress import DataloaderState, SplitState
from tidemill.jobs.inspect import inspect

PATH = "odps://prj/tables/clicks/ds=19&ds=18&ds=20"


def test_each_partition_shows_what_was_read_and_what_is_left(tmp_path: Path):
    states = [
        SplitState(
            kind="maxcompute",
            split=f"prj.clicks/{partition}",
            intervals=intervals,
            num_rows=rows,
            fingerprint={"input_path": PATH, "sess_idx": index, "session": f"S{index}", "rows": rows},
        )
        for index, (partition, rows, intervals) in enumerate(
            [("ds=19", 10_000, [(0, 10_000)]), ("ds=18", 0, []), ("ds=20", 10_000, [(0, 64), (5000, 5064)])]
        )
    ]
    file = tmp_path / "dataloader_state.json"
    file.write_bytes(DataloaderState(passes_completed=0, splits=states, watermark=None).to_bytes())
    found = inspect(str(file))
    assert found.faults == []
    tables = {section.title: section.rows for section in found.sections}
    assert tables["progress"] == [
        ("maxcompute", "prj.clicks/ds=19", "10,000 of 10,000 rows", "nothing"),
        ("maxcompute", "prj.clicks/ds=18", "0 of 0 rows", "nothing"),
        ("maxcompute", "prj.clicks/ds=20", "128 of 10,000 rows", "9,872 rows: 64 to 5,000, 5,064 to 10,000"),
    ]
    assert tables["read sessions"] == [
        ("prj.clicks/ds=19", "0", "S0"),
        ("prj.clicks/ds=18", "1", "S1"),
        ("prj.clicks/ds=20", "2", "S2"),
    ]
