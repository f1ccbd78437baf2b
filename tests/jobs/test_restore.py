"""What a changed config means for a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.jobs.conftest import Life
from tidemill import logs
from tidemill.checkpoint.discovery import read_checkpoint
from tidemill.config.pipeline import PipelineConfig
from tidemill.errors import ConfigError
from tidemill.jobs import pipeline
from tidemill.jobs.restore import check_config
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage


@pytest.fixture
def storage(life: Life) -> Storage:
    return open_storage(str(life.daily))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logs.log.propagate = True
    with caplog.at_level(logging.WARNING, logger="tidemill"):
        yield caplog


def changed(life: Life, **edits: object) -> PipelineConfig:
    return pipeline.load(life.pipeline, overrides={key.replace("__", "."): value for key, value in edits.items()}).config


def test_the_same_config_goes_on_in_silence(life: Life, storage: Storage, said: pytest.LogCaptureFixture) -> None:
    check_config(storage, read_checkpoint(storage)[1], changed(life))
    assert not said.records


def test_a_compatible_change_goes_on_and_is_named(life: Life, storage: Storage, said: pytest.LogCaptureFixture) -> None:
    check_config(storage, read_checkpoint(storage)[1], changed(life, train_config__num_steps=11))
    assert [record.getMessage() for record in said.records] == [
        "the config has changed since step 10: train_config.num_steps: 10 -> 11: compatible"
        " (how training runs, not what is trained)"
    ]


@pytest.mark.parametrize(
    ("path", "value", "advice"),
    [
        ("data_config__event_time__column", "price", "start a new lineage"),
        ("data_config__hash__function", "farm", "take back the change"),
    ],
)
def test_a_grave_change_is_refused_by_name(life: Life, storage: Storage, path: str, value: str, advice: str) -> None:
    config = changed(life, train_config__num_steps=11, **{path: value})
    with pytest.raises(ConfigError, match=advice) as caught:
        check_config(storage, read_checkpoint(storage)[1], config)
    assert path.replace("__", ".") in str(caught.value)
    assert "num_steps" not in str(caught.value)
