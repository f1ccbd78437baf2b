"""Consumer groups, the classic protocol: who is a member, who leads, which generation, who got which assignment.

    EMPTY --join--> JOINING --all members joined--> SYNCING --leader's assignments--> STABLE
                       ^------- join, leave, a member's session ends ------------------'

The leader (a client) computes the assignment; the broker only passes it on. Time comes in as `now` (seconds of any steady
clock), so the whole state machine runs in a test without waiting.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from enum import Enum

from tidemill.testing.broker.protocol import ErrorCode


class GroupState(Enum):
    EMPTY = "Empty"
    JOINING = "PreparingRebalance"
    SYNCING = "CompletingRebalance"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class JoinRequest:
    member_id: str
    instance_id: str | None
    session_timeout_s: float
    rebalance_timeout_s: float
    protocol_type: str
    protocols: dict[str, bytes]
    """Assignment strategies in the member's order of preference, with its subscription for each."""
    must_know_id: bool
    """A new member first gets its id and joins again with it (JoinGroup version 4 and later)."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    member_id: str
    instance_id: str | None
    subscription: bytes


@dataclass(frozen=True, slots=True)
class JoinReply:
    error: ErrorCode
    member_id: str
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    members: tuple[GroupMember, ...] = ()
    """For the leader only."""


@dataclass(frozen=True, slots=True)
class SyncReply:
    error: ErrorCode
    assignment: bytes = b""


class _Member:
    __slots__ = ("assignment", "join_waiter", "last_seen", "request", "sync_waiter")

    def __init__(self, request: JoinRequest, now: float) -> None:
        self.request = request
        self.last_seen = now
        self.assignment = b""
        self.join_waiter: asyncio.Future[JoinReply] | None = None
        self.sync_waiter: asyncio.Future[SyncReply] | None = None

    def answer_join(self, reply: JoinReply) -> None:
        if self.join_waiter is not None and not self.join_waiter.done():
            self.join_waiter.set_result(reply)
        self.join_waiter = None

    def answer_sync(self, reply: SyncReply) -> None:
        if self.sync_waiter is not None and not self.sync_waiter.done():
            self.sync_waiter.set_result(reply)
        self.sync_waiter = None


class ConsumerGroup:
    """Owned by the event loop's thread. `join` and `sync` return futures that a later call or `tick` resolves."""

    def __init__(self, rebalance_delay_s: float) -> None:
        self.state = GroupState.EMPTY
        self.generation = 0
        self.leader = ""
        self._delay_s = rebalance_delay_s
        self._protocol = ""
        self._joining_since = 0.0
        self._members: dict[str, _Member] = {}
        self._promised_ids: dict[str, float] = {}

    @property
    def member_ids(self) -> list[str]:
        return list(self._members)

    def join(self, request: JoinRequest, now: float) -> asyncio.Future[JoinReply]:
        future: asyncio.Future[JoinReply] = asyncio.get_running_loop().create_future()
        reply = self._refuse_join(request, now)
        if reply is not None:
            future.set_result(reply)
            return future
        member_id = request.member_id or _new_member_id()
        self._promised_ids.pop(member_id, None)
        self._replace_instance(request.instance_id, member_id)
        member = self._members.get(member_id)
        if member is None:
            member = self._members[member_id] = _Member(request, now)
        member.answer_join(JoinReply(ErrorCode.REBALANCE_IN_PROGRESS, member_id))
        member.request, member.last_seen, member.join_waiter = request, now, future
        self._start_joining(now)
        return future

    def sync(self, member_id: str, generation: int, assignments: dict[str, bytes], now: float) -> asyncio.Future[SyncReply]:
        """The leader brings `assignments`; everybody else waits for them."""
        future: asyncio.Future[SyncReply] = asyncio.get_running_loop().create_future()
        error = self.heartbeat(member_id, generation, now)
        if error:
            future.set_result(SyncReply(error))
            return future
        member = self._members[member_id]
        member.answer_sync(SyncReply(ErrorCode.REBALANCE_IN_PROGRESS))
        member.sync_waiter = future
        if self.state is GroupState.SYNCING and member_id == self.leader:
            for other_id, other in self._members.items():
                other.assignment = assignments.get(other_id, b"")
            self.state = GroupState.STABLE
        if self.state is GroupState.STABLE:
            for other in self._members.values():
                if other.sync_waiter is not None:
                    other.last_seen = now
                other.answer_sync(SyncReply(ErrorCode.NONE, other.assignment))
        return future

    def heartbeat(self, member_id: str, generation: int, now: float) -> ErrorCode:
        if member_id not in self._members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        self._members[member_id].last_seen = now
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is GroupState.JOINING else ErrorCode.NONE

    def leave(self, member_id: str, now: float) -> ErrorCode:
        if self._promised_ids.pop(member_id, None) is not None:
            return ErrorCode.NONE
        if member_id not in self._members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        self._remove(member_id, ErrorCode.UNKNOWN_MEMBER_ID)
        self._members_changed(now)
        return ErrorCode.NONE

    def check_commit(self, member_id: str, generation: int) -> ErrorCode:
        """May offsets be committed? Without a generation only while the group has no members."""
        if generation < 0:
            return ErrorCode.UNKNOWN_MEMBER_ID if self._members else ErrorCode.NONE
        if member_id not in self._members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is GroupState.SYNCING else ErrorCode.NONE

    def tick(self, now: float) -> None:
        """End sessions that ran out, and finish joining once every member that is left has joined."""
        for member_id in [i for i, until in self._promised_ids.items() if now > until]:
            del self._promised_ids[member_id]
        expired = [member_id for member_id, member in self._members.items() if self._has_expired(member, now)]
        for member_id in expired:
            self._remove(member_id, ErrorCode.UNKNOWN_MEMBER_ID)
        if expired:
            self._members_changed(now)
        if self.state is not GroupState.JOINING or now < self._joining_since + self._delay_s:
            return
        if all(member.join_waiter is not None for member in self._members.values()):
            self._finish_joining(now)

    def _refuse_join(self, request: JoinRequest, now: float) -> JoinReply | None:
        """None if the member may join."""
        member_id = request.member_id
        if member_id and member_id not in self._members and member_id not in self._promised_ids:
            return JoinReply(ErrorCode.UNKNOWN_MEMBER_ID, member_id)
        others = [member.request for other_id, member in self._members.items() if other_id != member_id]
        if not _common_protocols([request, *others]) or any(o.protocol_type != request.protocol_type for o in others):
            return JoinReply(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, member_id)
        if not member_id and request.must_know_id and request.instance_id is None:
            member_id = _new_member_id()
            self._promised_ids[member_id] = now + request.session_timeout_s
            return JoinReply(ErrorCode.MEMBER_ID_REQUIRED, member_id)
        return None

    def _replace_instance(self, instance_id: str | None, member_id: str) -> None:
        """A static member that starts again takes the place of its former self."""
        for other_id, other in list(self._members.items()):
            if instance_id is not None and other.request.instance_id == instance_id and other_id != member_id:
                self._remove(other_id, ErrorCode.FENCED_INSTANCE_ID)

    def _remove(self, member_id: str, reason: ErrorCode) -> None:
        member = self._members.pop(member_id)
        member.answer_join(JoinReply(reason, member_id))
        member.answer_sync(SyncReply(reason))

    def _members_changed(self, now: float) -> None:
        if self._members:
            self._start_joining(now)
        else:
            self.state = GroupState.EMPTY
            self.generation += 1

    def _start_joining(self, now: float) -> None:
        if self.state is GroupState.JOINING:
            return
        self.state = GroupState.JOINING
        self._joining_since = now
        for member in self._members.values():
            member.answer_sync(SyncReply(ErrorCode.REBALANCE_IN_PROGRESS))

    def _has_expired(self, member: _Member, now: float) -> bool:
        if member.join_waiter is not None or member.sync_waiter is not None:
            return False
        if now > member.last_seen + member.request.session_timeout_s:
            return True
        joining_until = self._joining_since + max(m.request.rebalance_timeout_s for m in self._members.values())
        return self.state is GroupState.JOINING and now > joining_until

    def _finish_joining(self, now: float) -> None:
        self.generation += 1
        self.state = GroupState.SYNCING
        self._protocol = _common_protocols([member.request for member in self._members.values()])[0]
        if self.leader not in self._members:
            self.leader = next(iter(self._members))
        roll = tuple(
            GroupMember(member_id, member.request.instance_id, member.request.protocols[self._protocol])
            for member_id, member in self._members.items()
        )
        for member_id, member in self._members.items():
            member.last_seen = now
            member.assignment = b""
            members = roll if member_id == self.leader else ()
            member.answer_join(JoinReply(ErrorCode.NONE, member_id, self.generation, self._protocol, self.leader, members))


def _common_protocols(requests: list[JoinRequest]) -> list[str]:
    """Strategies that all members know, as the first one prefers them."""
    return [name for name in requests[0].protocols if all(name in request.protocols for request in requests)]


def _new_member_id() -> str:
    return f"member-{uuid.uuid4().hex}"
