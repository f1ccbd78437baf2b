"""The Metadata request: brokers, topics and partitions. Its flexible versions tell topics' ids; a topic made anew has another."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.testing.broker.protocol import ErrorCode, RequestReader, ResponseWriter
from tidemill.testing.broker.state import Broker, Call

FLEXIBLE_FROM = 9
_IDS_FROM = 10
_NODE_ID = 1
_NO_ID = bytes(16)
_UNKNOWN_EPOCH = -1
_NOT_ASKED = -(2**31)


class _Wanted(NamedTuple):
    """A topic that is asked for, by name or by id; what it has in the store."""

    error: int
    name: str | None
    topic_id: bytes
    num_partitions: int = 0


async def metadata(broker: Broker, call: Call) -> ResponseWriter:
    wanted = _read(broker, call)
    version, response = call.version, _Answer(call.version)
    if version >= 3:
        response.int32(0)
    response.count(1).int32(_NODE_ID).text(call.host).int32(call.port)
    if version >= 1:
        response.text(None)  # rack
    response.end()
    if version >= 2:
        response.text(broker.topics.cluster_id)
    if version >= 1:
        response.int32(_NODE_ID)  # controller
    response.count(len(wanted))
    for topic in wanted:
        _write_topic(response, topic)
    if 8 <= version <= 10:
        response.int32(_NOT_ASKED)  # operations that the client may do on the cluster
    return response.end()


def _read(broker: Broker, call: Call) -> list[_Wanted]:
    body, version = call.body, call.version
    read_array = body.compact_array if version >= FLEXIBLE_FROM else body.nullable_array
    names = read_array(lambda: _read_topic(body, version))
    may_create = body.boolean() if version >= 4 else True
    if names is None or (version == 0 and not names):
        names = list(broker.topics.names)
    elif may_create and broker.options.auto_create:
        for name in names:
            if isinstance(name, str):
                broker.topics.create(name, broker.options.auto_create)
    return [_find(broker, name) for name in names]


def _read_topic(body: RequestReader, version: int) -> str | bytes:
    if version < FLEXIBLE_FROM:
        return body.string()
    topic_id = body.raw(16) if version >= _IDS_FROM else _NO_ID
    name = body.compact_string()
    body.tags()
    return topic_id if name is None else name


def _find(broker: Broker, wanted: str | bytes) -> _Wanted:
    name = broker.topics.name_of(wanted) if isinstance(wanted, bytes) else wanted
    num_partitions = len(broker.topics.partitions(name)) if name else 0
    if name is None or not num_partitions:
        by_id = isinstance(wanted, bytes)
        error = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return _Wanted(error, name, wanted if isinstance(wanted, bytes) else _NO_ID)
    return _Wanted(ErrorCode.NONE, name, broker.topics.topic_id(name).bytes, num_partitions)


def _write_topic(response: _Answer, topic: _Wanted) -> None:
    version = response.version
    response.int16(topic.error).text(topic.name)
    if version >= _IDS_FROM:
        response.raw(topic.topic_id)
    if version >= 1:
        response.int8(0)  # not internal
    response.count(topic.num_partitions)
    for index in range(topic.num_partitions):
        response.int16(ErrorCode.NONE).int32(index).int32(_NODE_ID)
        if version >= 7:
            response.int32(_UNKNOWN_EPOCH)
        response.count(1).int32(_NODE_ID)  # replicas
        response.count(1).int32(_NODE_ID)  # in-sync replicas
        if version >= 5:
            response.count(0)  # offline replicas
        response.end()
    if version >= 8:
        response.int32(_NOT_ASKED)  # operations that the client may do on the topic
    response.end()


class _Answer(ResponseWriter):
    """Writes texts, array lengths and ends of structures as its version of the API has them."""

    __slots__ = ("version",)

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version

    def text(self, text: str | None) -> _Answer:
        return self.compact_string(text) if self.version >= FLEXIBLE_FROM else self.string(text)

    def count(self, count: int) -> _Answer:
        return self.uvarint(count + 1) if self.version >= FLEXIBLE_FROM else self.int32(count)

    def end(self) -> _Answer:
        return self.tags() if self.version >= FLEXIBLE_FROM else self
