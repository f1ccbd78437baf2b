"""Client settings: passed on as they are, checked before anything starts, their secrets told to nobody."""

import logging

import pytest
from confluent_kafka import KafkaException

from tests.data.kafka_topics import Run, count, produce, row, source
from tidemill import logs
from tidemill.config.data import KafkaConfig
from tidemill.data.sources.kafka_client import (
    check_client,
    consumer_settings,
    open_admin,
    open_consumer,
    open_producer,
    without_secrets,
)
from tidemill.errors import ConfigError

SASL = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "trainer",
    "sasl.password": "hunter2",
    "ssl.endpoint.identification.algorithm": "https",
}


def config(**client):
    return KafkaConfig(brokers="127.0.0.1:1", topic=("t",), group_id="g", client={**client})


def test_dotted_keys_reach_the_client_untouched():
    check_client(config(**SASL))
    assert SASL.items() <= consumer_settings(config(**SASL)).items()


@pytest.mark.parametrize("open_client", [lambda config: open_consumer(config, print), open_admin, open_producer])
def test_dotted_keys_reach_every_client(open_client):
    """Also the ones that commit offsets and keep dead letters: a cluster that wants a login wants it of all."""
    with pytest.raises(KafkaException, match=r"no\.such\.setting"):
        open_client(config(**{"no.such.setting": "x"}))


def test_secrets_are_in_no_log_and_no_event(broker, topic, caplog, tmp_path):
    """DCL 9.20: not even if the client tells all that it does and has."""
    produce(broker, topic, [row(0)])
    secrets = {"sasl.username": "trainer", "sasl.password": "hunter2", "ssl.key.password": "opensesame"}
    sink = logs.EventLog(tmp_path / "events.jsonl")
    logs.send_events_to(sink)
    try:
        with caplog.at_level(logging.DEBUG), Run(source(broker, topic, client={**secrets, "debug": "all", "log_level": 7})) as run:
            assert run.train(count(1)) == [0]
    finally:
        logs.send_events_to(None)
        sink.close()
    told = caplog.text + (tmp_path / "events.jsonl").read_text()
    assert "sasl.password" in told
    assert not [secret for secret in ("hunter2", "opensesame") if secret in told]


@pytest.mark.parametrize(
    ("client", "match"),
    [
        ({"enable.auto.commit": True}, "checkpoints"),
        ({"auto.offset.reset": "latest"}, "start_timestamp_ms"),
        ({"group.id": "x"}, "group_id"),
        ({"bootstrap.servers": "x:1"}, "brokers"),
        ({"no.such.setting": "x"}, "no.such.setting"),
        ({"fetch.wait.max.ms": "soon"}, r"fetch\.wait\.max\.ms"),
        ({**SASL, "ssl.ca.location": "/no/such/file.pem"}, r"ssl\.ca\.location"),
        ({**SASL, "sasl.mechanism": "TELEPATHY"}, "TELEPATHY"),
    ],
)
def test_a_wrong_setting_is_named(client, match):
    with pytest.raises(ConfigError, match=match):
        check_client(config(**client))


def test_what_the_broker_would_not_let_us_do_is_allowed_if_it_changes_nothing():
    check_client(config(**{"enable.auto.commit": "false", "auto.offset.reset": "earliest"}))


def test_no_value_of_a_secret_is_in_an_error():
    """DCL 9.20."""
    client = {**SASL, "ssl.key.password": "opensesame", "ssl.key.pem": "-----BEGIN hunter3"}
    with pytest.raises(ConfigError, match=r"kafka\.client") as caught:
        check_client(config(**client))
    assert not [secret for secret in ("hunter2", "hunter3", "opensesame") if secret in str(caught.value)]
    assert without_secrets(SASL, "login of trainer with hunter2 failed") == "login of trainer with REDACTED failed"


def test_lines_about_each_attempt_to_connect_are_left_out(caplog):
    client_log = logging.getLogger("tidemill.kafka")
    with caplog.at_level(logging.DEBUG, logger="tidemill.kafka"):
        client_log.log(logging.ERROR, "%s [%s] %s", "FAIL", "rdkafka#consumer-1", "Connection refused")
        client_log.log(logging.WARNING, "%s [%s] %s", "OFFSET", "rdkafka#consumer-1", "something else")
    assert [record.getMessage() for record in caplog.records] == ["OFFSET [rdkafka#consumer-1] something else"]
