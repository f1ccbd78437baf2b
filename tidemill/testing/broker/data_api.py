"""Requests about records: Produce, Fetch, ListOffsets, InitProducerId."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from tidemill.testing.broker.log import Appended, PartitionLog
from tidemill.testing.broker.protocol import ErrorCode, RequestReader, ResponseWriter
from tidemill.testing.broker.state import Broker, Call

_LATEST, _EARLIEST = -1, -2


class _FetchPartition(NamedTuple):
    partition: int
    offset: int
    max_bytes: int


class _FetchTopic(NamedTuple):
    name: str
    partitions: list[_FetchPartition]


class _FetchRequest(NamedTuple):
    max_wait_s: float
    min_bytes: int
    max_bytes: int
    topics: list[_FetchTopic]


class _Fetched(NamedTuple):
    error: int
    high_watermark: int = -1
    start_offset: int = -1
    records: bytes = b""


async def produce(broker: Broker, call: Call) -> ResponseWriter | None:
    body = call.body
    body.nullable_string()  # transactional id
    acks = body.int16()
    body.int32()  # timeout: every append is done before the answer

    def read_partition() -> tuple[int, memoryview]:
        return body.int32(), body.data()

    topics = body.array(lambda: (body.string(), body.array(read_partition)))
    response = ResponseWriter().int32(len(topics))
    for topic, partitions in topics:
        response.string(topic).int32(len(partitions))
        for index, records in partitions:
            appended = _append(broker, call, broker.topics.partition(topic, index), records)
            response.int32(index).int16(appended.error).int64(appended.base_offset).int64(-1)
            if call.version >= 5:
                response.int64(0)  # log start offset
    if call.version >= 1:
        response.int32(0)
    return response if acks else None


def _append(broker: Broker, call: Call, log: PartitionLog | None, records: memoryview) -> Appended:
    if call.error:
        return Appended(call.error, -1)
    if log is None:
        return Appended(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)
    broker.counts["bytes_in"] += len(records)
    return log.append(records)


async def fetch(broker: Broker, call: Call) -> ResponseWriter:
    """Answers once min_bytes are there, an error is to be told, or the client's longest wait is over."""
    request = _read_fetch(call.body, call.version)
    deadline = time.monotonic() + request.max_wait_s
    while True:
        fetched = _fetch_once(broker, call.error, request)
        flat = [result for topic in fetched for result in topic]
        enough = sum(len(result.records) for result in flat) >= request.min_bytes
        remaining_s = deadline - time.monotonic()
        if enough or remaining_s <= 0 or any(result.error for result in flat):
            break
        await _wait_for_append(broker, request, remaining_s)
    broker.counts["bytes_out"] += sum(len(result.records) for result in flat)
    return _write_fetch(request, fetched, call.version)


def _read_fetch(body: RequestReader, version: int) -> _FetchRequest:
    body.int32()  # replica id
    max_wait_ms, min_bytes = body.int32(), body.int32()
    max_bytes = body.int32() if version >= 3 else 2**31 - 1
    if version >= 4:
        body.int8()  # isolation level: there are no transactions
    if version >= 7:
        body.int32(), body.int32()  # fetch session id and epoch: every fetch is a full one

    def read_partition() -> _FetchPartition:
        index = body.int32()
        if version >= 9:
            body.int32()  # leader epoch
        offset = body.int64()
        if version >= 5:
            body.int64()  # the follower's log start
        return _FetchPartition(index, offset, body.int32())

    topics = body.array(lambda: _FetchTopic(body.string(), body.array(read_partition)))
    return _FetchRequest(max_wait_ms / 1000, min_bytes, max_bytes, topics)


def _fetch_once(broker: Broker, error: int, request: _FetchRequest) -> list[list[_Fetched]]:
    """One result for each partition of each topic. The byte limits bend for the first batch of the answer only:
    otherwise a batch larger than a limit could never be read."""
    remaining = request.max_bytes
    nothing_yet = True
    fetched = []
    for topic in request.topics:
        results = []
        for wanted in topic.partitions:
            log = broker.topics.partition(topic.name, wanted.partition)
            result = _fetch_partition(log, error, wanted, remaining, nothing_yet)
            remaining -= len(result.records)
            nothing_yet = nothing_yet and not result.records
            results.append(result)
        fetched.append(results)
    return fetched


