"""Stands in for the jobs of a cycle: leaves the records, snapshots and progress that real jobs leave, without training.

A file ROOT/tell-<date> tells the stream of a date to "die", or to "pause" publication.

python player.py train|export|serve --flag=value ...
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

from tidemill.cadence import StopReason
from tidemill.contracts import layout
from tidemill.contracts.serving import ServingStatus
from tidemill.errors import FencedError
from tidemill.lineage.deployments import lineage_date, newest_deployment
from tidemill.lineage.records import Retirement, RunRecorder, RunStart, new_run_id, open_lineage, retire
from tidemill.lineage.reporter import HandoverSettings, HandoverThread, Point, Successor
from tidemill.lineage.terms import open_term, require_unfenced
from tidemill.lineage.watches import PAUSED
from tidemill.storage.open import open_storage

SPEED = 30.0
LIVENESS_S = 5.0

stopped = threading.Event()


def train(flags: dict[str, str]) -> int:
    folder = flags["model_dir"].rstrip("/")
    root, kind, date = folder.rsplit("/", 2)
    edits = json.loads(flags["edit_config_json"])
    storage = open_storage(folder)
    boundary = edits["train_config.lineage.boundary"]
    if kind == "daily":
        recorder = RunRecorder(storage, RunStart(new_run_id(), "train_daily", date, boundary=boundary))
        if edits.get("fail"):
            recorder.finish(StopReason.FAILED, error=ValueError("told to"))
            return 1
        recorder.finish(StopReason.EXHAUSTED)
        return 0
    open_lineage(storage, date, boundary)
    run_id = new_run_id()
    term = open_term(storage, run_id=run_id, nonce=run_id)
    recorder = RunRecorder(storage, RunStart(run_id, "train_stream", date, term, boundary), heartbeat_s=0.2)
    successor_dir = edits["train_config.handover.successor_dir"]
    lineage = layout.lineage(successor_dir.rsplit("/", 1)[1])
    handover = HandoverThread(
        storage,
        run_id,
        term,
        HandoverSettings(
            edits["train_config.handover.policy"],
            edits["train_config.handover.tolerance_s"],
            report_interval_s=edits["train_config.handover.report_interval_s"],
            liveness_s=LIVENESS_S,
        ),
        Successor(open_storage(successor_dir), open_storage(root), lineage),
    )
    handover.start()
    started = time.monotonic()
    while not handover.verdict and not stopped.wait(0.05):
        told = tell.read_text() if (tell := Path(root) / f"tell-{date}").exists() else ""
        if told == "die":
            recorder.finish(StopReason.FAILED, error=ValueError("told to"))
            return 1
        recorder.update(details={PAUSED: told == "pause"})
        try:
            require_unfenced(storage, term)
        except FencedError as error:
            recorder.finish(StopReason.FAILED, error=error)
            return error.exit_code
        data_ts = min(boundary + (time.monotonic() - started) * SPEED, time.time())
        handover.report(Point(data_ts, step=1, released_watermark=data_ts))
    handover.stop()
    if not handover.verdict:
        recorder.finish(StopReason.PREEMPTED)
        return 75
    retire(storage, term, Retirement(lineage, handover.decision.lag_s, 7))
    recorder.finish(StopReason.HANDED_OVER, successor=lineage)
    return 0


def export(flags: dict[str, str]) -> int:
    root, _, date = flags["export_dir"].rsplit("/", 2)
    recorder = RunRecorder(open_storage(f"{root}/{layout.cycle(date)}"), RunStart(new_run_id(), "export", date))
    open_storage(flags["export_dir"]).write(layout.SNAPSHOT, f"snapshot of {flags['checkpoint_path']}".encode())
    recorder.finish(StopReason.EXHAUSTED)
    return 0


def serve(root_url: str) -> int:
    root = open_storage(root_url)
    heartbeat = 0
    while not stopped.wait(0.1):
        newest = newest_deployment(root)
        heartbeat += 1
        status = ServingStatus(
            server="player",
            url="none",
            heartbeat=heartbeat,
            ready=newest is not None,
            deployment=newest.number if newest else None,
            lineage=newest.lineage if newest else None,
            snapshot_digest=None,
            term=None,
            sequence=None,
            step=None,
            watermark=None,
            swapped_at=None,
            updated_at=time.time(),
        )
        root.write(layout.serving_status("player"), status.to_bytes())
        assert newest is None or lineage_date(newest.lineage)
    return 0


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    flags = dict(argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument)
    match arguments[0]:
        case "train":
            return train(flags)
        case "export":
            return export(flags)
        case _:
            return serve(arguments[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
