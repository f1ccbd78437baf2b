"""Every class of error, with its exact text."""

from __future__ import annotations

import re

import pytest

from tidemill.config.data import SOURCE_KINDS
from tidemill.errors import ConfigError

PROTO = """train_input_path: "day"
eval_input_path: ""
model_dir: "model"
train_config {
  sparse_optimizer { adagrad_optimizer { lr: 0.01 } }
  dense_optimizer { adam_optimizer { lr: 0.001 } }
  num_epochs: 1
}
data_config {
  dataset_type: ParquetDataset
  label_fields: "click"
}
feature_configs { id_feature { feature_name: "user" embedding_dim: 4 } }
model_config {
  feature_groups { group_name: "deep" feature_names: "user" }
  multi_tower_din { towers { input: "deep" } final { hidden_units: 4 } }
  losses { binary_cross_entropy {} }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("num_epochs", "num_epoch", "<text>:7: train_config.num_epoch: unknown field; did you mean 'num_epochs'?"),
        ("  num_epochs: 1\n", "  zzz: 1\n", "<text>:7: train_config.zzz: unknown field"),
        ("num_epochs: 1", 'num_epochs: "one"', "<text>:7: train_config.num_epochs: expected an integer, got 'one'"),
        ("num_epochs: 1", "num_epochs: true", "<text>:7: train_config.num_epochs: expected an integer, got true"),
        ("num_epochs: 1", "num_epochs: 0", "<text>:7: train_config.num_epochs: must be > 0, got 0"),
        ("num_epochs: 1", "num_epochs { x: 1 }", "<text>:7: train_config.num_epochs: expected an integer, got a section"),
        ("num_epochs: 1", "num_epochs: 1 num_epochs: 2", "<text>:7: train_config.num_epochs: given 2 times, on lines 7, 7"),
        (
            'model_dir: "model"',
            'model_dir: "model" export_config { exporter_type: "best" }',
            "<text>:3: export_config.exporter_type: best needs eval_input_path: what is best, evaluations say",
        ),
        ('model_dir: "model"', "model_dir: model", "<text>:3: model_dir: expected a string, got the word model; put it in quotes"),
        ('model_dir: "model"', "model_dir: 3", "<text>:3: model_dir: expected a string, got 3; put it in quotes"),
        ('model_dir: "model"', "", "<text>:1: model_dir: required"),
        ('model_dir: "model"', 'model_dir: ""', "<text>:3: model_dir: empty; name the folder of checkpoints"),
        ('train_input_path: "day"', "", "<text>:1: train_input_path: required"),
        ('train_input_path: "day"', 'train_input_path: ""', "<text>:1: train_input_path: empty; name the training data"),
        ('eval_input_path: ""', "", "<text>:1: eval_input_path: required"),
        (
            "ParquetDataset",
            "ParquetDataSet",
            "<text>:10: data_config.dataset_type: unknown value 'ParquetDataSet'; did you mean 'ParquetDataset'?",
        ),
        (
            "ParquetDataset",
            "OdpsDatasetV1",
            f"<text>:10: data_config.dataset_type: OdpsDatasetV1 comes later; supported now: {', '.join(SOURCE_KINDS)}",
        ),
        (
            "ParquetDataset",
            "CsvDataset",
            "<text>:10: data_config.dataset_type: without a header, input_fields must list all columns of the files; or set "
            "with_header",
        ),
        (
            "ParquetDataset",
            "CsvDataset\nwith_header: true\ndelimiter: '||'",
            "<text>:12: data_config.delimiter: must be one ASCII character, no quote or line end; got '||'",
        ),
        (
            "adam_optimizer { lr: 0.001 }",
            "adam_optimizer {}\nsgd_optimizer {}",
            "<text>:7: train_config.dense_optimizer.sgd_optimizer: only one of sgd_optimizer, adagrad_optimizer, adam_optimizer, "
            "adamw_optimizer, adadelta_optimizer, rmsprop_optimizer can be given; 'adam_optimizer' is on line 6",
        ),
        (
            "adam_optimizer { lr: 0.001 }",
            "",
            "<text>:6: train_config.dense_optimizer: no optimizer is given; one of sgd_optimizer, adagrad_optimizer, "
            "adam_optimizer, adamw_optimizer, adadelta_optimizer, rmsprop_optimizer",
        ),
        (
            "adam_optimizer { lr: 0.001 }",
            "adamw_optimizer { lr: 0.1 }",
            "<text>:6: train_config.dense_optimizer.adamw_optimizer: tidemill doesn't have adamw_optimizer yet; it has "
            "sgd_optimizer, adagrad_optimizer, adam_optimizer",
        ),
        (
            "adam_optimizer { lr: 0.001 }",
            "adam_optimizer { lr: nan }",
            "<text>:6: train_config.dense_optimizer.adam_optimizer.lr: must be finite, got nan",
        ),
        (
            "num_epochs: 1",
            "num_epochs: 1 num_steps: 1000",
            "<text>:4: train_config: give num_steps or num_epochs, and not both; both are given",
        ),
        ("num_epochs: 1", "", "<text>:4: train_config: give num_steps or num_epochs, and not both; neither is given"),
        (
            "num_epochs: 1",
            "num_epochs: 1\nsave_checkpoints_timestamp_quorum: 0",
            "<text>:8: train_config.save_checkpoints_timestamp_quorum: must be > 0, got 0",
        ),
        (
            "num_epochs: 1",
            "num_epochs: 1\nsave_checkpoints_timestamp_quorum: 1.5",
            "<text>:8: train_config.save_checkpoints_timestamp_quorum: must be <= 1, got 1.5",
        ),
        (
            "num_epochs: 1",
            "num_epochs: 1\nhandover { tolerance_s: -1 }",
            "<text>:8: train_config.handover.tolerance_s: must be >= 0, got -1",
        ),
        (
            "num_epochs: 1",
            "num_epochs: 1\nhandover { tolerance_s: inf }",
            "<text>:8: train_config.handover.tolerance_s: must be finite, got inf",
        ),
        (
            "num_epochs: 1",
            'num_epochs: 1\nhandover { successor_dir: "./model/" }',
            "<text>:8: train_config.handover.successor_dir: the successor's folder is this run's own model_dir (model); "
            "name the next day's",
        ),
        ('label_fields: "click"', "", "<text>:9: data_config.label_fields: empty; name the label column"),
        (
            'label_fields: "click"',
            'label_fields: "click"\ninput_fields_str: "a:INT64;b:INTEGER"',
            "<text>:12: data_config.input_fields_str: 'b:INTEGER' isn't name:TYPE with a known type, once a name",
        ),
        (
            'label_fields: "click"',
            'label_fields: "click"\nkafka { brokers: "h:1" topic: "t" }',
            "<text>:12: data_config.kafka: needs dataset_type KafkaDataset, got ParquetDataset",
        ),
        (
            'train_input_path: "day"',
            'train_input_path: "kafka://h:1/t?group.id=g"',
            "<text>:10: data_config.dataset_type: train_input_path is a Kafka address, which needs KafkaDataset; got "
            "ParquetDataset",
        ),
        (
            'eval_input_path: ""',
            'eval_input_path: "kafka://h:1/t?group.id=g"',
            "<text>:2: eval_input_path: a topic has no end to evaluate up to; name files or a table",
        ),
        (
            "ParquetDataset",
            "KafkaDataset",
            "<text>:1: train_input_path: not a Kafka address: not of the form kafka://host:port[,host:port]/topic?group.id=GROUP. "
            "Or write data_config.kafka",
        ),
        ("id_feature", "id_featur", "<text>:13: feature_configs[0].id_featur: unknown feature 'id_featur'"),
        (
            "id_feature {",
            "raw_feature { feature_name: 'user' }\nid_feature {",
            "<text>:14: feature_configs[0].id_feature: only one feature can be given; 'raw_feature' is on line 13",
        ),
        (
            'id_feature { feature_name: "user" embedding_dim: 4 }',
            "",
            "<text>:13: feature_configs[0]: no feature is given; write its kind and its fields here",
        ),
        ("embedding_dim: 4", "", "<text>:13: feature_configs[0].id_feature.embedding_dim: required"),
        (
            "embedding_dim: 4",
            "embedding_dim: 4 num_buckets: 3\nvocab_list: 'a'",
            "<text>:14: feature_configs[0].id_feature.vocab_list: feature 'user': only one of num_buckets, vocab_list can decide "
            "the number of rows",
        ),
        (
            'id_feature { feature_name: "user" embedding_dim: 4 }',
            'raw_feature { feature_name: "user"\nboundaries: [2, 1] }',
            "<text>:14: feature_configs[0].raw_feature.boundaries: feature 'user': boundaries must ascend",
        ),
        (
            "model_config {",
            'feature_configs { raw_feature { feature_name: "user" } }\nmodel_config {',
            "<text>:14: feature_configs[1].raw_feature.feature_name: feature 'user' is defined twice",
        ),
        (
            'feature_names: "user"',
            'feature_names: "usr"',
            "<text>:15: model_config.feature_groups[0].feature_names[0]: group 'deep': no feature 'usr'; did you mean 'user'?",
        ),
        (
            'feature_names: "user"',
            'feature_names: ["user", "user"]',
            "<text>:15: model_config.feature_groups[0].feature_names[1]: group 'deep' lists 'user' twice",
        ),
        (
            'feature_names: "user"',
            'feature_names: "user" group_type: WIDE',
            "<text>:15: model_config.feature_groups[0].group_type: WIDE comes later; supported now: DEEP, SEQUENCE",
        ),
        (
            'input: "deep"',
            'input: "dep"',
            "<text>:16: model_config.multi_tower_din.towers[0].input: no feature group 'dep'; did you mean 'deep'?",
        ),
        (
            "losses { binary_cross_entropy {} }",
            "losses {}",
            "<text>:17: model_config.losses[0]: no loss is given",
        ),
        (
            "losses { binary_cross_entropy {} }",
            "losses { jrc_loss { session_name: 'user' } }",
            "<text>:17: model_config.losses[0].jrc_loss: tidemill doesn't have jrc_loss yet; it has binary_cross_entropy",
        ),
        (
            "losses { binary_cross_entropy {} }",
            "metrics { grouped_auc { grouping_key: 'users' } }",
            "<text>:17: model_config.metrics[0].grouped_auc.grouping_key: no feature 'users'; did you mean 'user'?",
        ),
        ("multi_tower_din {", "multi_tower_dim {", "<text>:16: model_config.multi_tower_dim: unknown model 'multi_tower_dim'"),
        ("losses {", "loses {", "<text>:17: model_config.loses: unknown field; did you mean 'losses'?"),
    ],
)
def test_one_error(errors, old, new, line):
    assert old in PROTO
    assert errors(PROTO.replace(old, new, 1)) == [line]


def test_all_errors_are_told_at_once_in_the_order_of_lines(errors):
    text = (
        PROTO.replace("num_epochs: 1", "num_epoch: 1")
        .replace("embedding_dim: 4", "embedding_dim: 'x'")
        .replace("lr: 0.01", "lr: -1")
    )
    assert errors(text) == [
        "<text>:5: train_config.sparse_optimizer.adagrad_optimizer.lr: must be >= 0, got -1",
        "<text>:7: train_config.num_epoch: unknown field; did you mean 'num_epochs'?",
        "<text>:13: feature_configs[0].id_feature.embedding_dim: expected an integer, got 'x'",
    ]


@pytest.mark.parametrize(
    ("edits", "lines"),
    [
        ([("model_dir", "model_dirr")], ["<text>:3: model_dirr: unknown field; did you mean 'model_dir'?"]),
        (
            [("feature_configs", "feature_config"), ('input: "deep"', 'input: "dep"')],
            [
                "<text>:13: feature_config: unknown field; did you mean 'feature_configs'?",
                "<text>:16: model_config.multi_tower_din.towers[0].input: no feature group 'dep'; did you mean 'deep'?",
            ],
        ),
        (
            [
                ("feature_name:", "feature_nam:"),
                ("lr: 0.01", "lr: -1"),
                ('"click"', '""'),
                ("losses { binary_cross_entropy {} }", "losses {}"),
            ],
            [
                "<text>:5: train_config.sparse_optimizer.adagrad_optimizer.lr: must be >= 0, got -1",
                "<text>:13: feature_configs[0].id_feature.feature_nam: unknown field; did you mean 'feature_name'?",
                "<text>:17: model_config.losses[0]: no loss is given",
            ],
        ),
        (
            [("id_feature", "id_featur"), ("num_epochs: 1", "num_epochs: 1 num_steps: 2")],
            [
                "<text>:4: train_config: give num_steps or num_epochs, and not both; both are given",
                "<text>:13: feature_configs[0].id_featur: unknown feature 'id_featur'",
            ],
        ),
    ],
)
def test_rules_are_checked_beside_other_errors_and_nothing_is_told_twice(errors, edits, lines):
    text = PROTO
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    assert errors(text) == lines


@pytest.mark.parametrize("harm", ["", "zzz", "{ zzz: 1 }"])
def test_no_word_that_is_harmed_ends_in_anything_but_findings(load, harm):
    """Every word of a config, harmed by itself: the rules meet each kind of section that stands in for a wrong one."""
    words = [match.span() for match in re.finditer(r"[\w.]+", PROTO)]
    for start, end in words:
        text = PROTO[:start] + harm + PROTO[end:]
        told = ""
        try:
            load(text)
        except ConfigError as error:
            told = str(error)
        assert all(re.match(r"<text>:\d+: ", line) for line in told.splitlines()), told


def test_a_file_is_named_with_its_line(tmp_path, load):
    path = tmp_path / "pipeline.yaml"
    path.write_text("model_dir: m\ntrain_config:\n  num_step: 3\n")
    with pytest.raises(ConfigError, match=r"pipeline\.yaml:3: train_config\.num_step: unknown field; did you mean 'num_steps'\?"):
        load(path)


def test_files_that_cannot_be_read(tmp_path, errors):
    assert errors(str(tmp_path / "no.yaml")) == [f"{tmp_path / 'no.yaml'}: can't read this config: No such file or directory"]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    assert errors(tmp_path / "binary.yaml") == [f"{tmp_path / 'binary.yaml'}: not UTF-8 text"]


def test_an_empty_config_names_all_that_is_required(errors):
    required = ["train_input_path", "eval_input_path", "model_dir", "train_config", "data_config", "model_config"]
    assert errors("# nothing\n", format="yaml") == [f"<text>:1: {name}: required" for name in required]


def test_warnings_name_fields_without_an_effect_unless_they_say_the_default(load):
    text = PROTO.replace("num_epochs: 1", "num_epochs: 1\nuse_tensorboard: false\nis_profiling: false")
    text = text.replace('label_fields: "click"', 'label_fields: "click"\nnum_workers: 2')
    assert [str(warning) for warning in load(text).warnings] == [
        "<text>:8: train_config.use_tensorboard: accepted, has no effect yet",
        "<text>:14: data_config.num_workers: accepted, has no effect: "
        "reading runs in threads; see reader_threads and transform_threads",
    ]


def test_an_unused_feature_is_a_warning(load):
    text = PROTO.replace("model_config {", 'feature_configs { raw_feature { feature_name: "age" } }\nmodel_config {')
    assert [str(warning) for warning in load(text).warnings] == [
        "<text>:14: feature_configs[1].raw_feature: feature 'age' is in no feature group"
    ]


def test_members_of_a_sequence_are_features(load, errors):
    sequence = """feature_configs { sequence_feature {
      sequence_name: "clicks" sequence_length: 5 sequence_pk: "user:u"
      features { id_feature { feature_name: "item" embedding_dim: 4 } }
      features { raw_feature { feature_name: "price" } } } }
    model_config { feature_groups { group_name: "seq" group_type: SEQUENCE feature_names: "user" feature_names: "clicks__item" }"""
    loaded = load(PROTO.replace("model_config {", sequence))
    assert loaded.config.feature_configs[1].members == ("clicks__item", "clicks__price")
    assert [str(warning) for warning in loaded.warnings] == [
        "<text>:15: feature_configs[1].sequence_feature.sequence_pk: accepted, has no effect yet"
    ]
    (error,) = errors(PROTO.replace("model_config {", sequence.replace("clicks__item", "clicks__itm")))
    assert error.endswith("group 'seq': no feature 'clicks__itm'; did you mean 'clicks__item'?")


def test_a_stream_is_passed_over_once(load, small):
    small["data_config"] |= {"dataset_type": "KafkaDataset", "kafka": {"brokers": "h:1", "topic": "t"}}
    small["train_config"]["num_epochs"] = 2
    assert [warning.message for warning in load(small).warnings] == ["a stream is passed over once; use 1"]


def test_manual_steps_must_fit(errors, small):
    rates = {"schedule_sizes": [10, 5], "learning_rates": [0.1, 0.2]}
    small["train_config"]["dense_optimizer"]["manual_step_learning_rate"] = rates
    assert errors(small)[0].endswith("manual_step_learning_rate.schedule_sizes: must ascend")
    rates["learning_rates"] = [0.1]
    assert errors(small)[0].endswith("manual_step_learning_rate: needs as many learning_rates as schedule_sizes")


COUNTS = (None, 1, 2, 3, 5, 1000)


@pytest.mark.parametrize(
    ("kafka", "text"),
    [
        ("message_format: avro", "kafka.message_format: avro needs the messages' schemas: give schema_registry or schema_file"),
        ("message_format: protobuf schema_file: 'x' schema_registry { url: 'http://h' }", "protobuf needs the messages' schemas"),
        ("schema_file: 'x'", "kafka.schema_file: JSON has no schema"),
        ("message_format: arrow schema_registry { url: 'http://h' }", "kafka.schema_registry: Arrow messages hold their schema"),
        ("schema_registry { url: 'h:1' }", "kafka.schema_registry.url: "),
        ("dead_letter { topic: 'clicks' }", "kafka.dead_letter.topic: is read itself"),
        ("poison_window: 0", "kafka.poison_window: must be > 0"),
    ],
)
def test_messages_of_a_topic(errors, kafka, text):
    section = f"KafkaDataset\nkafka {{ brokers: 'h:1' topic: 'clicks' {kafka} }}"
    (line,) = errors(PROTO.replace("ParquetDataset", section))
    assert text in line


def test_a_folder_has_no_dead_letter_topic(errors):
    lines = errors(PROTO.replace("ParquetDataset", "FolderDataset\nfolder { dead_letter { topic: 'x' } }"))
    assert any("folder.dead_letter.topic: a folder has no topics" in line for line in lines)


@pytest.mark.parametrize("epochs", COUNTS)
@pytest.mark.parametrize("steps", COUNTS)
def test_either_steps_or_passes_bound_a_run(load, errors, steps, epochs):
    """DCL 9.17: all pairs of values, equal ones and powers of two included."""
    given = "".join(f"num_{name}: {value} " for name, value in (("steps", steps), ("epochs", epochs)) if value)
    text = PROTO.replace("num_epochs: 1", given)
    if (steps is None) != (epochs is None):
        config = load(text).config.train_config
        assert (config.num_steps, config.num_epochs) == (steps, epochs)
        return
    (error,) = errors(text)
    assert error.endswith(f"give num_steps or num_epochs, and not both; {'both are' if steps else 'neither is'} given")


@pytest.mark.parametrize("name", ["num_steps", "num_epochs"])
def test_no_steps_and_no_passes_are_refused(errors, name):
    assert errors(PROTO.replace("num_epochs: 1", f"{name}: 0")) == [f"<text>:7: train_config.{name}: must be > 0, got 0"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("batch_cost_size: 9", "data_config.batch_cost_size: needs sample_cost_field, the column with the cost of a row"),
    ],
)
def test_settings_of_batches_that_need_others(errors, data, text):
    (error,) = errors(PROTO.replace('label_fields: "click"', f'label_fields: "click" {data}'))
    assert error.endswith(text)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ('sample_cost_field: "cost"', "data_config.sample_cost_field: has no effect without batch_cost_size"),
        ('sample_weight_fields: "a" sample_weight_fields: "b"', "sample_weight_fields: a single-task model uses the first, 'a'"),
    ],
)
def test_settings_of_batches_that_say_less_than_they_seem_to(load, data, text):
    warnings = [str(warning) for warning in load(PROTO.replace('label_fields: "click"', f'label_fields: "click" {data}')).warnings]
    assert any(text in warning for warning in warnings), warnings


DAG = PROTO.replace('label_fields: "click"', 'label_fields: "click" fg_mode: FG_DAG').replace(
    'feature_name: "user"', 'feature_name: "user"\nexpression: "user:user_id"'
)
WHERE = "<text>:14: feature_configs[0].id_feature.expression: "


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("usr:user_id", "unknown side 'usr' of 'usr:user_id'; did you mean 'user'?"),
        ("zzz:user_id", "unknown side 'zzz' of 'zzz:user_id'; known: context, item, user"),
        ("feature:user_id", "tidemill doesn't have side 'feature' yet; it has user, item, context"),
        ("user_id", "'user_id' isn't of the form side:column; write user:COLUMN, item:COLUMN or context:COLUMN"),
        ("user:", "'user:' isn't of the form side:column; write user:COLUMN, item:COLUMN or context:COLUMN"),
    ],
)
def test_a_wrong_expression_is_told_with_its_line(errors, load, expression, told):
    assert errors(DAG.replace("user:user_id", expression)) == [WHERE + told]
    load(DAG.replace("user:user_id", expression).replace("FG_DAG", "FG_NONE"))


def test_a_column_that_seems_to_be_a_declared_one_misspelt_is_an_error(errors, load):
    fields = ' input_fields { input_name: "%s" input_type: INT64 }'
    text = DAG.replace("FG_DAG", "FG_DAG" + fields % "clicks" + fields % "user_id")
    assert errors(text) == ["<text>:11: data_config.label_fields[0]: no column 'click' in input_fields; did you mean 'clicks'?"]
    # A declaration may leave columns out: types are inferred then.
    load(DAG.replace("FG_DAG", "FG_DAG" + fields % "user_id"))
    # But not where it's the only thing that names them.
    csv = DAG.replace("ParquetDataset", "CsvDataset").replace("FG_DAG", "FG_DAG" + fields % "user_id")
    assert errors(csv) == ["<text>:11: data_config.label_fields[0]: no column 'click' in input_fields; known: user_id"]
