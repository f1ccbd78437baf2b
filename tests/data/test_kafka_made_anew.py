"""A topic that was deleted and made anew is another one: its offsets are never taken for the old one's (KIP-516)."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import closing, nullcontext

import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.data.kafka_topics import DEADLINE_S, Run, count, create_topic, make_anew, new_topic, offsets, produce, row, source
from tidemill import logs
from tidemill.contracts.progress import DataloaderState
from tidemill.data.assignment import Assigned, AssignmentBase
from tidemill.data.intervals import NOTHING
from tidemill.data.sources.kafka_client import _topic_id, passes
from tidemill.data.split import SplitId
from tidemill.errors import SourceChangedError
from tidemill.jobs.positions import Saved, find_positions
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.rank_threads import ThreadAgreement, run_threads

TOPIC_DENIED, UNKNOWN_TOPIC, TIMED_OUT = 29, 3, KafkaError.REQUEST_TIMED_OUT
NEW = [row(100 + number) for number in range(9)]
"""More than was read of the old topic, so that positions alone would fit."""

FROZEN = """
import sys, types
from tests.data.kafka_topics import Run, source
from tidemill.errors import SourceChangedError
broker = types.SimpleNamespace(bootstrap=sys.argv[1])
with Run(source(broker, sys.argv[2])) as run:
    told = 0
    try:
        while True:
            run.step()
            if len(run.rows) > told:
                print(*run.rows[told:], sep="\\n", flush=True)
                told = len(run.rows)
    except SourceChangedError as error:
        print("refused:", error, flush=True)
"""


def replace_topic(broker, topic, partitions=1):
    make_anew(broker, topic, partitions)
    produce(broker, topic, NEW)


def saved_after_two(broker, topic, **config):
    produce(broker, topic, [row(0), row(1)])
    with Run(source(broker, topic, **config)) as first:
        first.train(count(2))
        return first.states


def test_between_runs_it_is_refused_and_told_what_to_do(broker, topic):
    saved = saved_after_two(broker, topic)
    replace_topic(broker, topic)
    with closing(source(broker, topic)) as made, pytest.raises(SourceChangedError) as raised:
        made.resume(saved)
    assert f"{topic}:0 was deleted and made anew (its topic_id was {saved[0].fingerprint['topic_id']}, is " in str(raised.value)
    assert "kafka.on_data_loss to earliest" in str(raised.value)


def test_between_runs_one_that_may_lose_data_goes_on_at_the_new_ones_beginning(broker, tmp_path):
    """What was read of the old topic is forgotten, of its partitions that are no more too; and the start time isn't asked again."""
    topic = new_topic(broker, 2)
    produce(broker, topic, [row(5)], partition=1)
    saved = saved_after_two(broker, topic)
    replace_topic(broker, topic, partitions=1)
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        with Run(source(broker, topic, on_data_loss="earliest", start_timestamp_ms=9_000_000_000_000), saved) as run:
            assert run.train(count(9)) == list(range(100, 109))
            assert run.done == {f"{topic}:0": offsets((0, 9))}
            [state] = run.states
    finally:
        logs.send_events_to(None)
        sink.close()
    assert state.fingerprint["topic_id"] != saved[0].fingerprint["topic_id"]
    assert f'"source.topic_replaced","split":"{topic}:0","read":2' in (tmp_path / "events.jsonl").read_text()


def test_every_rank_of_a_job_forgets_what_was_read_of_the_old_one(broker, topic):
    states = saved_after_two(broker, topic)
    replace_topic(broker, topic)
    base = AssignmentBase(2, tuple(SplitId(state.kind, state.split) for state in states), {})
    saved = Saved(DataloaderState(passes_completed=0, splits=states, watermark=None), base)

    def find(group, rank):
        with closing(source(broker, topic, on_data_loss="earliest")) as made:
            return find_positions(made, ThreadAgreement(group, rank), rank, saved, num_passes=1)

    for result in run_threads(2, find):
        assert result.error is None
        assert result.value.progress.done == {}
        assert result.value.splits[0].fingerprint["topic_id"] != states[0].fingerprint["topic_id"]


