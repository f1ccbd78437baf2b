"""What commands print, and how they exit; what they do is tested with their jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from tidemill.cli.inspect import inspect
from tidemill.cli.main import app
from tidemill.contracts import layout
from tidemill.contracts.lineage import TermRecord
from tidemill.contracts.progress import SplitState
from tidemill.contracts.release import ReleaseManifest, Stages
from tidemill.errors import ConfigError
from tidemill.storage.backends.local import LocalStorage


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def lines(result: Result) -> Iterator[str]:
    return (line.strip() for line in result.output.splitlines())


@pytest.fixture
def lineage(tmp_path: Path) -> Path:
    """One run, two steps, one release."""
    storage = LocalStorage(tmp_path / "lineage")
    storage.write("terms/00000001.json", TermRecord(term=1, run_id="a", nonce="n", created_at=0.0).to_bytes())
    steps = [{"step": n, "at": 10.0 + n, "runs": [["kafka", "t:0", n << 20, (n + 1) << 20, 1, 1 << 20, 0]]} for n in range(2)]
    storage.write("runs/a/steps-00000.jsonl", "".join(json.dumps(step) + "\n" for step in steps).encode())
    release = ReleaseManifest(
        sequence=1,
        term=1,
        cut=1,
        run_id="a",
        nonce="n",
        snapshot_digest="0" * 64,
        step=1,
        examples=1,
        watermark=None,
        segments=[],
        files=[],
        dense=None,
        splits=[SplitState(kind="kafka", split="t:0", intervals=[(0, 1 << 20)], fingerprint={})],
        stages=Stages(cut_at=20.0, written_at=21.0, gated_at=22.0, committed_at=23.5),
    )
    storage.write(layout.release(1), release.to_bytes())
    return tmp_path / "lineage"


def test_trace_tells_an_events_way_in_lines(lineage: Path) -> None:
    result = run("trace", "t:0:0", "--lineage", str(lineage))
    assert result.exit_code == 0
    assert list(lines(result)) == [
        "t:0:0 in lineage",
        "trained   1970-01-01 00:00:10.000  step 0 of run a (term 1)",
        "released  1970-01-01 00:00:23.500  release 1 (term 1, step 1), cut 1970-01-01 00:00:20.000",
    ]


def test_trace_says_what_has_not_happened_yet(lineage: Path) -> None:
    assert list(lines(run("trace", "t:0:1", "--lineage", str(lineage))))[1:] == [
        "trained   1970-01-01 00:00:11.000  step 1 of run a (term 1)",
        "released  not yet",
    ]
    result = run("trace", "t:0:2", "--lineage", str(lineage))
    assert (result.exit_code, list(lines(result))) == (1, ["t:0:2 in lineage", "not trained"])


def test_trace_gives_json(lineage: Path) -> None:
    body = json.loads(run("trace", "t:0:0", "--lineage", str(lineage), "--json").output)
    (found,) = body["lineages"]
    assert body["event"] == "t:0:0"
    assert found["trained"][0]["run_id"] == "a"
    assert found["release"]["committed_at"] == 23.5


def test_inspect_prints_plain_lines_and_counts_faults(lineage: Path) -> None:
    term = run("inspect", str(lineage / "terms/00000001.json"))
    assert term.exit_code == 0
    assert "term        1" in list(lines(term))
    assert list(lines(term))[-1].endswith("tidemill.term/1, 0 files checked, 0 faults")
    (lineage / layout.release(1)).write_bytes(b"{")
    torn = run("inspect", str(lineage))
    assert torn.exit_code == 1
    assert any(line.startswith("fault: releases/00000001.json: not JSON") for line in lines(torn))


def test_inspect_draws_tables_on_a_terminal(
    lineage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    inspect(str(lineage / "terms/00000001.json"))
    shown = capsys.readouterr().out
    assert "─" in shown
    assert "tidemill.term/1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict"], "--predict_input_path FILES --predict_output_path FOLDER"),
        (["predict", "--predict_input_path", "a", "--predict_output_path", "b"], "name the pipeline config"),
        (["eval"], "name the pipeline config"),
        (["eval", "a.yaml", "--pipeline_config_path", "b.yaml"], "given twice"),
    ],
)
def test_a_command_line_that_lacks_something_is_refused(arguments: list[str], message: str) -> None:
    error: Any = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_config_check_compares_the_columns_with_the_data_that_are_there(tmp_path: Path) -> None:
    """A misspelt column is told with its file, line and nearest name before anything starts; data that come later are no error."""
    config, data = tmp_path / "pipeline.config", tmp_path / "day.parquet"
    config.write_text(f"""train_input_path: "{data}"
eval_input_path: ""
model_dir: "{tmp_path / "model"}"
train_config {{
  sparse_optimizer {{ adagrad_optimizer {{ lr: 0.01 }} }}
  dense_optimizer {{ adam_optimizer {{ lr: 0.001 }} }}
  num_epochs: 1
}}
data_config {{
  dataset_type: ParquetDataset
  fg_mode: FG_DAG
  label_fields: "click"
  event_time {{ column: "tme" }}
}}
feature_configs {{ id_feature {{ feature_name: "user" expression: "user:user_id" embedding_dim: 4 hash_bucket_size: 9 }} }}
model_config {{
  feature_groups {{ group_name: "deep" feature_names: "user" }}
  multi_tower {{ towers {{ input: "deep" mlp {{ hidden_units: 4 }} }} final {{ hidden_units: 4 }} }}
  losses {{ binary_cross_entropy {{}} }}
}}
""")
    assert run("config", "check", str(config)).exit_code == 0
    pq.write_table(pa.table({"user_id": [1], "clicks": [0], "time": [0.0]}), data)
    result = run("config", "check", str(config))
    assert result.exit_code == ConfigError.exit_code
    assert result.output.splitlines() == [
        f"{config}:12: data_config.label_fields[0]: no column 'click' in {data}; did you mean 'clicks'?",
        f"{config}:13: data_config.event_time.column: no column 'tme' in {data}; did you mean 'time'?",
    ]
    pq.write_table(pa.table({"user_id": [1], "click": [0], "tme": [0.0]}), data)
    assert run("config", "check", str(config)).exit_code == 0
