"""A development broker that tests of a module share, and a topic of each test's own."""

import pytest

from tests.data.kafka_topics import new_topic
from tidemill.testing.broker import DevelopmentBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with DevelopmentBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def topic(broker):
    return new_topic(broker)
