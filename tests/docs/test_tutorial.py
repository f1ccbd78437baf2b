"""The tutorial, done as it is written: every block in order, services in terminals of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, Block, Directive, parts

_PORTS = ("9092", "8080")
_BLOCK_LIMIT_S = 240
_END_LIMIT_S = 120
_HAND = re.compile(r"^(press Ctrl-C|kill -9|ends): (\S+?)(?:, exit (\d+))?$")


class Reader:
    """Somebody who follows the tutorial."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "life"
        self._folder.mkdir()
        self._terminals: dict[str, subprocess.Popen] = {}
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        tools = folder / "bin"
        tools.mkdir()
        for name, arguments in {"python": "", "tidemill": "-m tidemill"}.items():
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (tools / name).chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }

    def follow(self, part: Block | Directive) -> None:
        if isinstance(part, Directive):
            self._act(part)
        elif part.language == "bash" and "terminal" in part.marks:
            self._terminals[part.marks["terminal"]] = self._start(part, self._log(part.marks["terminal"]))
        elif part.language == "bash":
            process = self._start(part, self._log("main"))
            try:
                code = process.wait(_BLOCK_LIMIT_S)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                stop(process, signal.SIGKILL)
            assert code == int(part.marks.get("exit", 0)), f"{part.where}: exit code {code}\n{self._report()}"

    def _act(self, part: Directive) -> None:
        hand = _HAND.match(part.text)
        assert hand is not None, f"{part.where}: {part.text!r} says nothing that this test knows"
        deed, name, code = hand.groups()
        process = self._terminals.pop(name)
        if deed != "ends":
            assert process.poll() is None, f"{part.where}: {name} has ended already\n{self._report()}"
            stop(process, signal.SIGKILL if deed == "kill -9" else signal.SIGINT)
        try:
            ended = process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            stop(process, signal.SIGKILL)
        assert code is None or ended == int(code), f"{part.where}: {name} ended with {ended}\n{self._report()}"

    def _start(self, block: Block, log: Path) -> subprocess.Popen:
        text = block.text
        for written, port in self._ports.items():
            text = text.replace(written, port)
        with log.open("ab") as output:
            output.write(f"\n$ {text}\n".encode())
            output.flush()
            return subprocess.Popen(
                ["bash", "-euc", text],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _log(self, terminal: str) -> Path:
        return self._folder.parent / f"{terminal}.log"

    def _report(self) -> str:
        logs = sorted(self._folder.parent.glob("*.log"))
        return "\n".join(f"--- {log.stem}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def leave(self) -> None:
        for process in self._terminals.values():
            stop(process, signal.SIGKILL)
            process.wait(10)


def stop(process: subprocess.Popen, number: signal.Signals) -> None:
    """Signal a terminal's whole process group, as Ctrl-C does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial needs curl")
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        for part in parts(REPOSITORY / "docs" / "tutorial" / "demo.md"):
            reader.follow(part)
    finally:
        reader.leave()
