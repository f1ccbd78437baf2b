"""DataWorks: the rendered nodes as pinned, and run: scripts by bash with a `dlc` that a test wrote, the deploy node by Python."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.errors import ConfigError
from tidemill.lineage.cycle import CycleConfig, load_cycle
from tidemill.lineage.eas import render_service
from tidemill.lineage.orchestrators import dataworks

GOLDEN = Path(__file__).with_name("golden") / "dataworks"
CYCLE = """\
root: oss://bucket/root
pipeline_config: pipeline.yaml
logs: logs
daily: {input_path: "odps://shop/tables/clicks/dt=${bizdate}"}
stream: {input_path: "kafka://h:1/t?group.id=ol_${bizdate}"}
handover: {policy: caught_up}
serving: {eas: {template: service.json, feature_view_name: clicks_emb}}
dataworks:
  cycle_path: /mnt/code/cycle.yaml
  job_prefix: clicks
  submit: {workspace_id: "123", worker_image: "registry/tidemill:1", workers: 1, interactive: true}
  submit_for: {train_stream: {workers: 2}}
"""
TEMPLATE: dict[str, Any] = {
    "metadata": {"name": "clicks"},
    "processor": "easyrec-torch-2.4",
    "model_config": {"outputs": 'say """probs""" \\ ü'},
}


def load(tmp_path: Path, text: str = CYCLE) -> CycleConfig:
    path = tmp_path / "cycle.yaml"
    path.write_text(text)
    return load_cycle(path)


def test_the_nodes_as_pinned(tmp_path: Path) -> None:
    """A22. To pin a change: UPDATE_GOLDEN=1 scripts/test tests/lineage."""
    files = dataworks.render(load(tmp_path), TEMPLATE)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        for name, text in files.items():
            (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")
    assert {path.name.removesuffix(".txt"): path.read_text(encoding="utf-8") for path in GOLDEN.iterdir()} == files


def test_deploys_keep_the_order_of_dates_and_follow_the_stream_before(tmp_path: Path) -> None:
    """A20: a self-dependency, and no node that polls."""
    nodes = {node["name"]: node for node in json.loads(dataworks.render(load(tmp_path), TEMPLATE)["nodes.json"])["nodes"]}
    assert list(nodes) == ["train_daily", "full_export", "train_stream", "deploy"]
    assert nodes["deploy"]["after_previous_cycle"] == ["train_stream", "deploy"]
    assert (nodes["train_stream"]["after"], nodes["train_stream"]["after_previous_cycle"]) == (["full_export"], [])
    assert nodes["full_export"]["after"] == nodes["train_daily"]["after_previous_cycle"] == ["train_daily"]


Tools = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Tools:
    """Runs a command where `dlc`, `eascmd` and `tidemill` note their arguments in <name>.json, and fail if told to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("dlc", "eascmd", "tidemill"):
        script = folder / tool
        script.write_text(
            f"#!{sys.executable} -IS\n"
            "import json, os, pathlib, sys\n"
            f"path = pathlib.Path({str(tmp_path)!r}) / '{tool}.json'\n"
            "calls = json.loads(path.read_text()) if path.exists() else []\n"
            "files = [pathlib.Path(a).read_text(encoding='utf-8') for a in sys.argv if a.endswith('service.json')]\n"
            "path.write_text(json.dumps([*calls, sys.argv[1:] + files]))\n"
            "sys.exit(int(os.environ.get('FAIL_' + (sys.argv[1:] or [''])[0].upper(), '0')))\n"
        )
        script.chmod(0o755)

    def call(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name != "RANK"}
        return subprocess.run(
            argv,
            env={**clean, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
            check=False,
        )

    return call


def calls(tmp_path: Path, tool: str) -> list[list[str]]:
    path = tmp_path / f"{tool}.json"
    return list(json.loads(path.read_text())) if path.exists() else []


@pytest.mark.parametrize("date", [None, "20260302"])
def test_a_script_submits_its_job_for_the_business_date(tmp_path: Path, run: Tools, date: str | None) -> None:
    script = dataworks.render(load(tmp_path), TEMPLATE, date)["train_daily.sh"]
    assert run("bash", "-c", script, "node", *([] if date else ["20260302"])).returncode == 0
    assert calls(tmp_path, "dlc") == [
        [
            "submit",
            "pytorchjob",
            "--name=clicks-train_daily-20260302",
            "--command=tidemill cycle step /mnt/code/cycle.yaml --date 20260302 --step train_daily",
            "--workspace_id=123",
            "--worker_image=registry/tidemill:1",
            "--workers=1",
            "--interactive=true",
        ]
    ]


def test_a_script_needs_the_date_and_fails_with_its_job(tmp_path: Path, run: Tools) -> None:
    script = dataworks.render(load(tmp_path), TEMPLATE)["full_export.sh"]
    without = run("bash", "-c", script, "node")
    assert without.returncode != 0
    assert "the business date" in without.stderr
    assert not calls(tmp_path, "dlc")
    assert run("bash", "-c", script, "node", "20260302", FAIL_SUBMIT="9").returncode == 9


@pytest.mark.parametrize(
    ("environment", "code", "asked"),
    [
        pytest.param({}, 0, True, id="handed over"),
        pytest.param({"FAIL_LINEAGE": "73"}, 73, True, id="ended otherwise"),
        pytest.param({"FAIL_CYCLE": "1"}, 1, False, id="failed"),
        pytest.param({"RANK": "1", "FAIL_LINEAGE": "73"}, 0, False, id="not the first node"),
    ],
)
def test_a_stream_node_succeeds_only_after_a_hand_over(
    tmp_path: Path, run: Tools, environment: dict[str, str], code: int, asked: bool
) -> None:
    """A20: a hand-over is told from any other normal exit."""
    assert run("bash", "-c", dataworks.render(load(tmp_path), TEMPLATE)["train_stream.sh"], "node", "20260302").returncode == 0
    (submitted,) = calls(tmp_path, "dlc")
    command = next(argument for argument in submitted if argument.startswith("--command=")).removeprefix("--command=")
    assert run("bash", "-c", command, **environment).returncode == code
    expected = [["cycle", "step", "/mnt/code/cycle.yaml", "--date", "20260302", "--step", "train_stream"]]
    look = ["lineage", "show", "oss://bucket/root", "--date", "20260302", "--require-retired"]
    assert calls(tmp_path, "tidemill") == expected + ([look] if asked else [])


def test_names_that_the_shell_would_read_otherwise_arrive_as_they_are(tmp_path: Path, run: Tools) -> None:
    name = '/mnt/a b/$HOME/`id`/"q"/it\'s.yaml'
    config = load(tmp_path)
    assert config.dataworks is not None
    config = config.model_copy(
        update={"dataworks": config.dataworks.model_copy(update={"cycle_path": name, "submit": {"envs": name}})}
    )
    run("bash", "-c", dataworks.render(config, TEMPLATE)["train_daily.sh"], "node", "20260302")
    (submitted,) = calls(tmp_path, "dlc")
    assert submitted[-1] == f"--envs={name}"
    command = submitted[3].removeprefix("--command=")
    assert shlex.split(command)[3] == name


@pytest.mark.parametrize("date", [None, "20260302"])
def test_the_deploy_node_modifies_the_service(tmp_path: Path, run: Tools, date: str | None) -> None:
    config = load(tmp_path)
    node = tmp_path / "node.py"
    given = "" if date else 'args = {"bizdate": "20260302"}\n'
    node.write_text(given + dataworks.render(config, TEMPLATE, date)["deploy.py"], encoding="utf-8")
    done = run(sys.executable, str(node))
    assert (done.returncode, done.stdout.strip()) == (0, "clicks serves the lineage of 20260302")
    ((*argv, service),) = calls(tmp_path, "eascmd")
    assert argv[:3] == ["modify", "clicks", "-s"]
    assert config.serving.eas is not None
    assert json.loads(service) == render_service(config.serving.eas, TEMPLATE, config.root, "20260302")
    failed = run(sys.executable, str(node), FAIL_MODIFY="4")
    assert failed.returncode == 1
    assert "eascmd modify clicks ended with 4" in failed.stderr


@pytest.mark.parametrize(("section", "message"), [("serving", "serving.eas: the cycle"), ("dataworks", "dataworks: the cycle")])
def test_what_is_missing_is_named(tmp_path: Path, section: str, message: str) -> None:
    config = load(tmp_path)
    fields = {"serving": config.serving.model_copy(update={"eas": None}), "dataworks": None}
    with pytest.raises(ConfigError, match=message):
        dataworks.render(config.model_copy(update={section: fields[section]}), TEMPLATE)


@pytest.mark.parametrize("wrong", ["{deploy: {workers: 2}}", "{train_stream: 2}"])
def test_options_are_for_jobs(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"cycle.yaml:12: dataworks.submit_for"):
        load(tmp_path, CYCLE.replace("{train_stream: {workers: 2}}", wrong))
