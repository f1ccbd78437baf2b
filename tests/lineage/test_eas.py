"""The EAS deployer: the service's JSON as requirements A16 to A19 ask, and `eascmd modify` with a client that a test wrote."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.clock import ManualClock
from tidemill.errors import ConfigError, DeadlineError, LineageError
from tidemill.lineage.cycle import load_cycle
from tidemill.lineage.eas import EasConfig, modify, read_template, render_service, service_text

GOLDEN = Path(__file__).with_name("golden") / "service.json"
TEMPLATE: dict[str, Any] = {
    "metadata": {"name": "clicks", "instance": 2, "cpu": 8, "memory": 32000},
    "processor": "easyrec-torch-2.4",
    "model_config": {"fg_mode": "normal", "outputs": "probs"},
}
EAS = EasConfig(template="service.json", feature_view_name="clicks_emb")
ROOT = "oss://bucket/root"


def test_the_service_as_pinned() -> None:
    before = copy.deepcopy(TEMPLATE)
    service = render_service(EAS, {**TEMPLATE, "storage": []}, ROOT, "20260302")
    assert json.loads(GOLDEN.read_text()) == service
    assert before == TEMPLATE


def test_one_mounted_folder_and_no_word_of_what_the_service_finds_out() -> None:
    """A16, A17: neither the folder's files nor how it was exported are told."""
    text = service_text(render_service(EAS, TEMPLATE, ROOT, "20260302"))
    assert text.count("lineages/20260302") == 1
    for word in ("current_json", "current.json", "distributed_embedding", "INPUT_TILE"):
        assert word not in text


def test_polling_intervals_and_the_version() -> None:
    """A18, A19: 0 stands for no scan of its own, and isn't told."""
    eas = EAS.model_copy(update={"dense_poll_interval_minutes": 3, "sparse_poll_interval_secs": 20, "version": "v-${bizdate}"})
    model = render_service(eas, TEMPLATE, ROOT, "20260302")["model_config"]
    assert model["dense_hot_load"] == {"dense_poll_interval_minutes": 3}
    assert model["feature_store_embedding_polling"] == {
        "feature_view_name": "clicks_emb",
        "version": "v-20260302",
        "sparse_poll_interval_secs": 20,
    }


def test_the_templates_own_mount_is_pointed_at_the_lineage() -> None:
    mounts = [
        {
            "mount_path": "/home/admin/docker_ml/workspace/model",
            "oss": {"path": "oss://old/", "readOnly": False},
            "properties": {"a": 1},
        },
        {"mount_path": "/code", "oss": {"path": "oss://code/"}},
    ]
    eas = EAS.model_copy(update={"oss_path": "oss://other/root/"})
    storage = render_service(eas, {**TEMPLATE, "storage": mounts}, ROOT, "20260302")["storage"]
    assert storage[0]["oss"] == {"path": "oss://other/root/lineages/20260302/", "readOnly": False}
    assert (storage[0]["properties"], storage[1:]) == ({"a": 1}, mounts[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_config": {"distributed_embedding": False}}, "model_config.distributed_embedding: leave it out"),
        ({"model_config": {"dense_hot_load": {"current_json": "x"}}}, "model_config.dense_hot_load.current_json: leave it out"),
        ({"processor_envs": [{"name": "INPUT_TILE", "value": "3"}]}, "leave INPUT_TILE out"),
        ({"metadata": {}}, "metadata.name must name the service"),
        ({"storage": {}}, "storage must be a list"),
        ({"model_config": "x"}, "model_config must be an object"),
    ],
)
def test_a_template_that_says_too_much_or_too_little_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "service.json"
    path.write_text(json.dumps({**TEMPLATE, **change}))
    with pytest.raises(ConfigError, match=rf"service.json: .*{message}"):
        read_template(str(path))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_template_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "service.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"service.json"):
        read_template(str(path))


CYCLE = """\
root: oss://bucket/root
pipeline_config: pipeline.yaml
logs: logs
daily: {input_path: "${bizdate}.parquet"}
stream:
  input_path: kafka://h:1/t?group.id=g
  edits: {"x.feature_store_config.version": "ol_${bizdate}"}
handover: {policy: caught_up}
serving: {eas: {template: service.json, feature_view_name: v}}
"""


def test_the_cycle_refuses_what_cannot_work(tmp_path: Path) -> None:
    """A19: the version is the one that training writes; A21: each lineage has its own."""
    path = tmp_path / "cycle.yaml"
    path.write_text(CYCLE)
    eas = load_cycle(path).serving.eas
    assert eas is not None
    assert eas.template == str(tmp_path / "service.json")
    path.write_text(CYCLE.replace("caught_up", "served"))
    with pytest.raises(ConfigError, match=r"cycle.yaml:9: serving.eas: needs handover.policy: caught_up"):
        load_cycle(path)
    path.write_text(CYCLE.replace("ol_$", "other_$"))
    with pytest.raises(ConfigError, match=r"serving.eas.version: differs from what the stream writes"):
        load_cycle(path)
    path.write_text(CYCLE.replace("feature_view_name: v", "feature_view_name: v, version: ol"))
    with pytest.raises(ConfigError, match=r"serving.eas.version: must hold \$\{bizdate\}"):
        load_cycle(path)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `eascmd` on PATH: fails as often as the file "failures" says, hangs if "hang" is there, and notes its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "eascmd"
    script.write_text(
        f"#!{sys.executable} -IS\n"
        "import pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with (folder / 'calls').open('a') as calls: calls.write(' '.join(sys.argv[1:]) + '\\n')\n"
        "if (folder / 'hang').exists(): time.sleep(60)\n"
        "if len((folder / 'calls').read_text().splitlines()) <= int((folder / 'failures').read_text()):\n"
        "    print('quota exceeded'); sys.exit(3)\n"
    )
    script.chmod(0o755)
    (tmp_path / "failures").write_text("0")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


SERVICE = render_service(EAS, TEMPLATE, ROOT, "20260302")


def test_the_client_is_given_the_rendered_file(client: Path) -> None:
    path = client / "logs" / "eas.json"
    modified = modify(EAS, SERVICE, path)
    assert modified.was_run
    assert (client / "calls").read_text() == f"modify clicks -s {path}\n"
    assert json.loads(path.read_text()) == SERVICE


def test_a_client_that_fails_twice_is_tried_again(client: Path) -> None:
    (client / "failures").write_text("2")
    clock = ManualClock()
    before = clock.monotonic()
    assert modify(EAS, SERVICE, client / "eas.json", clock=clock).was_run
    assert len((client / "calls").read_text().splitlines()) == 3
    assert clock.monotonic() - before == 15.0


def test_a_client_that_always_fails_is_an_error_with_its_words(client: Path) -> None:
    (client / "failures").write_text("99")
    with pytest.raises(LineageError, match="ended with 3: quota exceeded"):
        modify(EAS, SERVICE, client / "eas.json", clock=ManualClock())


def test_a_client_that_hangs_is_ended(client: Path) -> None:
    (client / "hang").touch()
    eas = EAS.model_copy(update={"deadline_s": 0.3})
    with pytest.raises(DeadlineError, match=r"not done after 0.3 s"):
        modify(eas, SERVICE, client / "eas.json", clock=ManualClock())


def test_without_a_client_the_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    modified = modify(EAS, SERVICE, tmp_path / "eas.json")
    assert (modified.was_run, modified.command) == (False, f"eascmd modify clicks -s {tmp_path}/eas.json")
    assert (tmp_path / "eas.json").exists()
