"""A small click world on disk, a workshop in it, and what streams start from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.stream import LINEAGE, Stream, StreamSettings, copy_base, small_base
from tests.e2e.topic import Topic
from tests.e2e.workshop import PIPELINE, Workshop
from tidemill.data.click_world import World, write_day
from tidemill.testing.broker import DevelopmentBroker

MakeStream = Callable[..., Stream]


@pytest.fixture(scope="session")
def world_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_day(World(7), 1, folder / "day1", 8000, num_files=3)
    return folder


@pytest.fixture
def workshop(tmp_path: Path, world_data: Path) -> Workshop:
    config = tmp_path / "pipeline.yaml"
    config.write_text(PIPELINE.format(data=world_data, root=tmp_path / "root"))
    return Workshop(tmp_path, config, world_data)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentBroker]:
    with DevelopmentBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A day trained and exported, for `copy_base`."""
    return small_base(tmp_path_factory.getbasetemp() / "stream-base")


_topics = itertools.count()


@pytest.fixture
def make_stream(tmp_path: Path, base: Workshop, broker: DevelopmentBroker) -> MakeStream:
    """A lineage on a topic of its own: `make_stream(StreamSettings(), partitions=2)`."""

    def make(settings: StreamSettings, *, partitions: int = 2, name: str = "root") -> Stream:
        topic = Topic(broker, partitions=partitions, name=f"impressions-{next(_topics)}")
        (tmp_path / name).mkdir()
        return Stream(copy_base(base, tmp_path / name), topic, settings, LINEAGE)

    return make
