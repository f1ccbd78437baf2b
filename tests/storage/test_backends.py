"""The contract over every store that ships, and what is special about each."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tidemill.errors import AlreadyExistsError, ConfigError, MissingExtraError, NotFoundError, StorageError, UnsafeStoreError
from tidemill.storage.backends.fsspec import FsspecStorage
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage
from tidemill.testing.faulty_storage import FaultyStorage
from tidemill.testing.storage_contract import StorageContract


@pytest.fixture
def memory() -> Iterator[FsspecStorage]:
    storage = FsspecStorage(f"memory://{uuid.uuid4().hex}/root")
    yield storage
    for info in storage.list():
        storage.delete(info.key)


class TestLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "not" / "there yet")


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self, memory: FsspecStorage) -> Storage:
        return memory


class TestFaultyWithoutFaults(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return FaultyStorage(LocalStorage(tmp_path))


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_local_leaves_no_temporary_files(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/one", b"1")
    storage.write("a/one", b"2")
    storage.create("a/two", b"2")
    with pytest.raises(AlreadyExistsError):
        storage.create("a/two", b"3")
    with pytest.raises(StorageError):
        storage.write("a", b"a folder has this name")
    assert _files(tmp_path) == ["a/one", "a/two"]


def test_local_failure_before_the_rename_keeps_the_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("key", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"'key'.*No space left"):
        storage.write("key", b"new")
    with pytest.raises(StorageError, match="No space left"):
        storage.create("other", b"new")
    assert storage.read("key") == b"old"
    assert _files(tmp_path) == ["key"]


def test_local_does_not_list_what_a_dead_writer_left(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("releases/1", b"1")
    (tmp_path / "releases" / ".tmp-0123").write_bytes(b"half")
    assert [info.key for info in storage.list()] == ["releases/1"]
    assert [info.key for info in storage.list("releases/.")] == []


def test_local_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UnsafeStoreError, match="no hard links"):
        LocalStorage(tmp_path).create("key", b"")


def test_local_follows_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part").write_bytes(b"rows")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "data")
    (tmp_path / "root" / "dangling").symlink_to(tmp_path / "nowhere")
    storage = LocalStorage(tmp_path / "root")
    assert [info.key for info in storage.list()] == ["linked/part"]
    assert storage.read("linked/part") == b"rows"


_CREATE_MANY = """
import sys
from tidemill.errors import AlreadyExistsError
from tidemill.storage.backends.local import LocalStorage
storage = LocalStorage(sys.argv[1])
sys.stdin.readline()
for number in range(40):
    try:
        storage.create(f"terms/{number}.json", sys.argv[2].encode())
    except AlreadyExistsError:
        continue
    print(number)
"""


def test_local_create_is_exclusive_between_processes(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _CREATE_MANY, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in range(3)
    ]
    try:
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("go\n")
            run.stdin.flush()
        won = [run.communicate(timeout=60)[0].split() for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert all(run.returncode == 0 for run in runs)
    assert sorted(number for numbers in won for number in numbers) == sorted(map(str, range(40)))
    for run_number, numbers in enumerate(won):
        for number in numbers:
            assert (tmp_path / "terms" / f"{number}.json").read_text() == str(run_number)


def test_fsspec_refuses_to_write_where_a_reader_could_see_half(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"data")
    # fsspec's own local file system opens the target and writes into it.
    storage = FsspecStorage(f"file://{tmp_path}")
    assert storage.read("key") == b"data"
    assert [(info.key, info.size) for info in storage.list()] == [("key", 4)]
    for write in (storage.write, storage.create):
        with pytest.raises(UnsafeStoreError, match="can't put whole objects"):
            write("other", b"data")
    storage.delete("key")
    assert _files(tmp_path) == []


def test_fsspec_driver_errors_become_storage_errors(memory: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: object, **__: object) -> None:
        raise RuntimeError("SlowDown")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", down)
    with pytest.raises(StorageError, match=r"'key' in memory://.*RuntimeError: SlowDown"):
        memory.write("key", b"")


def test_fsspec_driver_without_a_mode_is_refused(memory: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mode(_: object, path: str, value: bytes) -> None: ...

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", without_mode)
    with pytest.raises(UnsafeStoreError, match="no exclusive create"):
        memory.create("key", b"")


def test_open_storage_picks_the_backend(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    local = LocalStorage(folder)
    for url in (folder, str(folder), folder.as_uri(), local.url, f"local://{folder}", f"file://localhost{folder}"):
        opened = open_storage(url)
        assert isinstance(opened, LocalStorage)
        assert (opened.root, opened.url) == (folder, local.url)
    memory = open_storage("memory://somewhere/")
    assert isinstance(memory, FsspecStorage)
    assert memory.url == "memory://somewhere"


def test_open_storage_takes_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("out")
    monkeypatch.chdir("/")
    storage.write("key", b"")
    assert _files(tmp_path) == ["out/key"]


def test_stores_share_a_root_by_url() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    open_storage(url).write("key", b"data")
    assert open_storage(f"{url}/").read("key") == b"data"
    with pytest.raises(NotFoundError):
        open_storage(f"{url}/key").read("key")
    open_storage(url).delete("key")


@pytest.mark.parametrize("url", ["teapot://bucket/x", "file://host/x", "file://"])
def test_open_storage_refuses_urls_that_nobody_knows(url: str) -> None:
    with pytest.raises(ConfigError, match=url):
        open_storage(url)


def test_open_storage_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"oddstore": {"class": "oddstore_driver_that_is_not_there.Fs", "err": "Install oddstore-driver to access it"}}
    monkeypatch.setattr(sys.modules["fsspec.registry"], "known_implementations", known)
    with pytest.raises(MissingExtraError, match=r"oddstore://x needs .*Install oddstore-driver"):
        open_storage("oddstore://x")
