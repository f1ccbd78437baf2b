"""For all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tidemill import logs

# A loaded machine isn't a fault: examples may take as long as they do. pytest-timeout ends what hangs.
settings.register_profile("tidemill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tidemill")


@pytest.fixture(autouse=True)
def _log_of_its_own() -> Iterator[None]:
    """A command that ran in this process has set up the log for good; the next test's must not depend on it."""
    _forget_log()
    yield
    _forget_log()


def _forget_log() -> None:
    logs.log.handlers[:] = []
    logs.log.setLevel(logging.NOTSET)
    logs.log.propagate = True
