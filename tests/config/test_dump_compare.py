"""The resolved config as text, what a change of it means, and the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.compare import RULES, Verdict, compare
from tidemill.config.dump import dump, is_secret, redact_address
from tidemill.config.explain import explain
from tidemill.config.kafka_uri import parse_kafka_uri
from tidemill.config.schema import shapes
from tidemill.config.train import TrainConfig
from tidemill.errors import ConfigError

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
WORDS = st.sampled_from(
    [
        "1e-3",
        "yes",
        "on",
        "null",
        "010",
        "1:30",
        "~",
        "2024-01-02",
        "0x1f",
        "true",
        ".5",
        "# x",
        "a: b",
        "",
        "\x1d",
        "\x85",
        "a\u2028b",
        "\u2029",
    ]
)


def test_a_dump_loads_to_an_equal_config(load, taobao):
    loaded = load(taobao["proto"])
    again = load(dump(loaded.config))
    assert again.config == loaded.config
    assert again.source.format == "yaml"
    assert again.warnings == loaded.warnings
    assert dump(again.config) == dump(loaded.config)


@given(
    separator=TEXT | WORDS,
    vocabulary=st.dictionaries(TEXT | WORDS, st.integers(0, 2**63), max_size=3),
    rates=st.tuples(st.floats(0, 1e300), st.floats(0, 1e-300)),
    labels=st.lists(TEXT | WORDS, min_size=1, max_size=3),
    interval=st.none() | st.floats(0, 1e9),
)
def test_any_config_survives_dump_and_load(load, separator, vocabulary, rates, labels, interval):
    feature = {"feature_name": "user", "embedding_dim": 4, "separator": separator, "vocab_dict": vocabulary}
    small = {
        "train_input_path": "day",
        "eval_input_path": "",
        "model_dir": "model",
        "train_config": {
            "sparse_optimizer": {"rowwise_adagrad_optimizer": {"lr": rates[0]}},
            "dense_optimizer": {"adam_optimizer": {"lr": rates[1]}},
            "num_steps": 3,
            "publish": {"interval_s": interval},
        },
        "data_config": {"dataset_type": "ParquetDataset", "label_fields": labels},
        "feature_configs": [{"id_feature": feature}],
        "model_config": {
            "feature_groups": [{"group_name": "deep", "feature_names": ["user"]}],
            "multi_tower_din": {"final": {"hidden_units": [4]}},
        },
    }
    config = load(small).config
    assert config.feature_configs[0].config.separator == separator
    assert config.feature_configs[0].config.vocab_dict == vocabulary
    assert load(dump(config)).config == config


def test_secrets_are_not_dumped(load, small):
    """DCL 9.20."""
    client = {"security.protocol": "SASL_SSL", "sasl.password": "hunter2", "sasl.jaas.config": "hunter2", "oauth.token": "hunter2"}
    small["data_config"] |= {"dataset_type": "KafkaDataset", "kafka": {"brokers": "h:1", "topic": "t", "client": client}}
    config = load(small).config
    text = dump(config)
    assert "hunter2" not in text
    assert "SASL_SSL" in text
    again = load(text).config
    assert again.data_config.kafka.client["sasl.password"] == "REDACTED"
    assert compare(config, again).verdict is Verdict.COMPATIBLE


@pytest.mark.parametrize(
    "key", ["ssl.key.pem", "sasl.oauthbearer.config", "sasl.oauthbearer.assertion.private.key.passphrase", "ssl.keystore.password"]
)
def test_keys_and_their_passphrases_are_secrets(key):
    assert is_secret(key)


@pytest.mark.parametrize("key", ["group.id", "security.protocol", "ssl.key.location", "client.id", "signal"])
def test_what_says_nothing_secret_is_kept(key):
    assert not is_secret(key)


def test_words_of_a_vocabulary_are_not_secrets(load, small):
    feature = {"feature_name": "word", "expression": "item:word", "vocab_dict": {"token": 2, "password": 3}, "embedding_dim": 4}
    small["feature_configs"].append({"id_feature": feature})
    config = load(small).config
    assert load(dump(config)).config == config


def test_secrets_in_addresses_are_not_dumped(load, small):
    small["data_config"]["dataset_type"] = "KafkaDataset"
    small["train_input_path"] = "kafka://h:1,i:2/t?group.id=g&sasl.password=hunter%202&client.id=x"
    config = load(small).config
    assert config.kafka.client == {"sasl.password": "hunter 2", "client.id": "x"}
    assert "kafka://h:1,i:2/t?group.id=g&sasl.password=REDACTED&client.id=x" in dump(config)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("kafka://h:1/t", "has no group.id"),
        ("kafka://h:1/?group.id=g", "not of the form"),
        ("http://h:1/t?group.id=g", "not of the form"),
        ("kafka://h:1/t?group.id=g&start.timestamp.ms=-1", "start.timestamp.ms must be an integer >= 0, got '-1'"),
        ("kafka://h:1/t?group.id=g&end.timestamp.ms=soon", "end.timestamp.ms must be an integer >= 0, got 'soon'"),
        ("kafka://h:1/t?group.id=g&end.offsets=t:5", "end.offsets must be topic:partition:offset, .* got 't:5'"),
        ("kafka://h:1/t?group.id=g&x", "x has no value; write key=value"),
        ("kafka:///t?group.id=g", "not of the form"),
        ("kafka://h:1?group.id=g", "not of the form"),
        ("kafka://h:1/t,?group.id=g", "a topic without a name"),
        ("kafka://h:1/t?group.id=g&sasl.password=a#b", "holds a '#'; write it as %23"),
    ],
)
def test_wrong_kafka_addresses(uri, message):
    with pytest.raises(ValueError, match=message):
        parse_kafka_uri(uri)


def test_a_kafka_address_is_a_section():
    kafka = parse_kafka_uri("kafka://h:1,i:2/t?group.id=g&start.timestamp.ms=5&fetch.min.bytes=1")
    assert (kafka.brokers, kafka.topic, kafka.group_id, kafka.start_timestamp_ms) == ("h:1,i:2", ("t",), "g", 5)
    assert (kafka.message_format, kafka.client) == ("arrow", {"fetch.min.bytes": "1"})


def test_a_kafka_address_may_name_an_end():
    kafka = parse_kafka_uri("kafka://h:1/t?group.id=g&end.timestamp.ms=7")
    assert (kafka.end_timestamp_ms, kafka.client) == (7, {})
    kafka = parse_kafka_uri("kafka://h:1/a:b?group.id=g&end.offsets=a:b:0:12,a:b:1:0")
    assert (kafka.end_offsets, kafka.client) == ({"a:b:0": 12, "a:b:1": 0}, {})


def test_values_of_a_kafka_address_are_percent_decoded_and_nothing_else():
    kafka = parse_kafka_uri("kafka://h:1/a,b?group.id=g&sasl.password=p%2B+%231&security.protocol=SSL")
    assert kafka.topic == ("a", "b")
    assert kafka.client == {"sasl.password": "p++#1", "security.protocol": "SSL"}


@pytest.mark.parametrize("topic", ["a,b", ["a", "b"], "a, b"])
def test_several_topics_are_a_list_or_separated_by_commas(load, small, topic):
    small["data_config"] |= {"dataset_type": "KafkaDataset", "kafka": {"brokers": "h:1", "topic": topic}}
    assert load(small).config.kafka.topic == ("a", "b")


def test_the_start_margin_follows_from_the_event_time(load, small):
    assert load(small).config.start_margin_s == 0
    small["data_config"]["event_time"] = {"column": "ts"}
    assert load(small).config.start_margin_s == 600
    small["train_config"]["lineage"] = {"start_margin_s": 5}
    assert load(small).config.start_margin_s == 5


@pytest.mark.parametrize(
    ("edits", "verdict", "path"),
    [
        ({}, Verdict.COMPATIBLE, None),
        ({"model_dir": "x"}, Verdict.COMPATIBLE, "model_dir"),
        (
            {"train_config.sparse_optimizer.adagrad_optimizer.lr": 1},
            Verdict.COMPATIBLE,
            "train_config.sparse_optimizer.adagrad_optimizer.lr",
        ),
        ({"train_config.publish.interval_s": 1}, Verdict.COMPATIBLE, "train_config.publish.interval_s"),
        (
            {"train_config.sparse_optimizer": {"rowwise_adagrad_optimizer": {}}},
            Verdict.NEW_LINEAGE,
            "train_config.sparse_optimizer.adagrad_optimizer",
        ),
        ({"data_config.label_fields": ["buy"]}, Verdict.NEW_LINEAGE, "data_config.label_fields"),
        ({"train_config.lineage.boundary": 5}, Verdict.NEW_LINEAGE, "train_config.lineage.boundary"),
        ({"data_config.hash.function": "farm"}, Verdict.REFUSED, "data_config.hash.function"),
        (
            {"feature_configs[0].id_feature.num_buckets": 9},
            Verdict.REFUSED,
            "feature_configs.user_id.id_feature.num_buckets",
        ),
        ({"feature_configs[0].id_feature.embedding_dim": 8}, Verdict.REFUSED, "feature_configs.user_id.id_feature.embedding_dim"),
        (
            {"feature_configs[0].id_feature.expression": "user:u"},
            Verdict.NEW_LINEAGE,
            "feature_configs.user_id.id_feature.expression",
        ),
        (
            {"model_config.multi_tower_din.final.hidden_units": [1]},
            Verdict.REFUSED,
            "model_config.multi_tower_din.final.hidden_units",
        ),
        ({"model_config.metrics": []}, Verdict.COMPATIBLE, "model_config.metrics"),
    ],
)
def test_what_a_change_means(load, taobao, edits, verdict, path):
    old = load(taobao["proto"]).config
    new = load(taobao["proto"], edits=json.dumps(edits)).config
    found = compare(old, new)
    assert found.verdict is verdict
    assert (found.differences[0].path if found.differences else None) == path


def test_topics_may_be_added_and_secrets_changed(load, small):
    """Whether one that was read is still there is for the source to say; no difference shows a secret."""

    def kafka(**fields):
        return load(small | {"data_config": {**small["data_config"], "dataset_type": "KafkaDataset", "kafka": fields}}).config

    before = kafka(brokers="h:1", topic="a", client={"sasl.password": "hunter2"})
    after = kafka(brokers="i:2", topic="a,b", client={"sasl.password": "hunter3"})
    found = compare(before, after)
    assert found.verdict is Verdict.COMPATIBLE
    assert "data_config.kafka.topic" in str(found)
    assert "hunter" not in str(found)


def test_features_are_compared_by_name(load, taobao):
    text = taobao["yaml"]
    old = load(text).config
    shuffled = old.model_copy(update={"feature_configs": old.feature_configs[::-1]})
    assert compare(old, shuffled).verdict is Verdict.COMPATIBLE
    fewer = old.model_copy(update={"feature_configs": old.feature_configs[1:]})
    assert [str(one) for one in compare(old, fewer).differences] == [
        "feature_configs.user_id: {} -> None: refused (features come and go with their tables)"
    ]


def test_every_path_has_a_verdict():
    for path in (
        "nonsense",
        "feature_configs.x.id_feature",
        "feature_configs.x",
        "model_config.dlrm",
        "data_config.kafka.client.a",
    ):
        assert any(rule.matches(path) for rule in RULES)


def test_explain(resolver):
    assert explain("train_config.publish.interval_s").splitlines() == [
        "train_config.publish.interval_s",
        "  type     number",
        "  default  not set",
        "  meaning  Seconds from one release to the next.",
    ]
    assert "    feature_name      string = required" in explain("feature_configs[0].id_feature", resolver)
    assert "  meaning  Unique name." in explain("feature_configs.id_feature.feature_name", resolver)
    assert explain("train_config.is_profiling").endswith("  effect   accepted, has no effect yet")
    with pytest.raises(ConfigError, match=r"^train_config.publsh: unknown field 'publsh'; did you mean 'publish'\?$"):
        explain("train_config.publsh")
    with pytest.raises(ConfigError, match=r"^model_dir.x: model_dir has no fields$"):
        explain("model_dir.x")


def test_every_field_is_described():
    def undescribed(cls):
        return [
            f"{cls.__name__}.{shape.name}" if not shape.doc else name
            for shape in shapes(cls).values()
            for name in ([""] if not shape.doc else []) + (undescribed(shape.message) if shape.message else [])
        ]

    assert undescribed(TrainConfig) == []


def test_the_reference_is_current():
    script = Path(__file__).parents[2] / "scripts" / "gen_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60, start_new_session=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("s3://id:key@store/bucket/x", "s3://id:REDACTED@store/bucket/x"),
        ("kafka://h:1,i:2/t?group.id=g@h", "kafka://h:1,i:2/t?group.id=g@h"),
        ("https://h:1/x?sig=a%2Bb&sv=1&X-Amz-Signature=c", "https://h:1/x?sig=REDACTED&sv=1&X-Amz-Signature=REDACTED"),
    ],
)
def test_addresses_are_shown_without_their_secrets(address, hidden):
    assert redact_address(address) == hidden


def test_a_secret_with_a_comma_is_hidden_to_its_end():
    hidden = redact_address("kafka://h:9092/t?group.id=g&sasl.password=a,b,c&client.id=x")
    assert "a,b,c" not in hidden
    assert ",b" not in hidden
    assert hidden.endswith("&client.id=x")
