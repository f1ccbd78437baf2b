"""The demo's configs: the files beside this module, filled in for one run."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Any

import yaml

from tidemill.demo.folder import DemoFolder
from tidemill.demo.plan import TOPIC, DemoPlan

MODEL_NAME = "clicks"
PIPELINE, CYCLE = "pipeline.yaml", "cycle.yaml"


def write_configs(folder: DemoFolder, plan: DemoPlan, bootstrap: str) -> None:
    """Write pipeline.yaml and cycle.yaml into the demo's folder. Both are complete: `tidemill cycle run` takes them as they are."""
    write_pipeline(folder, PIPELINE)
    write_cycle(folder, demo_cycle(folder, bootstrap, plan.tolerance_s))


def write_pipeline(folder: DemoFolder, name: str) -> None:
    """Copy a pipeline config of this package into the demo's folder."""
    text = (resources.files("tidemill.demo") / name).read_text(encoding="utf-8")
    folder.pipeline.write_text(text, encoding="utf-8")


def demo_cycle(folder: DemoFolder, bootstrap: str, tolerance_s: float) -> dict[str, Any]:
    """cycle.yaml, filled in for one run."""
    cycle: dict[str, Any] = yaml.safe_load((resources.files("tidemill.demo") / CYCLE).read_text(encoding="utf-8"))
    stream = cycle["stream"]
    stream["input_path"] = f"kafka://{bootstrap}/{TOPIC}?group.id=stream-${{bizdate}}"
    stream["edits"]["data_config.kafka"] |= {"brokers": bootstrap, "topic": TOPIC}
    cycle["handover"]["tolerance_s"] = tolerance_s
    cycle["serving"] |= {
        "model_name": MODEL_NAME,
        "options": [f"--events={folder.serving_events}", "--poll-interval=0.25", "--deadline=20"],
    }
    # What answers requests comes first, then the streams, then the daily jobs.
    for job, niceness in (("stream", 3), ("daily", 5)):
        cycle[job]["launcher"] = ["nice", "-n", str(niceness), sys.executable, "-m", "tidemill"]
    return cycle


def write_cycle(folder: DemoFolder, cycle: dict[str, Any]) -> None:
    """Write cycle.yaml into the demo's folder."""
    folder.cycle.write_text(yaml.safe_dump(cycle, sort_keys=False, width=160), encoding="utf-8")
