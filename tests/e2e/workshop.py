"""A small click world on disk, its pipeline config, and the command line as a person would call it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PIPELINE = """
train_input_path: {data}/day1/*.parquet
eval_input_path: ""
model_dir: {root}/daily/20260303
train_config:
  sparse_optimizer: {{adagrad_optimizer: {{lr: 0.05}}, constant_learning_rate: {{}}}}
  dense_optimizer:
    adam_optimizer: {{lr: 0.002}}
    exponential_decay_learning_rate: {{decay_size: 10, decay_factor: 0.9, warmup_size: 20, warmup_learning_rate: 0.0002}}
  num_epochs: 1
  save_checkpoints_steps: 15
  log_step_count_steps: 10
data_config:
  dataset_type: ParquetDataset
  batch_size: 128
  fg_mode: FG_DAG
  label_fields: [click]
  event_time: {{column: event_time}}
  id_column: event_id
  log_columns: [event_time, is_random, true_probability]
  input_fields:
    - {{input_name: is_random, input_type: INT64}}
    - {{input_name: true_probability, input_type: DOUBLE}}
    - {{input_name: event_time, input_type: DOUBLE}}
    - {{input_name: hour, input_type: INT64}}
    - {{input_name: price, input_type: DOUBLE}}
    - {{input_name: click, input_type: INT64}}
feature_configs:
  - id_feature: {{feature_name: user_id, expression: "user:user_id", hash_bucket_size: 3000, embedding_dim: 8}}
  - id_feature: {{feature_name: hour, expression: "user:hour", num_buckets: 24, embedding_dim: 8}}
  - id_feature: {{feature_name: item_id, expression: "item:item_id", hash_bucket_size: 3000, embedding_dim: 8}}
  - raw_feature: {{feature_name: price, expression: "item:price", normalizer: "method=log10"}}
  - sequence_id_feature:
      {{feature_name: click_seq, expression: "user:click_seq", sequence_length: 10, sequence_delim: ";",
       hash_bucket_size: 3000, embedding_dim: 8, embedding_name: item_id_emb}}
model_config:
  feature_groups:
    - {{group_name: deep, feature_names: [user_id, hour, item_id, price], group_type: DEEP}}
    - {{group_name: seq, feature_names: [item_id, click_seq], group_type: SEQUENCE}}
  multi_tower_din:
    towers: [{{input: deep, mlp: {{hidden_units: [16], dropout_ratio: [0.1]}}}}]
    din_towers: [{{input: seq, attn_mlp: {{hidden_units: [8]}}}}]
    final: {{hidden_units: [16]}}
  losses: [{{binary_cross_entropy: {{}}}}]
  metrics: [{{auc: {{}}}}]
"""


@dataclass(frozen=True, slots=True)
class Workshop:
    """A folder with data, a config, and a root."""

    folder: Path
    config: Path
    data: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def tidemill(
        self, *arguments: str, ranks: int = 1, log: str = "log", environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Start a command in a session of its own; its output goes to a file. `environment`: variables beside our own."""
        launcher = [sys.executable, "-m", "tidemill"]
        if ranks > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            launcher += ["-m", "tidemill"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        with (self.folder / f"{log}.txt").open("ab") as output:
            return subprocess.Popen(
                [*launcher, *arguments],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
            )

    def run(self, *arguments: str, ranks: int = 1, log: str = "log", expect: int = 0, timeout_s: float = 150) -> None:
        """Run a command to its end; its log is in the failure's message."""
        process = self.tidemill(*arguments, ranks=ranks, log=log)
        try:
            code = process.wait(timeout_s)
        finally:
            kill(process)
        assert code == expect, self.read_log(log)

    def read_log(self, log: str = "log") -> str:
        return (self.folder / f"{log}.txt").read_text()[-6000:]


def kill(process: subprocess.Popen) -> None:
    """SIGKILL a process and all its descendants: torchrun gives its workers sessions of their own."""
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)


def descendants(pid: int) -> list[int]:
    """All live processes below one."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(stat.parent.name))
    return [found for child in children for found in (child, *descendants(child))]


def eventually(condition: Callable[[], bool], *, timeout_s: float, what: str, pause_s: float = 0.05) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s} s: {what}"
        time.sleep(pause_s)
