"""Partition logs and stores without a network: sequences, recovery, fetch windows, offset compaction."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import StorageError
from tidemill.testing.broker.log import PartitionLog
from tidemill.testing.broker.protocol import ErrorCode, MalformedRequestError, RequestReader, ResponseWriter
from tidemill.testing.broker.records import HEADER_BYTES, read_header
from tidemill.testing.broker.store import CommittedOffset, FolderLock, OffsetKey, OffsetStore, TopicStore


def batch(num_records: int = 1, producer_id: int = -1, epoch: int = 0, sequence: int = 0, padding: int = 0) -> memoryview:
    """A record batch whose header is sound; its records are zeros."""
    body = b"\0" * (num_records + padding)
    last = num_records - 1
    length = HEADER_BYTES + len(body) - 12
    header = (77, length, 9, 2, 0, 0, last, 1000, 1000 + last, producer_id, epoch, sequence, num_records)
    return memoryview(struct.pack(">qiibIhiqqqhii", *header) + body)


@pytest.fixture
def log(tmp_path: Path):
    opened = PartitionLog(tmp_path / "0.log", fsync=False)
    yield opened
    opened.close()


def base_offsets(records: bytes) -> list[int]:
    offsets = []
    while records:
        header = read_header(records)
        assert header is not None
        offsets.append(header.base_offset)
        records = records[header.num_bytes :]
    return offsets


def test_offsets_are_given_without_gaps(log):
    assert [log.append(batch(n)).base_offset for n in (3, 1, 5)] == [0, 3, 4]
    assert log.next_offset == 9
    assert base_offsets(log.read(0, 10_000, at_least_one=False)) == [0, 3, 4]
    assert base_offsets(log.read(2, 10_000, at_least_one=False)) == [0, 3, 4]  # the batch that holds offset 2
    assert base_offsets(log.read(4, 10_000, at_least_one=False)) == [4]
    assert log.read(9, 10_000, at_least_one=True) == b""


@pytest.mark.parametrize(
    ("records", "error"),
    [
        (b"", ErrorCode.CORRUPT_MESSAGE),
        (b"x" * 200, ErrorCode.CORRUPT_MESSAGE),
        (bytes(batch())[:-1], ErrorCode.CORRUPT_MESSAGE),
        (bytes(batch()) * 2, ErrorCode.INVALID_RECORD),
        (bytes(batch())[:16] + b"\1" + bytes(batch())[17:], ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        (bytes(batch())[:23] + b"\xff\xff\xff\xfe" + bytes(batch())[27:], ErrorCode.CORRUPT_MESSAGE),
    ],
)
def test_what_is_no_batch_is_refused_and_leaves_nothing(log, records, error):
    assert log.append(memoryview(records)) == (error, -1)
    assert log.next_offset == 0
    assert log.path.stat().st_size == 0


def test_a_repeated_batch_gets_its_first_offset_again(log):
    log.append(batch(2))
    for sequence in range(0, 15, 3):
        log.append(batch(3, producer_id=5, sequence=sequence))
    assert log.append(batch(3, producer_id=5, sequence=3)) == (ErrorCode.NONE, 5)
    assert log.next_offset == 17


def test_a_gap_or_an_old_epoch_is_refused(log):
    log.append(batch(3, producer_id=5, epoch=1))
    assert log.append(batch(1, producer_id=5, epoch=1, sequence=4)).error is ErrorCode.OUT_OF_ORDER_SEQUENCE
    assert log.append(batch(1, producer_id=5, epoch=0, sequence=3)).error is ErrorCode.INVALID_PRODUCER_EPOCH
    assert log.append(batch(1, producer_id=5, epoch=2, sequence=3)).error is ErrorCode.OUT_OF_ORDER_SEQUENCE
    assert log.append(batch(1, producer_id=5, epoch=2, sequence=0)) == (ErrorCode.NONE, 3)
    assert log.append(batch(1, producer_id=6, sequence=0)) == (ErrorCode.NONE, 4)


def test_sequences_wrap(log):
    highest = 2**31 - 1
    log.append(batch(2, producer_id=5, sequence=highest - 1))
    assert log.append(batch(3, producer_id=5, sequence=0)) == (ErrorCode.NONE, 2)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    cut=st.integers(1, 400),
)
def test_recovery_keeps_exactly_the_whole_batches(tmp_path_factory, sizes, cut):
    path = tmp_path_factory.mktemp("recovery") / "0.log"
    log = PartitionLog(path, fsync=False)
    ends = []
    for number, size in enumerate(sizes):
        log.append(batch(size, producer_id=5, sequence=sum(sizes[:number]), padding=size))
        ends.append((path.stat().st_size, log.next_offset))
    log.close()
    left = max(path.stat().st_size - cut, 0)
    with path.open("r+b") as file:
        file.truncate(left)
    again = PartitionLog(path, fsync=False)
    try:
        expected_size, expected_offset = max([(0, 0), *(end for end in ends if end[0] <= left)])
        assert (path.stat().st_size, again.next_offset) == (expected_size, expected_offset)
        assert again.append(batch(1, producer_id=5, sequence=expected_offset)) == (ErrorCode.NONE, expected_offset)
    finally:
        again.close()


def test_a_tail_of_zeros_is_cut_off(tmp_path):
    path = tmp_path / "0.log"
    log = PartitionLog(path, fsync=True)
    log.append(batch(2))
    log.close()
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0" * 500)
    again = PartitionLog(path, fsync=True)
    assert (again.next_offset, path.stat().st_size) == (2, whole)
    again.close()


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    max_bytes=st.integers(0, 800),
    at_least_one=st.booleans(),
    data=st.data(),
)
def test_a_read_is_the_longest_run_of_batches_within_the_limit(tmp_path_factory, sizes, max_bytes, at_least_one, data):
    log = PartitionLog(tmp_path_factory.mktemp("read") / "0.log", fsync=False)
    try:
        stored = [(log.append(batch(size, padding=7 * size)).base_offset, HEADER_BYTES + 8 * size) for size in sizes]
        offset = data.draw(st.integers(0, log.next_offset - 1))
        wanted = [(base, length) for (base, length), size in zip(stored, sizes, strict=True) if base + size > offset]
        expected, total = [], 0
        for number, (base, length) in enumerate(wanted):
            if total + length > max_bytes and not (number == 0 and at_least_one):
                break
            expected.append(base)
            total += length
        assert base_offsets(log.read(offset, max_bytes, at_least_one)) == expected
    finally:
        log.close()


def test_committed_offsets_are_compacted_at_start_and_a_torn_line_is_left_out(tmp_path):
    key = OffsetKey("g", "t", 0)
    store = OffsetStore(tmp_path, fsync=False)
    for offset in range(100):
        store.commit(key, CommittedOffset(offset, "note"))
    store.commit(OffsetKey("g", "gone", 1), CommittedOffset(5, ""))
    store.forget_topic("gone")
    store.close()
    path = tmp_path / "offsets.jsonl"
    with path.open("a") as file:
        file.write('["g", "t", 0, 10')
    again = OffsetStore(tmp_path, fsync=False)
    assert again.get(key) == CommittedOffset(99, "note")
    assert again.keys("g") == [key]
    assert len(path.read_text().splitlines()) == 1
    again.close()


def test_remains_of_a_deleted_topic_do_not_come_back(tmp_path):
    remains = tmp_path / "topics" / "events" / "0.log"
    remains.parent.mkdir(parents=True)
    remains.write_bytes(bytes(batch(4)))
    store = TopicStore(tmp_path, fsync=False)
    assert store.names == []
    assert store.create("events", 1) is ErrorCode.NONE
    assert store.partitions("events")[0].next_offset == 0
    store.close()


def test_topics_and_starts_are_there_after_a_reopen(tmp_path):
    store = TopicStore(tmp_path, fsync=False)
    store.create("events", 2)
    log = store.partitions("events")[1]
    log.append(batch(5))
    assert store.delete_records(log, 3) is ErrorCode.NONE
    assert store.delete_records(log, 6) is ErrorCode.OFFSET_OUT_OF_RANGE
    store.close()
    again = TopicStore(tmp_path, fsync=False)
    assert [(p.start_offset, p.next_offset) for p in again.partitions("events")] == [(0, 0), (3, 5)]
    assert again.cluster_id == store.cluster_id
    again.close()


def test_producer_ids_are_never_given_twice(tmp_path):
    store = TopicStore(tmp_path, fsync=False)
    store.create("events", 1)
    far_ahead = store.new_producer_id() + 10**9
    store.partitions("events")[0].append(batch(1, producer_id=far_ahead))
    store.close()
    again = TopicStore(tmp_path, fsync=False)
    assert again.new_producer_id() > far_ahead
    again.close()


def test_a_folder_has_one_writer(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(StorageError, match="stop that one or use another folder"):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


@given(st.binary(max_size=60))
def test_a_reader_of_any_bytes_ends_or_says_so(data):
    reader = RequestReader(memoryview(data))
    try:
        reader.array(lambda: (reader.string(), reader.data(), reader.array(reader.int64)))
    except MalformedRequestError:
        return
    assert len(data) >= 4


def test_an_array_longer_than_its_request_is_refused_at_once():
    reader = RequestReader(memoryview(ResponseWriter().int32(2**31 - 1).chunks[0]))
    with pytest.raises(MalformedRequestError, match="array of 2147483647 items in 0 bytes"):
        reader.array(lambda: None)
