"""The daily cycle as DataWorks nodes: shell scripts that submit DLC jobs, a PyODPS 3 node that deploys, and how they depend.

Everything here is pure text; DataWorks runs it. A job's container needs tidemill, the cycle's config, and the root mounted or
reachable where the config says.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from tidemill.errors import ConfigError
from tidemill.lineage.cycle import CycleConfig, StepName
from tidemill.lineage.dates import BIZDATE
from tidemill.lineage.eas import EasConfig, render_service, service_text

JOBS = (StepName.TRAIN_DAILY, StepName.FULL_EXPORT, StepName.TRAIN_STREAM)
_DATE = "${bizdate:?}"

_SHELL = """\
#!/bin/bash
# Node {step}. {parameter}
set -euo pipefail
bizdate={date}
dlc submit pytorchjob \\
{options}
"""

_DEPLOY = '''\
# Node deploy (PyODPS 3). {parameter}
# Runs once the previous cycle's train_stream has ended with a hand-over, and after the previous cycle's deploy.
import json
import os
import subprocess
import tempfile

DEADLINE_S = {deadline_s:g}
SERVICE = """\\
{service}"""

bizdate = {date}
text = SERVICE.replace("${{bizdate}}", bizdate)
name = json.loads(text)["metadata"]["name"]
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "service.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    command = ["eascmd", "modify", name, "-s", path]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S
    )
print(done.stdout.decode("utf-8", "replace"))
if done.returncode != 0:
    raise SystemExit(f"eascmd modify {{name}} ended with {{done.returncode}}")
print(f"{{name}} serves the lineage of {{bizdate}}")
'''


def render(config: CycleConfig, template: Mapping[str, Any], date: str | None = None) -> dict[str, str]:
    """File name -> text. `date`: for that date alone; None: DataWorks gives each run its business date.

    Raises ConfigError if the cycle has no section `dataworks`, or no `serving.eas` to deploy to.
    """
    eas = config.serving.eas
    if config.dataworks is None or eas is None:
        missing = "dataworks" if config.dataworks is None else "serving.eas"
        raise ConfigError(f"{missing}: the cycle's config needs this section for DataWorks")
    files = {f"{step}.sh": _job(config, step, date) for step in JOBS}
    files["deploy.py"] = _deploy(config, eas, template, date)
    files["nodes.json"] = json.dumps(_nodes(config.dataworks.cron), indent=2) + "\n"
    return files


def _job(config: CycleConfig, step: StepName, date: str | None) -> str:
    assert config.dataworks is not None
    dataworks = config.dataworks
    values: dict[str, Any] = {**dataworks.submit, **dataworks.submit_for.get(step, {})}
    named = {"name": f"{dataworks.job_prefix}-{step}-{_DATE}", "command": _command(config, step)}
    options = [f"  --{name}={_quoted(value)}" for name, value in named.items()]
    options += [f"  --{name}={shlex.quote(_plain(value))}" for name, value in values.items()]
    given = "Scheduling parameter: $bizdate, which the script gets as $1." if date is None else f"For {date} alone."
    bizdate = '"${1:?the business date, YYYYMMDD}"' if date is None else date
    return _SHELL.format(step=step, parameter=given, date=bizdate, options=" \\\n".join(options))


def _command(config: CycleConfig, step: StepName) -> str:
    assert config.dataworks is not None
    path = shlex.quote(config.dataworks.cycle_path)
    command = f"tidemill cycle step {path} --date {_DATE} --step {step}"
    if step is not StepName.TRAIN_STREAM:
        return command
    # A stream may end well without a hand-over; its node must then fail, or deploy would follow (A20). The first node alone
    # looks: the record is there when its own process has ended.
    check = f"tidemill lineage show {shlex.quote(config.root)} --date {_DATE} --require-retired"
    return f'{command} && {{ [ "${{RANK:-0}}" != 0 ] || {check}; }}'


def _quoted(text: str) -> str:
    """In double quotes, for the shell to put in the date when the node runs, and nothing else."""
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    return f'"{escaped.replace(f"{chr(92)}{_DATE}", _DATE)}"'


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _deploy(config: CycleConfig, eas: EasConfig, template: Mapping[str, Any], date: str | None) -> str:
    service = service_text(render_service(eas, dict(template), config.root, date or BIZDATE))
    escaped = service.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    given = "Scheduling parameter: bizdate=$bizdate." if date is None else f"For {date} alone."
    bizdate = 'args["bizdate"]' if date is None else repr(date)
    return _DEPLOY.format(parameter=given, service=escaped, date=bizdate, deadline_s=eas.deadline_s)


def _nodes(cron: str) -> dict[str, Any]:
    """The nodes and what each waits for: nodes of the same business date, and of the previous one."""
    waits: dict[StepName, tuple[list[StepName], list[StepName]]] = {
        StepName.TRAIN_DAILY: ([], [StepName.TRAIN_DAILY]),
        StepName.FULL_EXPORT: ([StepName.TRAIN_DAILY], []),
        StepName.TRAIN_STREAM: ([StepName.FULL_EXPORT], []),
        StepName.DEPLOY: ([StepName.FULL_EXPORT], [StepName.TRAIN_STREAM, StepName.DEPLOY]),
    }
    nodes = []
    for step, (same, previous) in waits.items():
        is_job = step in JOBS
        nodes.append(
            {
                "name": step,
                "type": "Shell" if is_job else "PyODPS 3",
                "file": f"{step}.sh" if is_job else "deploy.py",
                "parameters": "$bizdate" if is_job else "bizdate=$bizdate",
                "cron": cron,
                "after": same,
                "after_previous_cycle": previous,
            }
        )
    return {"nodes": nodes}
