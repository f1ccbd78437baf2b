"""Becomes another command, after asking the kernel to kill this process when the one that started it ends.

Run by path with an isolated interpreter (`python -I -S launch.py PARENT_PID COMMAND...`), so it imports nothing of the package.
Prints to stderr and exits with 127 if the command can't be run. Linux; elsewhere the child is on its own.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have ended before the kernel knew what to do then.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"can't run {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
