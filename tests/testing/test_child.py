"""Processes that tests start end with them, whatever ends the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

STARTER = """
import subprocess, sys, time
from tidemill.testing.child import tied
child = subprocess.Popen(tied([sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]),
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_tied_process_ends_with_the_killed_one_that_started_it():
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = 0
    try:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        assert is_alive(child)
        starter.kill()
        starter.wait()
        until = time.monotonic() + 30
        while is_alive(child):
            assert time.monotonic() < until, "it is still there"
            time.sleep(0.01)
    finally:
        starter.kill()
        starter.communicate()
        if child and is_alive(child):
            os.kill(child, 9)
