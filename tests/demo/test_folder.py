from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.demo.folder import alone_in, claim
from tidemill.errors import ConfigError


def test_a_new_folder_is_made_with_its_parts(tmp_path: Path) -> None:
    folder = claim(tmp_path / "a" / "demo-run")
    assert all(path.is_dir() for path in (folder.root, folder.broker, folder.logs, folder.players))


def test_what_an_earlier_demo_left_is_deleted(tmp_path: Path) -> None:
    first = claim(tmp_path)
    (first.root / "old").write_text("x")
    (first.path / "cycle.yaml").write_text("x")
    second = claim(tmp_path)
    assert not (second.root / "old").exists()
    assert not second.cycle.exists()


def test_a_link_in_the_folder_is_deleted_and_what_it_points_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    first = claim(tmp_path / "demo-run")
    (first.path / "link").symlink_to(outside)
    claim(tmp_path / "demo-run")
    assert (outside / "precious").exists()


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="no demo has made it"):
        claim(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigError, match="isn't a folder"):
        claim(path)


def test_one_demo_at_a_time_plays_in_a_folder(tmp_path: Path) -> None:
    with (
        alone_in(tmp_path / "demo-run"),
        pytest.raises(ConfigError, match="another demo plays there"),
        alone_in(tmp_path / "demo-run"),
    ):
        pytest.fail("two demos in one folder")
    with alone_in(tmp_path / "demo-run"):
        assert (tmp_path / "demo-run").is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="isn't a folder"), alone_in(tmp_path / "file"):
        pytest.fail("a file is no folder")
