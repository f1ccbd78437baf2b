"""Every published file name, in one place.

    ROOT/active.json, ROOT/deployments/<number>.json, ROOT/serving/<server>.json
    ROOT/daily/<date>/      terms/  model.ckpt-N/  runs/  pipeline.config
    ROOT/lineages/<date>/   snapshot.json  snapshot/...  lineage.json  terms/  segments/  releases/  compactions/
                            dense_hot_export/current.json  progress.json  model.ckpt-N/  runs/<run>/
    ROOT/cycle/<date>/      runs/  of a date's exports and deployments
    ROOT/supervisor/        terms/  runs/  of whoever supervises the root
    model.ckpt-N/           manifest-<term>.json, manifest-<term>-<save>.json if a run saved again there; <term>/<save>/...
    readers/<step>/         <reader>: a process is reading that checkpoint; going: it is about to be deleted
    train_eval_result_v2.txt  one line an evaluation during training
    eval_result.txt         one line a stand-alone evaluation, beside the checkpoints
    OUTPUT/                 part-<number>.<parquet, csv, csv.gz, csv.zst>  _SUCCESS: what `tidemill predict` writes; _temporary/
                            while it does
    runs/<run>/             pipeline.config  record.json  events.jsonl  steps-<rank>.jsonl  scores-<rank>.arrows
                            dead-letters-<rank>.jsonl

Keys are relative to the folder that the section names: the root, or one lineage's (or daily run's) folder.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ACTIVE = "active.json"
SUPERVISOR = "supervisor"
"""Folder of the supervisors' terms and runs, below the root."""
SNAPSHOT = "snapshot.json"
SNAPSHOT_FILES = "snapshot"
LINEAGE = "lineage.json"
PROGRESS = "progress.json"
CURRENT = "dense_hot_export/current.json"
PIPELINE = "pipeline.config"
DATALOADER_STATE = "dataloader_state.json"
RECORD = "record.json"
EVENTS = "events.jsonl"
BEST_EVALUATIONS = "train_eval_result_v2.txt"
EVALUATIONS = "eval_result.txt"
SUCCESS = "_SUCCESS"
UNFINISHED_OUTPUT = "_temporary"
"""Folder of parts that aren't committed; readers of tables don't look into names that start with "_"."""

CHECKPOINT_READERS = "readers/"

_CHECKPOINT_MANIFEST = re.compile(r"^model\.ckpt-(\d+)/manifest-(\d+)(?:-(\d+))?\.json$")
_CHECKPOINT_FILE = re.compile(r"^model\.ckpt-(\d+)/(\d+)/(?:(\d+)/)?")
_READER = re.compile(r"^readers/(\d+)/(?!going$)[^/]+$")
_RELEASE = re.compile(r"^releases/(\d+)\.json$")
_TERM = re.compile(r"^terms/(\d+)\.json$")
_DEPLOYMENT = re.compile(r"^deployments/(\d+)\.json$")
_OUTPUT_PART = re.compile(r"^part-(\d+)\.(?:parquet|csv|csv\.gz|csv\.zst)$")
_COMPACTION = re.compile(r"^compactions/(\d+)\.json$")


class CheckpointName(NamedTuple):
    """Which save a checkpoint is of; the greatest is the newest. `save`: 0 for a run's first one at that step."""

    term: int
    step: int
    save: int


def daily(date: str) -> str:
    """Folder of the daily job of a business date ("20240102"), below the root."""
    return f"daily/{date}"


def lineage(date: str) -> str:
    """Folder of a lineage, below the root."""
    return f"lineages/{date}"


def cycle(date: str) -> str:
    """Folder of the runs of a date's export and deployment: among a lineage's they'd be taken for trainers."""
    return f"cycle/{date}"


def deployment(number: int) -> str:
    return f"deployments/{number:08d}.json"


def deployment_number(key: str) -> int | None:
    return _number(_DEPLOYMENT, key)


def serving_status(server: str) -> str:
    return f"serving/{server}.json"


def term(number: int) -> str:
    return f"terms/{number:08d}.json"


def term_number(key: str) -> int | None:
    return _number(_TERM, key)


def release(sequence: int) -> str:
    return f"releases/{sequence:08d}.json"


def release_sequence(key: str) -> int | None:
    return _number(_RELEASE, key)


def compaction(sequence: int) -> str:
    return f"compactions/{sequence:08d}.json"


def compaction_sequence(key: str) -> int | None:
    return _number(_COMPACTION, key)


def segments(term: int, cut: int) -> str:
    """Folder of all ranks' parts of one cut."""
    return f"segments/{term:08d}/{cut:08d}"


def checkpoint(step: int) -> str:
    """Folder of a checkpoint; tzrec's name."""
    return f"model.ckpt-{step}"


def checkpoint_files(step: int, term: int, save: int = 0) -> str:
    """Folder of the files that one save wrote; `save`: as in its manifest's name."""
    return f"model.ckpt-{step}/{term:08d}/{save:06d}"


def checkpoint_manifest(step: int, term: int, save: int = 0) -> str:
    """`save`: the number of a save of a run that had saved at the same step before; 0 for the first one there."""
    return f"model.ckpt-{step}/manifest-{term:08d}{f'-{save:06d}' if save else ''}.json"


def checkpoint_of_manifest(key: str) -> CheckpointName | None:
    """The name of the checkpoint whose manifest has the key; None for any other key."""
    return _checkpoint_name(_CHECKPOINT_MANIFEST.match(key))


def checkpoint_of_file(key: str) -> CheckpointName | None:
    """The name of the checkpoint that a file was written for; None for a manifest and any other key."""
    return _checkpoint_name(_CHECKPOINT_FILE.match(key))


def checkpoint_reader(step: int, reader: str) -> str:
    """Says that a process is reading the checkpoint of a step."""
    return f"readers/{step}/{reader}"


def checkpoint_going(step: int) -> str:
    """Says that the checkpoint of a step is about to be deleted."""
    return f"readers/{step}/going"


def checkpoint_of_reader(key: str) -> int | None:
    """The step that a reader's key names; None for any other key."""
    return _number(_READER, key)


def run(run_id: str) -> str:
    return f"runs/{run_id}"


def step_log(rank: int) -> str:
    """Inside a run's folder: which rows entered which step."""
    return f"steps-{rank:05d}.jsonl"


def dead_letters(rank: int) -> str:
    """Inside a run's folder: messages and rows that couldn't be used."""
    return f"dead-letters-{rank:05d}.jsonl"


def score_log(rank: int) -> str:
    """Inside a run's folder: what the model thought of each row before it was trained on it."""
    return f"scores-{rank:05d}.arrows"


def output_part(number: int, suffix: str) -> str:
    """Inside an output's folder: rows in the order of their input. `suffix`: the format, "parquet" or "csv.gz"."""
    return f"part-{number:05d}.{suffix}"


def output_part_number(key: str) -> int | None:
    return _number(_OUTPUT_PART, key)


def _checkpoint_name(match: re.Match[str] | None) -> CheckpointName | None:
    return CheckpointName(int(match[2]), int(match[1]), int(match[3] or 0)) if match else None


def _number(pattern: re.Pattern[str], key: str) -> int | None:
    match = pattern.match(key)
    return int(match[1]) if match else None
