"""Forks a process that saves without pause, kills it at a random moment, reads back what it left; as often as asked.

    python -m tests.checkpoint.killed_saver FOLDER TIMES

Prints the newest step after each kill. Raises if what is newest isn't whole.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from tests.checkpoint.ranks import Ranks
from tests.checkpoint.test_crashes import require_whole
from tidemill.checkpoint.discovery import latest_checkpoint
from tidemill.storage.backends.local import LocalStorage

LONGEST_LIFE_S = 0.25


def save_for_ever(storage: LocalStorage, term: int, step: int) -> None:
    ranks = Ranks(storage, 2, term=term, keep=2)
    while True:
        step += 1
        assert ranks.save(step)


def main(folder: str, times: int) -> None:
    torch.set_num_threads(1)
    storage = LocalStorage(folder)
    chance = random.Random(7)
    first = Ranks(storage)
    assert first.save(1)
    first.close()
    for term in range(2, times + 2):
        newest = latest_checkpoint(storage)
        assert newest is not None
        child = os.fork()
        if child == 0:
            os.setsid()
            try:
                save_for_ever(storage, term, newest[1].step)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.0, LONGEST_LIFE_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it died of its own"
        print(require_whole(storage, range(newest[1].step, 10**6)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
