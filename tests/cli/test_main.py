"""The command line as people meet it: what each command says of itself, how fast, and what it makes of mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.errors import ConfigError

GOLDEN = Path(__file__).parent / "help"
COMMANDS = [
    "train",
    "eval",
    "export",
    "predict",
    "serve",
    "broker",
    "maxcompute-emulator",
    "inspect",
    "verify",
    "trace",
    "demo",
    "config check",
    "config explain",
    "cycle run",
    "cycle plan",
    "cycle step",
    "cycle render",
    "cycle status",
    "lineage show",
    "lineage promote",
    "lineage rollback",
    "lineage retire",
]


def tidemill(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidemill", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )


def help_of(command: str) -> str:
    runner = CliRunner(env={"TERMINAL_WIDTH": "80", "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})
    result = runner.invoke(app, [*command.split(), "--help"], prog_name="tidemill")
    assert result.exit_code == 0, result.output
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_as_pinned(command: str) -> None:
    """To pin a change: UPDATE_GOLDEN=1 scripts/test tests/cli."""
    path = GOLDEN / f"{command.replace(' ', '-') or 'tidemill'}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(help_of(command))
    text = help_of(command)
    assert text == path.read_text()
    assert "…" not in text, "80 columns must show every name whole"


def test_every_command_is_pinned() -> None:
    group = typer.main.get_command(app)
    found = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        found += [f"{name} {inner}" for inner in getattr(command, "commands", {})] or [name]
    assert sorted(found) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_a_mistake_of_the_command_line(command: str) -> None:
    """DCL 9.20."""
    result = CliRunner().invoke(app, [*command.split(), "--no-such-flag"])
    assert result.exit_code == 2
    assert "--no-such-flag" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_hyphens_may_stand_for_underscores_and_the_other_way_round(command: str) -> None:
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]  # type: ignore[attr-defined]
    options = [name for parameter in found.params for name in parameter.opts if name.startswith("--")]
    spelt = [option.replace("_", "-") for option in options] + [f"--{option[2:].replace('-', '_')}" for option in options]
    # An option that isn't known is refused before help is given, and with help nothing else happens.
    result = CliRunner().invoke(app, [*command.split(), "--help", *(word for option in spelt for word in (option, "1"))])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("option", ["--pipeline_config_path", "--pipeline-config-path", "--pipeline_config-path"])
def test_either_spelling_gives_the_value(option: str) -> None:
    result = CliRunner().invoke(
        app, ["predict", "one.yaml", option, "two.yaml", "--predict-input-path", "x", "--predict_output_path", "y"]
    )
    assert "given twice: CONFIG one.yaml and --pipeline_config_path two.yaml" in str(result.exception)


def test_a_header_is_wanted_or_not() -> None:
    given = ["predict", "one.yaml", "--predict_input_path", "x", "--predict_output_path", "y"]
    result = CliRunner().invoke(app, [*given, "--csv_header", "--no_csv_header"])
    assert "give one of them" in str(result.exception)


def test_help_needs_no_torch_and_comes_at_once() -> None:
    code = (
        "import sys, time; from tidemill.cli.main import app;"
        "heavy = {'torch', 'pyarrow', 'numba', 'polars', 'torchrec'} & set(sys.modules);"
        "print(sorted(heavy), time.process_time())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, start_new_session=True, check=True
    ).stdout
    assert output.startswith("[] "), output
    # Of the processor's time: other processes of this machine must not decide.
    assert float(output.split()[-1]) < 1.5


def test_the_module_runs_as_a_command() -> None:
    result = tidemill("--help", COLUMNS="120")
    assert result.returncode == 0
    assert "trace" in result.stdout


def test_an_error_is_one_message_with_its_own_exit_code(tmp_path: Path) -> None:
    result = tidemill("inspect", str(tmp_path / "nowhere"))
    assert (result.returncode, result.stdout) == (66, "")
    assert result.stderr == f"error: {tmp_path}/nowhere: there is no such file, and no folder with files\n"


def test_a_thread_that_is_left_behind_does_not_change_how_the_command_ends(tmp_path: Path) -> None:
    """As the interpreter ends, it would tear the thread out of native code, which once aborted a fenced trainer (SIGABRT)."""
    program = (
        "import atexit, sys, threading, time\n"
        "from tidemill.cli.main import main\n"
        "atexit.register(print, 'the interpreter ended')\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        f"sys.argv = ['tidemill', 'config', 'check', {str(tmp_path / 'absent.yaml')!r}]\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == ConfigError.exit_code
    assert "absent.yaml" in ended.stderr
    assert "the interpreter ended" not in ended.stdout
