"""The client of schema registries: what it asks, how long, and what it says when it gets no answer."""

import pytest

from tidemill.config.data import KafkaConfig
from tidemill.config.dump import dump, to_plain
from tidemill.config.messages import SchemaRegistryConfig
from tidemill.data.messages.registry import SchemaRegistry
from tidemill.errors import ConfigError, DataError, DeadlineError
from tidemill.testing.schema_registry import DevelopmentRegistry, Reference


@pytest.fixture
def registry():
    with DevelopmentRegistry() as running:
        yield running


def client(registry, **more):
    return SchemaRegistry(SchemaRegistryConfig(url=registry.url + "/", **more))


def test_a_schema_with_its_references_is_asked_for_once(registry):
    registry.register("inner", '{"a":1}')
    registry.register("middle", '{"b":1}', references=[Reference("i", "inner")])
    number = registry.register("outer", '{"c":1}', references=[Reference("i", "inner"), Reference("m", "middle")])
    asked = client(registry)
    for _ in range(3):
        schema = asked.schema(number)
        assert schema.text == '{"c":1}'
        assert list(schema.references) == ["i", "m"]
        assert asked.schema(77) is None
    assert registry.requests == [
        f"/schemas/ids/{number}",
        "/subjects/inner/versions/1",
        "/subjects/middle/versions/1",
        "/schemas/ids/77",
    ]


def test_failures_that_pass_are_tried_again(registry):
    number = registry.register("v", "{}")
    registry.fail_next(503, 0, 429)
    assert client(registry).schema(number).text == "{}"
    assert len(registry.requests) == 4


@pytest.mark.parametrize("status", [500, 0])
def test_no_answer_in_time_is_a_deadline_error(registry, status):
    """An outage says nothing about a message, so it makes none poison."""
    registry.fail_next(*[status] * 100)
    with pytest.raises(DeadlineError, match=r"/schemas/ids/1: no answer within 0\.3 s"):
        client(registry, timeout_s=0.3).schema(1)


@pytest.mark.parametrize(
    ("rights", "given"),
    [
        ({"user": "reader", "password": "geheim"}, {"user": "reader", "password": "falsch"}),
        ({"token": "geheim"}, {"token": "falsch"}),
    ],
)
def test_rights(rights, given):
    with DevelopmentRegistry(**rights) as registry:
        number = registry.register("v", "{}")
        assert client(registry, **rights).schema(number).text == "{}"
        for wrong in (given, {}):
            with pytest.raises(ConfigError, match="HTTP 401; check") as caught:
                client(registry, **wrong).schema(number)
            assert "falsch" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 422])
def test_an_answer_that_makes_no_sense(registry, status):
    registry.fail_next(status)
    with pytest.raises(DataError, match=f"HTTP {status}"):
        client(registry).schema(1)


def test_a_reference_that_is_not_there(registry):
    number = registry.register("v", "{}", references=[Reference("i", "nowhere")])
    with pytest.raises(DataError, match="refers to 'i', which isn't there"):
        client(registry).schema(number)


def test_secrets_are_shown_nowhere():
    """DCL 9.20."""
    settings = SchemaRegistryConfig(url="http://reader:geheim@h:1", user="reader", password="geheim", token="geheim", timeout_s=0)
    config = KafkaConfig(brokers="h:1", topic=("t",), schema_registry=settings)
    assert "geheim" not in dump(config)
    assert "geheim" not in repr(config).replace("reader:geheim@", "")
    assert to_plain(config)["schema_registry"]["password"] == "REDACTED"
    with pytest.raises(DeadlineError) as caught:
        SchemaRegistry(settings.model_copy(update={"url": "http://reader:geheim@127.0.0.1:1"})).schema(1)
    assert "geheim" not in str(caught.value)
    with pytest.raises(ValueError, match="http"):
        SchemaRegistryConfig(url="h:1")
