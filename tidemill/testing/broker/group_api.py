"""Requests of consumer groups: their coordinator, membership, committed offsets."""

from __future__ import annotations

import time
from itertools import groupby

from tidemill.testing.broker.groups import JoinRequest, SyncReply
from tidemill.testing.broker.protocol import ErrorCode, RequestReader, ResponseWriter
from tidemill.testing.broker.state import Broker, Call
from tidemill.testing.broker.store import CommittedOffset, OffsetKey

_NODE_ID = 1
_TRANSACTION_COORDINATOR = 1


def _throttled(version: int, since: int) -> ResponseWriter:
    """A response that begins with the throttle time from version `since` on."""
    return ResponseWriter().int32(0) if version >= since else ResponseWriter()


async def find_coordinator(broker: Broker, call: Call) -> ResponseWriter:
    call.body.string()  # whose coordinator: this node is everybody's
    for_transactions = call.version >= 1 and call.body.int8() == _TRANSACTION_COORDINATOR
    # An error that clients take as final: most others they retry until they time out.
    refused = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED if for_transactions else ErrorCode.NONE
    response = _throttled(call.version, since=1).int16(call.error or refused)
    if call.version >= 1:
        response.string("the development broker has no transactions" if refused else None)
    return response.int32(_NODE_ID).string(call.host).int32(call.port)


async def join_group(broker: Broker, call: Call) -> ResponseWriter:
    body, version = call.body, call.version
    group = body.string()
    request = _read_join(body, version)
    response = _throttled(version, since=2)
    if call.error:
        return response.int16(call.error).int32(-1).string("").string("").string(request.member_id).int32(0)
    reply = await broker.group(group).join(request, time.monotonic())
    response.int16(reply.error).int32(reply.generation)
    response.string(reply.protocol).string(reply.leader).string(reply.member_id)
    response.int32(len(reply.members))
    for member in reply.members:
        response.string(member.member_id)
        if version >= 5:
            response.string(member.instance_id)
        response.data(member.subscription)
    return response


def _read_join(body: RequestReader, version: int) -> JoinRequest:
    session_ms = body.int32()
    rebalance_ms = body.int32() if version >= 1 else session_ms
    return JoinRequest(
        session_timeout_s=session_ms / 1000,
        rebalance_timeout_s=rebalance_ms / 1000,
        member_id=body.string(),
        instance_id=body.nullable_string() if version >= 5 else None,
        protocol_type=body.string(),
        protocols=dict(body.array(lambda: (body.string(), bytes(body.data())))),
        must_know_id=version >= 4,
    )


async def sync_group(broker: Broker, call: Call) -> ResponseWriter:
    body = call.body
    group, generation, member_id = body.string(), body.int32(), body.string()
    if call.version >= 3:
        body.nullable_string()  # instance id
    assignments = dict(body.array(lambda: (body.string(), bytes(body.data()))))
    if call.error:
        reply = SyncReply(ErrorCode.NONE)
    else:
        reply = await broker.group(group).sync(member_id, generation, assignments, time.monotonic())
    return _throttled(call.version, since=1).int16(call.error or reply.error).data(reply.assignment)


async def heartbeat(broker: Broker, call: Call) -> ResponseWriter:
    group, generation, member_id = call.body.string(), call.body.int32(), call.body.string()
    error = call.error or broker.group(group).heartbeat(member_id, generation, time.monotonic())
    return _throttled(call.version, since=1).int16(error)


async def leave_group(broker: Broker, call: Call) -> ResponseWriter:
    group, member_id = call.body.string(), call.body.string()
    error = call.error or broker.group(group).leave(member_id, time.monotonic())
    return _throttled(call.version, since=1).int16(error)


async def list_groups(broker: Broker, call: Call) -> ResponseWriter:
    with_members = {name for name, group in broker.groups.items() if group.member_ids}
    names = sorted(with_members | broker.offsets.groups)
    response = _throttled(call.version, since=1).int16(call.error).int32(len(names))
    for name in names:
        response.string(name).string("consumer")
    return response


async def offset_commit(broker: Broker, call: Call) -> ResponseWriter:
    body, version = call.body, call.version
    group = body.string()
    generation, member_id = (body.int32(), body.string()) if version >= 1 else (-1, "")
    if 2 <= version <= 4:
        body.int64()  # retention: offsets are kept for good
    refused = call.error or broker.group(group).check_commit(member_id, generation)

    def read_partition() -> tuple[int, CommittedOffset]:
        index, offset = body.int32(), body.int64()
        if version == 1:
            body.int64()  # commit timestamp
        return index, CommittedOffset(offset, body.nullable_string() or "")

    topics = body.array(lambda: (body.string(), body.array(read_partition)))
    response = _throttled(version, since=3).int32(len(topics))
    for topic, partitions in topics:
        response.string(topic).int32(len(partitions))
        for index, committed in partitions:
            known = broker.topics.partition(topic, index) is not None
            error = refused or (ErrorCode.NONE if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            if not error:
                broker.offsets.commit(OffsetKey(group, topic, index), committed)
            response.int32(index).int16(error)
    broker.offsets.flush()
    return response


async def offset_fetch(broker: Broker, call: Call) -> ResponseWriter:
    body, version = call.body, call.version
    group = body.string()
    topics = body.nullable_array(lambda: (body.string(), body.array(body.int32)))
    if topics is None:
        keys = sorted(broker.offsets.keys(group))
        topics = [(name, [key.partition for key in same]) for name, same in groupby(keys, lambda key: key.topic)]
    response = _throttled(version, since=3).int32(len(topics))
    for topic, partitions in topics:
        response.string(topic).int32(len(partitions))
        for index in partitions:
            committed = broker.offsets.get(OffsetKey(group, topic, index)) or CommittedOffset(-1, "")
            response.int32(index).int64(committed.offset).string(committed.metadata).int16(call.error)
    if version >= 2:
        response.int16(call.error)
    return response
