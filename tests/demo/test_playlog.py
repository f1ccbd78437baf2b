from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tidemill.demo.playlog import ArrowLog, ArrowTail, PlayStatus, read_status, write_status

SCHEMA = pa.schema([("number", pa.int64())])


def test_a_tail_reads_what_is_there_and_then_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "log.arrows"
    tail = ArrowTail(path, SCHEMA)
    assert tail.read_new().num_rows == 0
    log = ArrowLog(path, SCHEMA)
    log.append([{"number": 1}, {"number": 2}])
    assert tail.read_new()["number"].to_pylist() == [1, 2]
    log.append([])
    assert tail.read_new().num_rows == 0
    log.append([{"number": 3}])
    assert tail.read()["number"].to_pylist() == [1, 2, 3]
    log.close()
    assert ArrowTail(path, SCHEMA).read()["number"].to_pylist() == [1, 2, 3]


def test_a_torn_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.arrows"
    log = ArrowLog(path, SCHEMA)
    log.append([{"number": 1}])
    whole = path.stat().st_size
    log.append([{"number": 2}])
    data = path.read_bytes()
    log.close()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        assert ArrowTail(path, SCHEMA).read()["number"].to_pylist() == [1]


def test_status(tmp_path: Path) -> None:
    assert read_status(tmp_path) == PlayStatus()
    status = PlayStatus(started_at=1.0, requests=3, complete_until=5.0)
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
