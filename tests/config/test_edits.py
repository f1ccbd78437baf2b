"""Flags and --edit_config_json: what they select, convert and refuse."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def edit(load, taobao):
    """The Taobao config after edits."""
    return lambda edits: load(taobao["proto"], edits=json.dumps(edits)).config


@pytest.fixture
def refusals(errors, taobao):
    return lambda edits: errors(taobao["proto"], edits=edits if isinstance(edits, str) else json.dumps(edits))


def dims(config):
    return [entry.config.embedding_dim for entry in config.feature_configs]


def test_scalars_are_converted_by_their_field(edit):
    config = edit(
        {
            "data_config.batch_size": "64",
            "train_config.dense_optimizer.adam_optimizer.lr": "1e-2",
            "train_config.dense_optimizer.adam_optimizer.amsgrad": "True",
            "data_config.fg_mode": "FG_NONE",
            "model_dir": 7,
        }
    )
    assert config.data_config.batch_size == 64
    assert config.train_config.dense_optimizer.adam_optimizer.lr == 0.01
    assert config.train_config.dense_optimizer.adam_optimizer.amsgrad is True
    assert config.data_config.fg_mode == "FG_NONE"
    assert config.model_dir == "7"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("[0]", [3, 16, 4, 8, 16]),
        ("[-5]", [3, 16, 4, 8, 16]),
        ("[0:2]", [3, 3, 4, 8, 16]),
        ("[id_feature.feature_name=adgroup_id]", [16, 3, 4, 8, 16]),
        ("[id_feature.feature_name='adgroup_id']", [16, 3, 4, 8, 16]),
        ("[id_feature.num_buckets>1000]", [3, 16, 4, 8, 16]),
        ("[id_feature.embedding_dim >= 16]", [3, 3, 4, 8, 16]),
        ("[id_feature.embedding_dim<16]", [16, 16, 3, 8, 16]),
        ("[:3]", [3, 3, 3, 8, 16]),
    ],
)
def test_selectors(edit, selector, expected):
    assert dims(edit({f"feature_configs{selector}.id_feature.embedding_dim": 3})) == expected


def test_all_elements(edit):
    config = edit({"model_config.metrics[0:1].auc.thresholds": 7, "data_config.input_fields[:].input_type": "INT64"})
    assert config.model.metrics[0].auc.thresholds == 7
    assert set(config.data_config.columns.values()) == {"INT64"}


def test_repeated_fields_take_lists_in_any_spelling(edit):
    for spelling in (["a", "b"], '["a", "b"]', "['a', 'b']"):
        assert edit({"data_config.label_fields": spelling}).data_config.label_fields == ("a", "b")
    assert edit({"data_config.label_fields": "'a'"}).data_config.label_fields == ("a",)
    assert edit({"data_config.label_fields[0]": "buy"}).data_config.label_fields == ("buy",)
    assert edit({"train_config.save_checkpoints_timestamps": "[1, 2]"}).train_config.save_checkpoints_timestamps == (1, 2)


def test_sections_take_objects_and_protobuf_text(edit):
    """DCL 9.20."""
    for value in ({"lr": 0.5, "gradient_clipping": True}, "{lr: 0.5 gradient_clipping: true}", "lr: 0.5 gradient_clipping: true"):
        optimizer = edit({"train_config.sparse_optimizer.adagrad_optimizer": value}).train_config.sparse_optimizer.adagrad_optimizer
        assert (optimizer.lr, optimizer.gradient_clipping) == (0.5, True)
    config = edit({"model_config.metrics": [{"auc": {}}], "train_config.publish": {"interval_s": 1}})
    assert len(config.model.metrics) == 1
    assert config.train_config.publish.interval_s == 1


def test_sections_that_are_not_there_are_made(edit):
    config = edit({"train_config.publish.interval_s": 2, "feature_configs[2].id_feature.vocab_dict.new": 9})
    assert config.train_config.publish.enabled
    assert config.feature_configs[2].config.vocab_dict["new"] == 9


def test_values_may_hold_semicolons(edit):
    """DCL 9.20."""
    config = edit({"data_config.input_fields": [], "data_config.input_fields_str": "clk:INT32;price:DOUBLE;id:BIGINT"})
    assert config.data_config.columns == {"clk": "INT32", "price": "DOUBLE", "id": "INT64"}


def test_several_paths_take_several_values(edit):
    keys = "data_config.batch_size;feature_configs[id_feature.feature_name=pid].id_feature.embedding_dim"
    for value in ("16;5", [16, 5]):
        config = edit({keys: value})
        assert (config.data_config.batch_size, dims(config)[2]) == (16, 5)


def test_edits_win_over_flags_and_flags_over_the_environment_and_the_file(load, taobao):
    environ = {"ONLINE_LEARNING_SUCCESSOR_DIR": "env"}
    flags = {"model_dir": "flag", "train_input_path": None, "train_config.handover.successor_dir": "next"}
    config = load(taobao["proto"], overrides=flags, environ=environ).config
    assert (config.model_dir, config.train_config.handover.successor_dir) == ("flag", "next")
    assert config.train_input_path == "data/taobao/train/*.parquet"
    config = load(taobao["proto"], overrides=flags, environ=environ, edits='{"model_dir": "edit"}').config
    assert config.model_dir == "edit"


def test_one_value_for_several_places_is_not_shared(edit):
    config = edit(
        {
            "feature_configs[0:2].id_feature.vocab_dict": {"a": 1},
            "feature_configs[0].id_feature.vocab_dict.a": 2,
            "feature_configs[0:2].id_feature.hash_bucket_size": None,
            "feature_configs[0:2].id_feature.num_buckets": None,
        }
    )
    assert [entry.config.vocab_dict for entry in config.feature_configs[:2]] == [{"a": 2}, {"a": 1}]


@pytest.mark.parametrize(
    ("edits", "line"),
    [
        ({"train_config.num_step": 1}, "train_config.num_step: unknown field 'num_step'; did you mean 'num_steps'?"),
        ({"feature_configs[9].id_feature.pooling": "mean"}, "[9] is outside of 'feature_configs', which has 5 elements"),
        ({"feature_configs[7:].id_feature.pooling": "mean"}, "[7:] matches no element of 'feature_configs'"),
        (
            {"feature_configs[id_feature.feature_name=no].id_feature.pooling": "mean"},
            "[id_feature.feature_name=no] matches no element",
        ),
        ({"feature_configs[x y].id_feature.pooling": "mean"}, "[x y] is no index, range or condition"),
        ({"feature_configs.id_feature.pooling": "mean"}, "'feature_configs' is repeated; select elements with [i], [a:b], [:] or"),
        ({"data_config[0].batch_size": 1}, "data_config[0].batch_size: 'data_config' isn't repeated; it takes no [...]"),
        ({"feature_configs[0].raw_feature.value_dim": 2}, "it is a 'id_feature', not a 'raw_feature'"),
        ({"train_config.dense_optimizer.sgd_optimizer.lr": 1}, "'adam_optimizer' is given, so 'sgd_optimizer' can't be set"),
        ({"model_dir.x": 1}, "model_dir.x: 'x' can't be set below a value"),
        ({"a b": 1}, "a b: 'a b' isn't a field name, with or without [...]"),
        ({"train_config.dense_optimizer.adam_optimizer.amsgrad": "yes"}, "amsgrad: expected true or false, got 'yes'"),
        ({"data_config.batch_size;model_dir": "1;2;3"}, "data_config.batch_size;model_dir: 2 paths need 2 values"),
        ({"data_config.batch_size": "many"}, "edit_config_json: data_config.batch_size: expected an integer, got 'many'"),
        (
            {"train_config.publish": "interval_s 1"},
            "train_config.publish: not protobuf text: expected ':' or '{' after 'interval_s'",
        ),
        ('{"a": }', "edit_config_json: not JSON: expecting value at character 6"),
        ("[1]", "edit_config_json: must be a JSON object of path: value"),
    ],
)
def test_refused(refusals, edits, line):
    """DCL 9.20."""
    (found,) = refusals(edits)
    assert found.startswith("edit_config_json: ")
    assert line in found


def test_a_wrong_flag_is_named_by_its_flag(errors, taobao):
    assert errors(taobao["proto"], overrides={"train_config.num_epochs": 0}) == [
        "--num_epochs: train_config.num_epochs: must be > 0, got 0"
    ]


@pytest.mark.parametrize("edits", ["[" * 100_000, '{"data_config.batch_size": ' + "1" * 5000 + "}"])
def test_json_that_python_refuses_to_read_is_refused(refusals, edits):
    (line,) = refusals(edits)
    assert line.startswith("edit_config_json: not JSON that can be read: ")


def test_milliseconds_are_no_boundary(refusals):
    (line,) = refusals({"train_config.lineage.boundary": 1772496000000})
    assert line.startswith("edit_config_json: train_config.lineage.boundary: event time 1772496000000 isn't Unix seconds")


def test_numbers_are_finite(refusals):
    path = "train_config.dense_optimizer.adam_optimizer.lr"
    assert refusals({path: "inf"}) == [f"edit_config_json: {path}: must be finite, got 'inf'"]
