"""Whether a run can go on under a changed config."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tidemill.config.dump import REDACTED, to_plain
from tidemill.config.pipeline import PipelineConfig


class Verdict(IntEnum):
    """Ordered: the whole config's verdict is the highest of its differences'."""

    COMPATIBLE = 0
    NEW_LINEAGE = 1
    REFUSED = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rule:
    """What a difference at a path means; `*` stands for one part of a path, `**` at the end for any number."""

    pattern: str
    verdict: Verdict
    why: str

    def matches(self, path: str) -> bool:
        regex = re.escape(self.pattern).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")
        return re.fullmatch(regex, path) is not None


_OK, _NEW, _NO = Verdict.COMPATIBLE, Verdict.NEW_LINEAGE, Verdict.REFUSED

RULES = (
    Rule("train_input_path", _OK, "other data"),
    Rule("eval_input_path", _OK, "other data"),
    Rule("model_dir", _OK, "another folder"),
    Rule("train_config.sparse_optimizer.*.lr", _OK, "another rate"),
    Rule("train_config.sparse_optimizer.*_learning_rate", _OK, "another schedule"),
    Rule("train_config.sparse_optimizer.*_learning_rate.**", _OK, "another schedule"),
    Rule("train_config.sparse_optimizer.*_optimizer", _NEW, "the state of the optimizer doesn't carry over"),
    Rule("train_config.sparse_optimizer.**", _OK, "a setting of the same optimizer"),
    Rule("train_config.dense_optimizer.*_optimizer", _NEW, "the state of the optimizer doesn't carry over"),
    Rule("train_config.dense_optimizer.**", _OK, "a setting of the same optimizer"),
    Rule("train_config.lineage.boundary", _NEW, "the boundary decides which rows belong to a lineage"),
    Rule("train_config.lineage.start_margin_s", _OK, "matters at the first start only"),
    Rule("train_config.**", _OK, "how training runs, not what is trained"),
    Rule("eval_config.**", _OK, "evaluation only"),
    Rule("export_config.**", _OK, "export only"),
    Rule("data_config.hash.function", _NO, "every id would move to another row"),
    Rule("data_config.kafka", _NEW, "positions belong to the source"),
    Rule("data_config.kafka.topic", _OK, "topics may be added; one that was read in part must stay"),
    Rule("data_config.kafka.message_format", _NEW, "positions within messages belong to the format"),
    Rule("data_config.kafka.**", _OK, "the same topic, reached otherwise"),
    Rule("data_config.folder.num_splits", _NEW, "positions belong to splits"),
    Rule("data_config.dataset_type", _OK, "positions of an unknown source are skipped"),
    Rule("data_config.event_time.column", _NEW, "watermarks of another column can't be compared"),
    Rule("data_config.label_fields", _NEW, "the label means something else"),
    Rule("data_config.fg_mode", _NEW, "features are computed otherwise"),
    Rule("data_config.fg_encoded", _NEW, "features are computed otherwise"),
    Rule("data_config.fg_encoded_multival_sep", _NEW, "features are computed otherwise"),
    Rule("data_config.**", _OK, "how rows are read"),
    Rule("feature_configs.*.*.embedding_dim", _NO, "the width of a table is fixed"),
    Rule("feature_configs.*.*.hash_bucket_size", _NO, "the number of rows is fixed"),
    Rule("feature_configs.*.*.num_buckets", _NO, "the number of rows is fixed"),
    Rule("feature_configs.*.*.vocab_list", _NO, "every id would move to another row"),
    Rule("feature_configs.*.*.vocab_dict.**", _NO, "ids would move to other rows"),
    Rule("feature_configs.*.*.vocab_file", _NO, "ids would move to other rows"),
    Rule("feature_configs.*.*.boundaries", _NO, "values would move to other rows"),
    Rule("feature_configs.*.*.default_bucketize_value", _NO, "ids would move to other rows"),
    Rule("feature_configs.*.*.embedding_name", _NO, "tables are found by their names"),
    Rule("feature_configs.*.*.zch.**", _NO, "the number of rows is fixed"),
    Rule("feature_configs.*.*.dynamicemb.**", _NO, "the table is fixed"),
    Rule("feature_configs.*.*.value_dim", _NO, "the width of the input is fixed"),
    Rule("feature_configs.*.*.data_type", _NO, "the type of a table is fixed"),
    Rule("feature_configs.*.*.init_fn", _OK, "matters for new rows only"),
    Rule("feature_configs.*.*.**", _NEW, "the feature is computed otherwise"),
    Rule("feature_configs.*.*", _NO, "another kind of feature"),
    Rule("feature_configs.*", _NO, "features come and go with their tables"),
    Rule("model_config.metrics", _OK, "evaluation only"),
    Rule("model_config.train_metrics", _OK, "metrics only"),
    Rule("model_config.losses", _NEW, "the model learns something else"),
    Rule("model_config.kernel", _OK, "the same function, computed otherwise"),
    Rule("model_config.**", _NO, "the shape of the model is fixed"),
    Rule("**", _NO, "a section came or went"),
)
"""The first rule that matches decides. Features are named by `feature_name` in these paths, not by their index."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs. `old` or `new` is None where the key isn't set."""

    path: str
    old: Any
    new: Any
    verdict: Verdict
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}: {self.verdict} ({self.why})"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The verdict on a changed config, and all that differs, gravest first."""

    verdict: Verdict
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.verdict), *map(str, self.differences)])


def compare(old: PipelineConfig, new: PipelineConfig) -> Compatibility:
    """What a run of `old` may do under `new`: go on, go on as a new lineage (weights carry over), or not at all.

    Pure; secrets aren't compared.
    """
    before, after = _flat(_by_name(to_plain(old))), _flat(_by_name(to_plain(new)))
    found = []
    for path in _changed(before, after):
        one, other = before.get(path), after.get(path)
        rule = next(rule for rule in RULES if rule.matches(path))
        found.append(Difference(path, one, other, rule.verdict, rule.why))
    found.sort(key=lambda difference: -difference.verdict)
    return Compatibility(max((one.verdict for one in found), default=Verdict.COMPATIBLE), tuple(found))


def _by_name(plain: dict[str, Any]) -> dict[str, Any]:
    """feature_configs as a map from feature name, so that their order doesn't matter."""
    features = {}
    for index, entry in enumerate(plain.get("feature_configs", [])):
        (fields,) = entry.values()
        name = fields.get("feature_name") or fields.get("sequence_name") or str(index)
        features[str(name).replace(".", "_")] = entry
    return {**plain, "feature_configs": features}


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value. A section counts as a value of its own too, so that its absence is one difference."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{key}"
        if isinstance(item, dict):
            flat[path] = {}
            flat.update(_flat(item, f"{path}."))
        else:
            flat[path] = item
    return flat


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed: list[str] = []
    for path in [*before, *(path for path in after if path not in before)]:
        above = path.rpartition(".")[0]
        if before.get(path) == after.get(path) or REDACTED in (before.get(path), after.get(path)):
            continue
        if not any(above == other or above.startswith(f"{other}.") for other in changed):
            changed.append(path)
    return changed
