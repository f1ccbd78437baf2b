"""MaxCompute in a pipeline config: as an address, as a section, and what is refused."""

from __future__ import annotations

import pytest

from tidemill.config.dump import dump

PATH = "odps://prj/tables/clicks/ds=1&ds=2"


@pytest.fixture
def tables(small):
    small["data_config"]["dataset_type"] = "OdpsDataset"
    small["train_input_path"] = PATH
    small["eval_input_path"] = ""
    return small


def test_an_address_is_the_training_data(load, tables):
    tables["data_config"] |= {"is_orderby_partition": True, "odps_data_quota_name": "q", "odps_data_compression": "ZSTD"}
    loaded = load(tables)
    assert loaded.config.data_config.source_kind == "maxcompute"
    assert not loaded.warnings
    assert f"train_input_path: {PATH}" in dump(loaded.config)


def test_a_section_names_the_tables_too(load, tables):
    tables["train_input_path"] = ""
    tables["data_config"]["maxcompute"] = {"tables": [PATH, "odps://prj/tables/more"], "readers": 8}
    assert load(tables).config.data_config.maxcompute.tables == (PATH, "odps://prj/tables/more")


def test_the_refresh_interval_may_come_from_tzrecs_variable(load, tables):
    config = load(tables, environ={"ODPS_READ_SESSION_REFRESH_INTERVAL": "60"}).config
    assert config.data_config.maxcompute.refresh_interval_s == 60.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_input_path": "data/*.parquet"}, "train_input_path: 'data/*.parquet' isn't of the form odps://"),
        ({"train_input_path": ""}, "train_input_path: names no table"),
        ({"eval_input_path": "odps://prj/clicks"}, "eval_input_path: 'odps://prj/clicks' isn't of the form odps://"),
        ({"train_input_path": f"{PATH},{PATH}"}, "would be read twice"),
    ],
)
def test_wrong_addresses_are_told_by_key(errors, tables, change, message):
    (error,) = errors({**tables, **change})
    assert message in error


def test_tables_are_named_once(errors, tables):
    tables["data_config"]["maxcompute"] = {"tables": [PATH]}
    (error,) = errors(tables)
    assert "data_config.maxcompute.tables: give train_input_path or tables, not both" in error
