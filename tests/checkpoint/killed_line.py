"""Forks a process that saves increments and folds without pause, kills it at a random moment, reads back what it left.

    python -m tests.checkpoint.killed_line FOLDER TIMES

Prints the newest step after each kill. Raises if what is newest doesn't give the state of its step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from tests.checkpoint.line import Line, assert_restores
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.storage.backends.local import LocalStorage

LONGEST_LIFE_S = 2.0


def save_for_ever(storage: LocalStorage, term: int, world_size: int) -> None:
    line = Line(storage, world_size, term=term, fold_after=2, keep=2)
    while True:
        line.train_and_save()


def main(folder: str, times: int) -> None:
    torch.set_num_threads(1)
    storage = LocalStorage(folder)
    chance = random.Random(7)
    for term in range(1, times + 1):
        child = os.fork()
        if child == 0:
            os.setsid()
            try:
                save_for_ever(storage, term, chance.randint(1, 3))
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.1, LONGEST_LIFE_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it died of its own"
        newest = latest_checkpoint(storage)
        if newest is not None:
            assert_restores(storage, newest[1], 2)
        print(newest[1].step if newest else 0, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
