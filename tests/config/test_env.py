"""The environment: read in one place, and every error names the variable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tidemill
from tidemill.config.dump import dump
from tidemill.config.env import process_place
from tidemill.errors import ConfigError

SUCCESSOR = "ONLINE_LEARNING_SUCCESSOR_DIR"
TOLERANCE = "ONLINE_LEARNING_HANDOVER_TOLERANCE_SECS"


def test_the_successor_alone_means_caught_up(load, small):
    handover = load(small, environ={SUCCESSOR: "next", TOLERANCE: "60"}).config.train_config.handover
    assert (handover.successor_dir, handover.policy, handover.tolerance_s) == ("next", "caught_up", 60.0)


def test_what_variables_say_is_in_the_saved_config(load, small):
    """DCL 9.20: the config that is kept with a run is the one after all overrides."""
    saved = dump(load(small, environ={SUCCESSOR: "lineages/next", TOLERANCE: "61.5"}).config)
    assert "lineages/next" in saved
    assert "61.5" in saved


def test_a_hand_over_section_keeps_its_policy(load, small):
    small["train_config"]["handover"] = {"confirm_timeout_s": 5}
    handover = load(small, environ={SUCCESSOR: "next"}).config.train_config.handover
    assert (handover.successor_dir, handover.policy, handover.tolerance_s) == ("next", "served", 300.0)


def test_unset_and_empty_variables_leave_hand_over_off(load, small):
    for environ in ({}, {SUCCESSOR: "", TOLERANCE: " "}):
        handover = load(small, environ=environ).config.train_config.handover
        assert (handover.successor_dir, handover.tolerance_s) == ("", 300.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("soon", "expected a number, got 'soon'"),
        ("nan", "must be finite, got 'nan'"),
        ("inf", "must be finite, got 'inf'"),
        ("-1", "must be >= 0, got '-1'"),
    ],
)
def test_a_tolerance_that_is_no_finite_number_names_the_variable(errors, small, value, message):
    assert errors(small, environ={TOLERANCE: value}) == [f"{TOLERANCE}: train_config.handover.tolerance_s: {message}"]


@pytest.mark.parametrize("folder", ["model", "./model/", "other/../model"])
def test_the_own_folder_as_successor_names_the_variable(errors, small, folder):
    assert errors(small, environ={SUCCESSOR: folder}) == [
        f"{SUCCESSOR}: train_config.handover.successor_dir: the successor's folder is this run's own model_dir (model); "
        "name the next day's"
    ]


def test_the_own_address_as_successor(errors, small):
    small["model_dir"] = "s3://bucket/day/"
    assert len(errors(small, environ={SUCCESSOR: "s3://bucket/day"})) == 1


def test_farm_hash(load, errors, small):
    assert load(small, environ={"USE_FARM_HASH_TO_BUCKETIZE": "true"}).config.data_config.hash.function == "farm"
    assert load(small, environ={"USE_FARM_HASH_TO_BUCKETIZE": "0"}).config.data_config.hash.function == "std"
    assert errors(small, environ={"USE_FARM_HASH_TO_BUCKETIZE": "ja"}) == [
        "USE_FARM_HASH_TO_BUCKETIZE: expected true or false, got 'ja'"
    ]


def test_where_a_process_stands():
    place = process_place({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 1, 1)
    assert (place.master_addr, place.master_port) == ("127.0.0.1", 29500)
    assert process_place({}).world_size == 1
    with pytest.raises(ConfigError, match=r"^RANK: must be below WORLD_SIZE \(2\), got 2$"):
        process_place({"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE: expected an integer >= 0, got 'two'$"):
        process_place({"WORLD_SIZE": "two"})


def test_nothing_else_in_the_package_reads_the_environment():
    package = Path(tidemill.__file__).parent
    readers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                readers.add(str(path.relative_to(package)))
    assert readers <= {"config/env.py"}