def _fetch_partition(log: PartitionLog | None, error: int, wanted: _FetchPartition, max_bytes: int, at_least_one: bool) -> _Fetched:
    if log is None:
        return _Fetched(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if not error and not log.start_offset <= wanted.offset <= log.next_offset:
        error = ErrorCode.OFFSET_OUT_OF_RANGE
    if error:
        return _Fetched(error, log.next_offset, log.start_offset)
    records = log.read(wanted.offset, min(wanted.max_bytes, max_bytes), at_least_one)
    return _Fetched(ErrorCode.NONE, log.next_offset, log.start_offset, records)


async def _wait_for_append(broker: Broker, request: _FetchRequest, timeout_s: float) -> None:
    event = asyncio.Event()
    found = [broker.topics.partition(topic.name, wanted.partition) for topic in request.topics for wanted in topic.partitions]
    logs = [log for log in found if log is not None]
    for log in logs:
        log.add_waiter(event)
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass
    finally:
        for log in logs:
            log.remove_waiter(event)


def _write_fetch(request: _FetchRequest, fetched: list[list[_Fetched]], version: int) -> ResponseWriter:
    response = ResponseWriter()
    if version >= 1:
        response.int32(0)
    if version >= 7:
        response.int16(ErrorCode.NONE).int32(0)  # session id 0: no fetch sessions
    response.int32(len(request.topics))
    for topic, results in zip(request.topics, fetched, strict=True):
        response.string(topic.name).int32(len(results))
        for wanted, result in zip(topic.partitions, results, strict=True):
            response.int32(wanted.partition).int16(result.error).int64(result.high_watermark)
            if version >= 4:
                response.int64(result.high_watermark)  # last stable offset: no transactions
            if version >= 5:
                response.int64(result.start_offset)
            if version >= 4:
                response.int32(-1)  # aborted transactions: none
            if version >= 11:
                response.int32(-1)  # preferred read replica: none
            response.data(result.records)
    return response


async def list_offsets(broker: Broker, call: Call) -> ResponseWriter:
    """Version 0 answers with a list of offsets, later ones with one offset and its timestamp."""
    body, version = call.body, call.version
    body.int32()  # replica id
    if version >= 2:
        body.int8()  # isolation level

    def read_partition() -> tuple[int, int]:
        index, timestamp_ms = body.int32(), body.int64()
        if version == 0:
            body.int32()  # how many offsets at most: we give one
        return index, timestamp_ms

    topics = body.array(lambda: (body.string(), body.array(read_partition)))
    response = ResponseWriter()
    if version >= 2:
        response.int32(0)
    response.int32(len(topics))
    for topic, partitions in topics:
        response.string(topic).int32(len(partitions))
        for index, timestamp_ms in partitions:
            log = broker.topics.partition(topic, index)
            error = call.error or (ErrorCode.NONE if log else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            found_ms, offset = (-1, -1) if log is None or error else _find_offset(log, timestamp_ms)
            response.int32(index).int16(error)
            if version == 0:
                response.int32(1).int64(offset)
            else:
                response.int64(found_ms).int64(offset)
    return response


def _find_offset(log: PartitionLog, timestamp_ms: int) -> tuple[int, int]:
    if timestamp_ms == _LATEST:
        return -1, log.next_offset
    if timestamp_ms == _EARLIEST:
        return -1, log.start_offset
    return log.find_time(timestamp_ms) or (-1, -1)


async def init_producer_id(broker: Broker, call: Call) -> ResponseWriter:
    transactional_id = call.body.nullable_string()
    # There are no transactions; clients retry most other errors until they time out.
    refused = ErrorCode.NONE if transactional_id is None else ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    error = call.error or refused
    producer_id = -1 if error else broker.topics.new_producer_id()
    return ResponseWriter().int32(0).int16(error).int64(producer_id).int16(-1 if error else 0)
