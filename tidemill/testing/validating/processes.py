"""Runs of a validating trainer: as many processes as it has ranks, to be killed or asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.testing.child import tied
from tidemill.testing.validating.trainer import TrainerSpec

_POLL_S = 0.02


class TrainerRun:
    """The processes of one run, started when it is made; killed at the latest when the `with` block ends.

    `dies_at`: rank -> number of the store's operation at which it kills itself.
    """

    def __init__(self, spec: TrainerSpec, ranks: int, *, dies_at: Mapping[int, int] | None = None) -> None:
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "trainer.log"
        name = uuid.uuid4().hex[:12]
        document = folder / f"spec-{name}.json"
        document.write_text(spec.model_dump_json())
        meeting_point = folder / f"meeting-{name}"
        command = [sys.executable, "-m", "tidemill.testing.validating.trainer", str(document), str(meeting_point)]
        self.processes: list[subprocess.Popen] = []
        with self.log.open("ab") as log:
            for rank in range(ranks):
                operation = (dies_at or {}).get(rank, 0)
                self.processes.append(
                    subprocess.Popen(
                        tied([*command, str(rank), str(ranks), str(operation)]),
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def kill(self, *ranks: int) -> None:
        """SIGKILL of some ranks, or of all."""
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].kill()
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].wait()

    def ask_to_end(self) -> None:
        """SIGTERM of all ranks."""
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> list[int]:
        """The exit codes of all ranks. Raises TimeoutError if one goes on for longer."""
        until = time.monotonic() + timeout_s
        while not self.is_over:
            if time.monotonic() > until:
                raise TimeoutError(f"a validating trainer goes on after {timeout_s:g} s; see {self.log}")
            time.sleep(_POLL_S)
        return [process.returncode for process in self.processes]
