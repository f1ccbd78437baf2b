"""Rules of the design that the import contracts can't express."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill

PACKAGE = Path(tidemill.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_only_distributed_imports_torchrec_distributed():
    users = {
        path.relative_to(PACKAGE).parts[0] for path in MODULES if any(n.startswith("torchrec.distributed") for n in imports(path))
    }
    assert users <= {"distributed"}


@pytest.mark.parametrize("word", ["utils", "common", "helpers", "core"])
def test_names_that_do_not_exist_here(word):
    assert not [path for path in MODULES if word in (path.stem, *path.relative_to(PACKAGE).parts[:-1])]


def test_published_file_names_stand_in_layout_alone():
    names = ["active.json", "snapshot.json", "progress.json", "current.json", "dataloader_state.json"]
    users = [
        (path.name, name)
        for path in MODULES
        for name in names
        if path.name != "layout.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == name
    ]
    assert not users


def test_the_command_line_starts_without_torch():
    code = "import sys, tidemill.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_serving_reaches_no_training_code():
    code = (
        "import sys, tidemill.serving.server, tidemill.serving.app;"
        "bad = [m for m in sys.modules if m.split('.')[0] == 'torchrec' or m.startswith(('tidemill.training', 'tidemill.models'))];"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
