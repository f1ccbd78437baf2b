"""The demo's configs: the files beside this module, filled in for one run."""

from __future__ import annotations

import sys
from importlib import resources

import yaml

from tidemill.demo.folder import DemoFolder
from tidemill.demo.plan import TOPIC, DemoPlan

MODEL_NAME = "clicks"


def write_configs(folder: DemoFolder, plan: DemoPlan, bootstrap: str) -> None:
    """Write pipeline.yaml and cycle.yaml into the demo's folder. Both are complete: `tidemill cycle run` takes them as they are."""
    package = resources.files("tidemill.demo")
    folder.pipeline.write_text((package / "pipeline.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    cycle = yaml.safe_load((package / "cycle.yaml").read_text(encoding="utf-8"))
    stream = cycle["stream"]
    stream["input_path"] = f"kafka://{bootstrap}/{TOPIC}?group.id=stream-${{bizdate}}"
    stream["edits"]["data_config.kafka"] |= {"brokers": bootstrap, "topic": TOPIC}
    cycle["handover"]["tolerance_s"] = plan.tolerance_s
    cycle["serving"] |= {
        "model_name": MODEL_NAME,
        "options": [f"--events={folder.serving_events}", "--poll-interval=0.25", "--deadline=20"],
    }
    # What answers requests comes first, then the streams, then the daily jobs.
    for job, niceness in (("stream", 3), ("daily", 5)):
        cycle[job]["launcher"] = ["nice", "-n", str(niceness), sys.executable, "-m", "tidemill"]
    folder.cycle.write_text(yaml.safe_dump(cycle, sort_keys=False, width=160), encoding="utf-8")
