"""`python -m tests.chaos.cycle_process ARGUMENTS...`: `tidemill ARGUMENTS`, with what a story does to the machine it runs on.

The folder that STORY names in the environment says what: files that come and go while the process runs.

    ranks-<part>       the part's process becomes torchrun with so many ranks
    clock-<part>       seconds by which the part's wall clock is off
    slow-<lineage>     seconds that each operation on that lineage's folder takes
    deployer-fails     how many further creations of a deployment fail; the last one happens, and its answer is lost

Parts: "cycle", "serve-<name>", "<train or export>-<daily or lineages>-<date>".
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STORY = "TIDEMILL_CYCLE_STORY"
_real_time = time.time


def part_of(arguments: Sequence[str]) -> str:
    """Which part of the story a command line plays."""
    options = dict(
        argument.removeprefix("--").split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
    )
    command = arguments[0]
    if command == "serve":
        return f"serve-{options['server-name']}"
    if command in ("train", "export"):
        return "-".join([command, *options["model_dir"].rsplit("/", 2)[-2:]])
    return command


def main() -> None:
    folder, arguments = Path(os.environ[STORY]), sys.argv[1:]
    part = part_of(arguments)
    ranks = read_number(folder / f"ranks-{part}")
    if ranks > 1 and "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks:g}", "-m", __spec__.name]
        os.execv(sys.executable, [sys.executable, *torchrun, *arguments])
    arrange(folder, part)
    from tidemill.cli.main import main as tidemill

    tidemill()


def arrange(folder: Path, part: str) -> None:
    """From now on, this process's clock and local store do what the story's files say."""
    time.time = lambda: _real_time() + read_number(folder / f"clock-{part}")
    _arrange_store(folder)


def read_number(path: Path) -> float:
    """What a file says; 0 if it isn't there. Files take their place whole."""
    try:
        return float(path.read_text())
    except FileNotFoundError:
        return 0.0


def _arrange_store(folder: Path) -> None:
    from tidemill.contracts import layout
    from tidemill.errors import StorageError
    from tidemill.storage.backends.local import LocalStorage

    local_path, list_keys, create = LocalStorage.local_path, LocalStorage.list, LocalStorage.create

    def wait(path: str) -> None:
        for slow in folder.glob("slow-*"):
            if f"/{layout.lineage(slow.name.removeprefix('slow-'))}" in path:
                until = time.monotonic() + read_number(slow)
                while time.monotonic() < until and slow.exists():
                    time.sleep(0.05)

    def slow_path(storage: LocalStorage, key: str) -> Path:
        path = local_path(storage, key)
        wait(str(path))
        return path

    def slow_list(storage: LocalStorage, prefix: str = "") -> list:
        wait(f"{storage.root}/{prefix}")
        return list_keys(storage, prefix)

    def failing_create(storage: LocalStorage, key: str, *chunks: bytes) -> None:
        fails = folder / "deployer-fails"
        left = read_number(fails) if layout.deployment_number(key) is not None else 0
        if left:
            write_number(fails, left - 1)
        if left <= 1:
            create(storage, key, *chunks)
        if left:
            raise StorageError(f"creating {key!r}: the story says so, {left - 1:g} more to come")

    LocalStorage.local_path, LocalStorage.list, LocalStorage.create = slow_path, slow_list, failing_create


def write_number(path: Path, number: float) -> None:
    """Say something to the story's processes."""
    part = path.with_name(f".{path.name}")
    part.write_text(str(number))
    part.replace(path)


if __name__ == "__main__":
    main()