def test_a_checkpoint_from_before_topics_had_identities_is_gone_on_from_and_gets_one(broker, topic):
    saved = saved_after_two(broker, topic)
    old = [state.model_copy(update={"fingerprint": {"cluster": None, "earliest": 0, "start": 0}}) for state in saved]
    produce(broker, topic, [row(2)])
    with Run(source(broker, topic), old) as run:
        assert run.train(count(1)) == [2]
        [state] = run.states
    assert state.fingerprint["topic_id"] == saved[0].fingerprint["topic_id"]
    replace_topic(broker, topic)
    with closing(source(broker, topic)) as made, pytest.raises(SourceChangedError, match="made anew"):
        made.resume([state])


def test_while_it_is_read_the_run_ends(broker, topic):
    produce(broker, topic, [row(0), row(1)])
    with Run(source(broker, topic)) as run:
        run.train(count(2))
        replace_topic(broker, topic)
        with pytest.raises(SourceChangedError, match=f"(?s){topic}.*made anew.*on_data_loss"):
            run.train(lambda run: len(run.rows) > 20)


def test_while_the_process_is_frozen_none_of_its_rows_is_trained(broker, topic):
    """Without a question after the pause its rows come for as long as nobody looks at the topic."""
    produce(broker, topic, [row(0), row(1)])
    child = subprocess.Popen(
        [sys.executable, "-c", FROZEN, broker.bootstrap, topic], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    killer = threading.Timer(3 * DEADLINE_S, child.kill)
    killer.start()
    try:
        assert [child.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
        os.kill(child.pid, signal.SIGSTOP)
        replace_topic(broker, topic)
        time.sleep(2.5)
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout.readline().startswith("refused: kafka topic")
    finally:
        killer.cancel()
        child.kill()
        child.wait()
        child.stdout.close()


def read_until(reader, stop):
    until = time.monotonic() + DEADLINE_S
    while not stop(raw := reader.read(0.05)):
        assert raw is None
        assert time.monotonic() < until


def test_between_looking_and_opening_none_of_its_rows_is_given(broker, topic):
    produce(broker, topic, [row(0)])
    with closing(source(broker, topic)) as made:
        [split] = made.discover()
        replace_topic(broker, topic)
        reader = made.open_all([Assigned(split, None, NOTHING)])
        with closing(reader), pytest.raises(SourceChangedError, match="made anew"):
            read_until(reader, lambda raw: False)


def test_during_a_pause_of_training_none_of_its_rows_is_given(broker, topic):
    """A long evaluation, or a slow checkpoint: nobody reads meanwhile."""
    produce(broker, topic, [row(0), row(1)])
    made = source(broker, topic)
    with closing(made), closing(made.open_all([Assigned(made.discover()[0], None, NOTHING)])) as reader:
        read_until(reader, lambda raw: raw is not None)
        replace_topic(broker, topic)
        time.sleep(2.2)
        with pytest.raises(SourceChangedError, match="made anew"):
            read_until(reader, lambda raw: False)


@pytest.mark.parametrize(("code", "passed_on"), [(TOPIC_DENIED, False), (UNKNOWN_TOPIC, True), (TIMED_OUT, True)])
def test_only_where_we_may_not_ask_a_topic_has_no_id(code, passed_on):
    """A question that fails for the moment is no answer."""
    answer = Future()
    answer.set_exception(KafkaException(KafkaError(code)))
    with pytest.raises(KafkaException) if passed_on else nullcontext():
        assert _topic_id(answer, 1.0) is None


def test_an_answer_that_doesnt_come_in_time_passes():
    with pytest.raises(KafkaException) as raised:
        _topic_id(Future(), 0.01)
    assert passes(raised.value.args[0])


def test_after_an_outage_an_emptied_and_refilled_cluster_is_another(tmp_path):
    with DevelopmentBroker(tmp_path / "broker") as own:
        topic = new_topic(own)
        produce(own, topic, [row(0), row(1)])
        client = {"log_level": 0, "fetch.wait.max.ms": 10, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 50}
        with Run(source(own, topic, client=client)) as run:
            run.train(count(2))
            own.kill()
            with DevelopmentBroker(tmp_path / "other") as other:
                create_topic(other, topic)
                produce(other, topic, NEW)
            shutil.rmtree(own.directory / "topics")
            shutil.copytree(tmp_path / "other" / "topics", own.directory / "topics")
            shutil.copy(tmp_path / "other" / "topics.json", own.directory / "topics.json")
            own.start()
            with pytest.raises(SourceChangedError, match=topic):
                run.train(lambda run: len(run.rows) > 20)
            assert run.rows == [0, 1]
