"""What no single field can tell: rules across sections. Works on a config that was built, and returns findings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from tidemill.config.base import Config
from tidemill.config.columns import check_declared, check_expressions
from tidemill.config.data import SOURCE_KINDS, DataConfig, KafkaConfig, parse_columns
from tidemill.config.kafka_uri import parse_kafka_uri
from tidemill.config.odps_uri import parse_odps_paths
from tidemill.config.pipeline import PipelineConfig
from tidemill.config.tree import Finding, Node, Path, did_you_mean, locate, path_text

ROW_OPTIONS = ("hash_bucket_size", "num_buckets", "vocab_list", "vocab_dict", "vocab_file", "zch", "dynamicemb", "boundaries")
Found = Iterator[tuple[Path, str]]


def cross_check(config: PipelineConfig, root: Node) -> list[Finding]:
    """Errors and warnings, in the order of the sections; `root` is the tree that the config was built from."""
    errors = [
        _limits,
        _source,
        _columns,
        _optimizers,
        _handover,
        _features,
        check_expressions,
        check_declared,
        _groups,
        _model,
        _export,
    ]
    findings = [Finding(locate(root, path), path_text(path), text) for rule in errors for path, text in rule(config)]
    warnings = [
        Finding(locate(root, path), path_text(path), text, "warning")
        for rule in (_idle, _idle_batching, _stream_limits)
        for path, text in rule(config)
    ]
    return findings + warnings


def _limits(config: PipelineConfig) -> Found:
    train = config.train_config
    if (train.num_steps is None) == (train.num_epochs is None):
        given = "neither is given" if train.num_steps is None else "both are given"
        yield ("train_config",), f"give num_steps or num_epochs, and not both; {given}"
    if train.fine_tune_ckpt_param_map and not train.fine_tune_checkpoint:
        yield ("train_config", "fine_tune_ckpt_param_map"), "needs fine_tune_checkpoint, whose parameters it maps"


def _source(config: PipelineConfig) -> Found:
    data = config.data_config
    if not data.dataset_type:  # has an error
        return
    if data.dataset_type not in SOURCE_KINDS:
        known = ", ".join(SOURCE_KINDS)
        yield ("data_config", "dataset_type"), f"{data.dataset_type} comes later; supported now: {known}"
    elif data.dataset_type != "KafkaDataset":
        if config.train_input_path.startswith("kafka://"):
            why = f"train_input_path is a Kafka address, which needs KafkaDataset; got {data.dataset_type}"
            yield ("data_config", "dataset_type"), why
        if data.kafka is not None:
            yield ("data_config", "kafka"), f"needs dataset_type KafkaDataset, got {data.dataset_type}"
        if data.dataset_type == "OdpsDataset":
            yield from _maxcompute(config)
        elif not config.train_input_path:
            yield ("train_input_path",), "empty; name the training data"
    elif data.kafka is None:
        try:
            parse_kafka_uri(config.train_input_path)
        except ValueError as error:
            yield ("train_input_path",), f"not a Kafka address: {error}. Or write data_config.kafka"
    if config.eval_input_path.startswith("kafka://"):
        yield ("eval_input_path",), "a topic has no end to evaluate up to; name files or a table"
    if data.dataset_type == "FolderDataset" and not data.event_time.column:
        yield ("data_config", "dataset_type"), "needs data_config.event_time.column: files have no other event time"
    if data.dataset_type == "CsvDataset":
        yield from _csv(data)
    if data.kafka is not None:
        yield from _messages(data.kafka)
    if data.folder.dead_letter.topic:
        yield ("data_config", "folder", "dead_letter", "topic"), "a folder has no topics; dead letters are kept in the run's folder"
    if not config.model_dir:
        yield ("model_dir",), "empty; name the folder of checkpoints"
    if data.mode == "FG_BUCKETIZE":
        yield ("data_config", "fg_mode"), "FG_BUCKETIZE comes later; supported now: FG_NONE, FG_DAG"


def _maxcompute(config: PipelineConfig) -> Found:
    tables = config.data_config.maxcompute.tables
    if config.train_input_path and tables:
        yield ("data_config", "maxcompute", "tables"), "give train_input_path or tables, not both"
    for field in ("train_input_path", "eval_input_path"):
        path = getattr(config, field)
        try:
            if path or (field == "train_input_path" and not tables):
                parse_odps_paths(path)
        except ValueError as error:
            yield (field,), str(error)


def _messages(kafka: KafkaConfig) -> Found:
    path, format_, has_file = ("data_config", "kafka"), kafka.message_format, bool(kafka.schema_file)
    if format_ in ("avro", "protobuf") and has_file == (kafka.schema_registry is not None):
        yield (*path, "message_format"), f"{format_} needs the messages' schemas: give schema_registry or schema_file, and not both"
    if format_ == "json" and has_file:
        yield (*path, "schema_file"), "JSON has no schema; input_fields say the columns' types"
    if format_ == "arrow" and kafka.schema_registry is not None:
        yield (*path, "schema_registry"), "Arrow messages hold their schema; if they don't, give schema_file"
    if kafka.dead_letter.topic in kafka.topic:
        yield (*path, "dead_letter", "topic"), "is read itself, so what can't be used would come again and again"


def _csv(data: DataConfig) -> Found:
    if not data.with_header and not data.input_fields and not data.input_fields_str:
        yield (
            ("data_config", "dataset_type"),
            "without a header, input_fields must list all columns of the files; or set with_header",
        )
    if len(data.delimiter) != 1 or not data.delimiter.isascii() or data.delimiter in '"\r\n':
        yield ("data_config", "delimiter"), f"must be one ASCII character, no quote or line end; got {data.delimiter!r}"


def _columns(config: PipelineConfig) -> Found:
    data = config.data_config
    if data.input_fields and data.input_fields_str:
        yield ("data_config", "input_fields_str"), "give input_fields or input_fields_str, not both"
    try:
        parse_columns(data.input_fields_str)
    except ValueError as error:
        yield ("data_config", "input_fields_str"), str(error)
    for index, name in _repeats([field.input_name for field in data.input_fields]):
        yield ("data_config", "input_fields", index, "input_name"), f"column {name!r} is listed twice"
    if not data.label_fields:
        yield ("data_config", "label_fields"), "empty; name the label column"
    if data.batch_cost_size and not data.sample_cost_field:
        yield ("data_config", "batch_cost_size"), "needs sample_cost_field, the column with the cost of a row"


def _optimizers(config: PipelineConfig) -> Found:
    for name in ("sparse_optimizer", "dense_optimizer"):
        optimizer = getattr(config.train_config, name)
        if optimizer.one_of("optimizer") is None:
            yield ("train_config", name), f"no optimizer is given; one of {', '.join(optimizer.oneofs['optimizer'])}"
        schedule, block = optimizer.schedule
        if schedule == "manual_step_learning_rate":
            path = ("train_config", name, schedule)
            if len(block.schedule_sizes) != len(block.learning_rates):
                yield path, "needs as many learning_rates as schedule_sizes"
            elif list(block.schedule_sizes) != sorted(set(block.schedule_sizes)):
                yield (*path, "schedule_sizes"), "must ascend"


def _handover(config: PipelineConfig) -> Found:
    successor = config.train_config.handover.successor_dir
    if successor and same_folder(successor, config.model_dir):
        path = ("train_config", "handover", "successor_dir")
        yield path, f"the successor's folder is this run's own model_dir ({config.model_dir}); name the next day's"


def same_folder(one: str, other: str) -> bool:
    """Whether two paths or addresses name one folder."""
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def _features(config: PipelineConfig) -> Found:
    names = [entry.name for entry in config.feature_configs]
    for index, name in _repeats(names):
        entry = config.feature_configs[index]
        yield ("feature_configs", index, entry.kind, "feature_name"), f"feature {name!r} is defined twice"
    for index, entry in enumerate(config.feature_configs):
        path: Path = ("feature_configs", index, entry.kind)
        yield from _row_options(entry.config, entry.name, path)


def _row_options(feature: Config, name: str, path: Path) -> Found:
    given = [option for option in ROW_OPTIONS if getattr(feature, option, None)]
    if len(given) > 1:
        yield (*path, given[1]), f"feature {name!r}: only one of {', '.join(given)} can decide the number of rows"
    boundaries = getattr(feature, "boundaries", ())
    if boundaries and list(boundaries) != sorted(set(boundaries)):
        yield (*path, "boundaries"), f"feature {name!r}: boundaries must ascend"


def _groups(config: PipelineConfig) -> Found:
    groups = config.model.feature_groups
    known = {name for entry in config.feature_configs for name in entry.members}
    if not groups:
        yield ("model_config", "feature_groups"), "empty; a model needs a feature group"
    for index, name in _repeats([group.group_name for group in groups]):
        yield ("model_config", "feature_groups", index, "group_name"), f"group {name!r} is defined twice"
    for index, group in enumerate(groups):
        path: Path = ("model_config", "feature_groups", index, "feature_names")
        if group.group_type not in ("DEEP", "SEQUENCE"):
            type_path = ("model_config", "feature_groups", index, "group_type")
            yield type_path, f"{group.group_type} comes later; supported now: DEEP, SEQUENCE"
        if not group.feature_names and not group.sequence_groups:
            yield path, f"group {group.group_name!r} has no features"
        yield from _members(group.group_name, group.feature_names, known, path)
        for at, nested in enumerate(group.sequence_groups):
            nested_path = ("model_config", "feature_groups", index, "sequence_groups", at, "feature_names")
            yield from _members(nested.group_name, nested.feature_names, known, nested_path)


def _members(group: str, names: tuple[str, ...], known: set[str], path: Path) -> Found:
    for at, name in enumerate(names):
        if _lacks(known, name):
            yield (*path, at), f"group {group!r}: no feature {name!r}{did_you_mean(name, known)}"
    for at, name in _repeats(names):
        yield (*path, at), f"group {group!r} lists {name!r} twice"


def _model(config: PipelineConfig) -> Found:
    known = {group.group_name for group in config.model.feature_groups}
    for field in ("towers", "din_towers"):
        for index, tower in enumerate(getattr(config.model.config, field, ())):
            name = getattr(tower, "input", None)
            if isinstance(name, str) and _lacks(known, name):
                path: Path = ("model_config", config.model.kind, field, index, "input")
                yield path, f"no feature group {name!r}{did_you_mean(name, known)}"
    for index, loss in enumerate(config.model.losses):
        if loss.one_of("loss") is None:
            yield ("model_config", "losses", index), "no loss is given"
    for index, metric in enumerate(config.model.metrics):
        if metric.one_of("metric") is None:
            yield ("model_config", "metrics", index), "no metric is given"
        features = {entry.name for entry in config.feature_configs}
        if metric.grouped_auc is not None and _lacks(features, metric.grouped_auc.grouping_key):
            path = ("model_config", "metrics", index, "grouped_auc", "grouping_key")
            key = metric.grouped_auc.grouping_key
            yield path, f"no feature {key!r}{did_you_mean(key, features)}"


def _export(config: PipelineConfig) -> Found:
    export = config.export_config
    if export.exporter_type != "best":
        return
    if not config.eval_input_path:
        yield ("export_config", "exporter_type"), "best needs eval_input_path: what is best, evaluations say"
        return
    known = [found[0] for metric in config.model.metrics if (found := metric.one_of("metric")) is not None]
    if export.best_exporter_metric not in known:
        path: Path = ("export_config", "best_exporter_metric")
        yield (
            path,
            f"no metric {export.best_exporter_metric!r} in model_config.metrics{did_you_mean(export.best_exporter_metric, known)}",
        )


def _lacks(known: set[str], name: str) -> bool:
    """Whether nothing has this name; what has an error in its own name (and is called "") may be what is meant."""
    return name not in known and not any(other == "" or other.endswith("__") for other in known)


def _idle(config: PipelineConfig) -> Found:
    used = {name for group in config.model.feature_groups for name in group.feature_names}
    used |= {n for g in config.model.feature_groups for nested in g.sequence_groups for n in nested.feature_names}
    for index, entry in enumerate(config.feature_configs):
        if used.isdisjoint(entry.members) and not getattr(entry.config, "stub_type", False):
            yield ("feature_configs", index, entry.kind), f"feature {entry.name!r} is in no feature group"


def _idle_batching(config: PipelineConfig) -> Found:
    data = config.data_config
    if data.sample_cost_field and not data.batch_cost_size:
        yield ("data_config", "sample_cost_field"), "has no effect without batch_cost_size"
    if len(data.sample_weight_fields) > 1:
        used = data.sample_weight_fields[0]
        yield ("data_config", "sample_weight_fields"), f"a single-task model uses the first, {used!r}"
    if data.is_orderby_partition and data.reader_threads > 1:
        yield ("data_config", "reader_threads"), "several threads read several partitions at once; is_orderby_partition needs 1"
    if data.dataset_type == "KafkaDataset":
        for field in ("shuffle", "drop_remainder"):
            if getattr(data, field):
                yield ("data_config", field), "has no effect on a stream, which is read in its own order and has no end"


def _stream_limits(config: PipelineConfig) -> Found:
    train = config.train_config
    if config.data_config.dataset_type == "KafkaDataset" and train.num_epochs is not None and train.num_epochs > 1:
        yield ("train_config", "num_epochs"), "a stream is passed over once; use 1"


def _repeats(names: list[str] | tuple[str, ...]) -> list[tuple[int, str]]:
    """(index, name) of each name that came before."""
    seen: Counter[str] = Counter()
    repeats = []
    for index, name in enumerate(names):
        if name and seen[name]:
            repeats.append((index, name))
        seen[name] += 1
    return repeats
