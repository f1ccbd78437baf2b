from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill.demo.folder import claim
from tidemill.demo.plan import demo_plan
from tidemill.demo.presets import MODEL_NAME, write_configs
from tidemill.jobs import pipeline
from tidemill.lineage.cycle import StepName, commands, load_cycle, serve_command


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("chaos", [True, False])
def test_a_plan_shows_enough_random_impressions_at_enough_requests(fast: bool, chaos: bool) -> None:
    plan = demo_plan(fast=fast, chaos=chaos)
    assert plan.day_s * plan.requests_per_s * plan.best_shown >= 25_000
    assert plan.requests_per_s >= 30
    assert plan.candidates >= 4 * plan.best_shown
    assert plan.kills == (3 if chaos else 0)
    assert plan.speed * plan.day_s == pytest.approx(86400)


def test_the_written_configs_are_complete(tmp_path: Path) -> None:
    """The pipeline config passes the check with every job's edits, and the cycle's file is all that `tidemill cycle` needs."""
    folder = claim(tmp_path)
    plan = demo_plan(fast=True, chaos=False)
    write_configs(folder, plan, "127.0.0.1:4711")
    cycle = load_cycle(folder.cycle)
    argv = commands(cycle, "20260303", "20260302")
    for step in (StepName.TRAIN_DAILY, StepName.TRAIN_STREAM):
        flags = dict(argument[2:].split("=", 1) for argument in argv[step] if argument.startswith("--") and "=" in argument)
        overrides = {
            "train_input_path": flags["train_input_path"],
            "model_dir": flags["model_dir"],
            "train_config.fine_tune_checkpoint": flags["fine_tune_checkpoint"],
        }
        loaded = pipeline.load(flags["pipeline_config_path"], overrides=overrides, edits=flags["edit_config_json"])
        config = loaded.config
        assert config.model_dir.startswith(str(folder.root))
        if step is StepName.TRAIN_STREAM:
            assert config.kafka is not None
            assert (config.kafka.brokers, config.kafka.group_id) == ("127.0.0.1:4711", "stream-20260303")
            assert config.train_config.handover.tolerance_s == plan.tolerance_s
            assert config.train_config.publish.interval_s == 1.0
            assert json.loads(flags["edit_config_json"])["train_config.lineage.boundary"] == 1772582400.0
    assert f"--model-name={MODEL_NAME}" in serve_command(cycle)
