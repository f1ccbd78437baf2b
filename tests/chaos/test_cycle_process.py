"""What a story of the cycle does to its processes, it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.chaos.cycle_process import part_of

_PROCESS = """
import sys, time
from pathlib import Path
from tests.chaos.cycle_process import arrange, read_number, write_number

folder, real = Path(sys.argv[1]), time.time
arrange(folder, "serve-a")
from tidemill.errors import StorageError
from tidemill.storage.backends.local import LocalStorage

assert abs(time.time() - real()) < 60
write_number(folder / "clock-serve-a", -600)
assert 540 < real() - time.time() < 660

storage = LocalStorage(folder / "root")
write_number(folder / "slow-20260303", 0.2)
for operate in (lambda: storage.write("lineages/20260303/progress.json", b""), lambda: storage.list("lineages/20260303/")):
    began = time.monotonic()
    operate()
    assert time.monotonic() - began >= 0.2
(folder / "slow-20260303").unlink()

write_number(folder / "deployer-fails", 2)
storage.create("releases/1.json", b"")
there = []
for _ in range(2):
    try:
        storage.create("deployments/000000001.json", b"")
    except StorageError:
        there.append(len(storage.list("deployments/")))
assert there == [0, 1], there
storage.create("deployments/000000002.json", b"")
assert read_number(folder / "deployer-fails") == 0
"""


def test_clock_store_and_deployer_are_as_the_story_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _PROCESS, str(tmp_path)], cwd=Path(__file__).parents[2], check=True, timeout=120)


def test_every_process_of_a_story_knows_its_part() -> None:
    assert part_of(["cycle", "run", "cycle.yaml"]) == "cycle"
    assert part_of(["serve", "root", "--port=0", "--server-name=a"]) == "serve-a"
    assert part_of(["train", "--model_dir=/x/root/lineages/20260303", "--continue_train"]) == "train-lineages-20260303"
    assert part_of(["export", "--model_dir=/x/root/daily/20260303"]) == "export-daily-20260303"
