"""Requests about topics: CreateTopics, DeleteTopics, DeleteRecords, CreatePartitions."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.testing.broker.protocol import ErrorCode, RequestReader, ResponseWriter
from tidemill.testing.broker.state import Broker, Call


class _NewTopic(NamedTuple):
    name: str
    num_partitions: int
    replication_factor: int


def _read_new_topic(body: RequestReader) -> _NewTopic:
    name, num_partitions, replication_factor = body.string(), body.int32(), body.int16()
    assigned = body.array(lambda: (body.int32(), body.array(body.int32)))
    body.array(lambda: (body.string(), body.nullable_string()))  # topic configs: retention and the like don't exist here
    if assigned:
        return _NewTopic(name, len(assigned), max(len(replicas) for _, replicas in assigned))
    return _NewTopic(name, 1 if num_partitions == -1 else num_partitions, replication_factor)


async def create_topics(broker: Broker, call: Call) -> ResponseWriter:
    topics = call.body.array(lambda: _read_new_topic(call.body))
    call.body.int32()  # timeout
    validate_only = call.body.boolean() if call.version >= 1 else False
    response = ResponseWriter()
    if call.version >= 2:
        response.int32(0)
    response.int32(len(topics))
    for topic in topics:
        error = call.error or _create(broker, topic, validate_only)
        response.string(topic.name).int16(error)
        if call.version >= 1:
            response.string(None)
    return response


def _create(broker: Broker, topic: _NewTopic, validate_only: bool) -> ErrorCode:
    if topic.replication_factor not in (1, -1):
        return ErrorCode.INVALID_REPLICATION_FACTOR
    if validate_only:
        return broker.topics.check_create(topic.name, topic.num_partitions)
    return broker.topics.create(topic.name, topic.num_partitions)


async def delete_topics(broker: Broker, call: Call) -> ResponseWriter:
    names = call.body.array(call.body.string)
    response = ResponseWriter()
    if call.version >= 1:
        response.int32(0)
    response.int32(len(names))
    for name in names:
        error = call.error or broker.topics.delete(name)
        if not error:
            broker.offsets.forget_topic(name)
        response.string(name).int16(error)
    return response


async def delete_records(broker: Broker, call: Call) -> ResponseWriter:
    body = call.body

    def read_partition() -> tuple[int, int]:
        return body.int32(), body.int64()

    topics = body.array(lambda: (body.string(), body.array(read_partition)))
    response = ResponseWriter().int32(0).int32(len(topics))
    for topic, partitions in topics:
        response.string(topic).int32(len(partitions))
        for index, before_offset in partitions:
            log = broker.topics.partition(topic, index)
            error = call.error or (
                broker.topics.delete_records(log, before_offset) if log else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            )
            response.int32(index).int64(-1 if error or log is None else log.start_offset).int16(error)
    return response


async def create_partitions(broker: Broker, call: Call) -> ResponseWriter:
    body = call.body

    def read_topic() -> tuple[str, int]:
        name, num_partitions = body.string(), body.int32()
        body.array(lambda: body.array(body.int32))  # replica assignment: there is one node
        return name, num_partitions

    topics = body.array(read_topic)
    body.int32()  # timeout
    validate_only = body.boolean()
    response = ResponseWriter().int32(0).int32(len(topics))
    for name, num_partitions in topics:
        error = call.error or broker.topics.grow(name, num_partitions, validate_only)
        response.string(name).int16(error).string(None)
    return response
