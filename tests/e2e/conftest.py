"""A small click world on disk, and a workshop in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workshop import PIPELINE, Workshop
from tidemill.data.click_world import World, write_day


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
