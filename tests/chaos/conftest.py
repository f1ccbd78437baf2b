"""What stories start from: the same as the streams of tests/e2e."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stream import small_base
from tests.e2e.workshop import Workshop
from tidemill.testing.broker import DevelopmentBroker


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return small_base(tmp_path_factory.getbasetemp() / "stream-base")


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentBroker]:
    """One of its own: stories kill it."""
    with DevelopmentBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running
