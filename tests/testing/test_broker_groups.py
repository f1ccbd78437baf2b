"""The consumer group state machine, with a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

from tidemill.testing.broker.groups import ConsumerGroup, GroupState, JoinReply, JoinRequest, SyncReply
from tidemill.testing.broker.protocol import ErrorCode

DELAY_S = 0.1


def in_event_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def request(
    member_id: str = "",
    protocols: tuple[str, ...] = ("range",),
    instance_id: str | None = None,
    must_know_id: bool = False,
) -> JoinRequest:
    return JoinRequest(
        member_id=member_id,
        instance_id=instance_id,
        session_timeout_s=10.0,
        rebalance_timeout_s=30.0,
        protocol_type="consumer",
        protocols={name: f"{name} of {member_id}".encode() for name in protocols},
        must_know_id=must_know_id,
    )


def form(count: int) -> tuple[ConsumerGroup, list[JoinReply]]:
    """A group of `count` members that all joined at time 0; leader first."""
    group = ConsumerGroup(DELAY_S)
    futures = [group.join(request(), 0.0) for _ in range(count)]
    group.tick(DELAY_S)
    return group, sorted((future.result() for future in futures), key=lambda reply: reply.member_id != reply.leader)


def stabilize(group: ConsumerGroup, replies: list[JoinReply], now: float) -> list[SyncReply]:
    """Sync all members, the leader last."""
    leader, *others = replies
    futures = [group.sync(reply.member_id, reply.generation, {}, now) for reply in others]
    assignments = {reply.member_id: reply.member_id.encode() for reply in replies}
    futures.append(group.sync(leader.member_id, leader.generation, assignments, now))
    return [future.result() for future in futures]


@in_event_loop
async def test_joining_waits_for_the_delay_so_that_members_meet():
    group = ConsumerGroup(DELAY_S)
    first = group.join(request(), 0.0)
    group.tick(0.05)
    assert not first.done()
    second = group.join(request(), 0.06)
    group.tick(DELAY_S)
    assert first.result().generation == second.result().generation == 1
    assert len(first.result().members) == 2
    assert second.result().members == ()  # the leader alone gets the list


@in_event_loop
async def test_every_member_gets_its_own_assignment():
    group, replies = form(3)
    results = stabilize(group, replies, 1.0)
    assert [result.error for result in results] == [ErrorCode.NONE] * 3
    leader, *others = replies
    assert [result.assignment.decode() for result in results] == [*(o.member_id for o in others), leader.member_id]
    assert group.state is GroupState.STABLE
    assert group.sync(leader.member_id, 1, {}, 2.0).result().assignment.decode() == leader.member_id


@in_event_loop
async def test_a_new_member_makes_the_others_join_again():
    group, replies = form(1)
    stabilize(group, replies, 1.0)
    member = replies[0].member_id
    newcomer = group.join(request(), 2.0)
    assert group.heartbeat(member, 1, 2.1) is ErrorCode.REBALANCE_IN_PROGRESS
    group.tick(3.0)
    assert not newcomer.done()
    rejoined = group.join(request(member), 3.0)
    group.tick(3.0)
    assert rejoined.result().generation == newcomer.result().generation == 2
    assert rejoined.result().leader == member


@in_event_loop
async def test_members_waiting_for_assignments_are_told_of_a_rebalance():
    group, replies = form(2)
    follower = replies[1]
    waiting = group.sync(follower.member_id, 1, {}, 1.0)
    assert not waiting.done()
    group.join(request(), 1.1)
    assert waiting.result().error is ErrorCode.REBALANCE_IN_PROGRESS


@in_event_loop
async def test_a_leader_that_vanishes_before_assigning_is_replaced():
    group, replies = form(2)
    leader, follower = replies
    waiting = group.sync(follower.member_id, 1, {}, 1.0)
    group.tick(DELAY_S + 10.1)
    assert waiting.result().error is ErrorCode.REBALANCE_IN_PROGRESS
    rejoined = group.join(request(follower.member_id), 11.0)
    group.tick(12.0)
    assert rejoined.result().leader == follower.member_id
    assert group.member_ids == [follower.member_id]
    assert group.heartbeat(leader.member_id, 2, 12.0) is ErrorCode.UNKNOWN_MEMBER_ID


@in_event_loop
async def test_a_silent_member_leaves_by_session_timeout_and_heartbeats_prevent_it():
    group, replies = form(2)
    stabilize(group, replies, 1.0)
    leader, follower = replies
    for now in (5.0, 10.0):
        assert group.heartbeat(leader.member_id, 1, now) is ErrorCode.NONE
        group.tick(now)
    group.tick(11.1)
    assert group.member_ids == [leader.member_id]
    assert group.state is GroupState.JOINING
    assert group.heartbeat(follower.member_id, 1, 11.2) is ErrorCode.UNKNOWN_MEMBER_ID


@in_event_loop
async def test_the_last_member_leaving_empties_the_group():
    group, replies = form(1)
    member = replies[0].member_id
    assert group.leave(member, 1.0) is ErrorCode.NONE
    assert group.leave(member, 1.0) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.state is GroupState.EMPTY
    again = group.join(request(), 2.0)
    group.tick(3.0)
    assert again.result().generation > 1


@in_event_loop
async def test_a_member_that_must_know_its_id_joins_in_two_steps():
    group = ConsumerGroup(DELAY_S)
    refused = group.join(request(must_know_id=True), 0.0).result()
    assert refused.error is ErrorCode.MEMBER_ID_REQUIRED
    assert group.member_ids == []
    joined = group.join(request(refused.member_id, must_know_id=True), 0.1)
    group.tick(1.0)
    assert joined.result().error is ErrorCode.NONE
    assert joined.result().member_id == refused.member_id


@in_event_loop
async def test_a_promised_id_ends_with_the_session_and_a_made_up_one_never_counts():
    group = ConsumerGroup(DELAY_S)
    promised = group.join(request(must_know_id=True), 0.0).result().member_id
    group.tick(10.1)
    for member_id in (promised, "made-up"):
        assert group.join(request(member_id), 11.0).result().error is ErrorCode.UNKNOWN_MEMBER_ID


@in_event_loop
async def test_the_strategy_is_one_that_all_members_know():
    group = ConsumerGroup(DELAY_S)
    first = group.join(request(protocols=("sticky", "range")), 0.0)
    group.join(request(protocols=("roundrobin", "range")), 0.0)
    refused = group.join(request(protocols=("roundrobin",)), 0.0).result()
    assert refused.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    group.tick(1.0)
    assert first.result().protocol == "range"


@in_event_loop
async def test_a_static_member_takes_the_place_of_its_former_self():
    group = ConsumerGroup(DELAY_S)
    former = group.join(request(instance_id="reader-0"), 0.0)
    latter = group.join(request(instance_id="reader-0", must_know_id=True), 0.05)
    assert former.result().error is ErrorCode.FENCED_INSTANCE_ID
    group.tick(1.0)
    assert latter.result().error is ErrorCode.NONE
    assert len(group.member_ids) == 1


@in_event_loop
async def test_commits_are_checked_against_membership():
    group, replies = form(1)
    member = replies[0].member_id
    assert group.check_commit(member, 1) is ErrorCode.REBALANCE_IN_PROGRESS  # nobody has an assignment yet
    stabilize(group, replies, 1.0)
    assert group.check_commit(member, 1) is ErrorCode.NONE
    assert group.check_commit(member, 0) is ErrorCode.ILLEGAL_GENERATION
    assert group.check_commit("made-up", 1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.check_commit("", -1) is ErrorCode.UNKNOWN_MEMBER_ID
    group.leave(member, 2.0)
    assert group.check_commit("", -1) is ErrorCode.NONE  # no members: a consumer with a manual assignment
