"""Kind -> class, imported when it is first asked for.

A family ("source", "feature", "model", ...) maps the kinds that a config may name to `module:Class`. Third parties add
kinds by an entry point of the group `tidemill.<family>`, whose name is the kind.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from typing import Any

from tidemill.errors import ConfigError, MissingExtraError

_BUILT_IN: dict[str, dict[str, str]] = {
    "source": {
        "parquet": "tidemill.data.sources.parquet:ParquetSource",
        "csv": "tidemill.data.sources.csv:CsvSource",
        "kafka": "tidemill.data.sources.kafka:KafkaSource",
        "maxcompute": "tidemill.data.sources.maxcompute.source:MaxComputeSource",
        "folder": "tidemill.data.sources.folder:FolderSource",
        "synthetic": "tidemill.data.sources.synthetic:SyntheticSource",
    },
    "output": {
        "parquet": "tidemill.data.writers.parquet:ParquetOutput",
        "csv": "tidemill.data.writers.csv:CsvOutput",
        "kafka": "tidemill.data.writers.kafka:KafkaOutput",
        "maxcompute": "tidemill.data.writers.maxcompute.output:MaxComputeOutput",
    },
    "feature": {
        "id_feature": "tidemill.features.kinds.id:IdFeature",
        "raw_feature": "tidemill.features.kinds.raw:RawFeature",
        "sequence_feature": "tidemill.features.kinds.sequence:SequenceFeature",
        "sequence_id_feature": "tidemill.features.kinds.id:SequenceIdFeature",
        "sequence_raw_feature": "tidemill.features.kinds.raw:SequenceRawFeature",
    },
    "model": {
        "multi_tower": "tidemill.models.zoo.multi_tower:MultiTower",
        "multi_tower_din": "tidemill.models.zoo.multi_tower_din:MultiTowerDIN",
    },
    "storage": {
        "file": "tidemill.storage.backends.local:LocalStorage",
        "fsspec": "tidemill.storage.backends.fsspec:FsspecStorage",
    },
}

_LATER: dict[str, tuple[str, ...]] = {
    "feature": (
        "combo_feature",
        "lookup_feature",
        "match_feature",
        "expr_feature",
        "overlap_feature",
        "tokenize_feature",
        "custom_feature",
        "kv_dot_product",
        "bool_mask_feature",
        "combine_feature",
        "sequence_combo_feature",
        "sequence_lookup_feature",
        "sequence_match_feature",
        "sequence_expr_feature",
        "sequence_overlap_feature",
        "sequence_tokenize_feature",
        "sequence_custom_feature",
        "sequence_kv_dot_product",
        "sequence_bool_mask_feature",
        "sequence_combine_feature",
    ),
    "model": (
        "dlrm",
        "deepfm",
        "mask_net",
        "wide_and_deep",
        "dcn_v1",
        "dcn_v2",
        "xdeepfm",
        "wukong",
        "simple_multi_task",
        "mmoe",
        "dbmtl",
        "ple",
        "dc2vr",
        "dlrm_hstu",
        "pepnet",
        "ultra_hstu",
        "dssm",
        "dssm_v2",
        "dat",
        "hstu_match",
        "mind",
        "tdm",
        "rocket_launching",
        "sid_rqvae",
        "sid_rqkmeans",
    ),
}
"""Kinds of tzrec that aren't here yet: not a typing mistake, so no other name is proposed."""

_EXTRAS = {"odps": "maxcompute"}
"""Package that a kind may need -> the extra of ours that brings it."""


def kinds(family: str) -> list[str]:
    """All kinds of a family, sorted; built in and from entry points."""
    return sorted({*_family(family), *(entry.name for entry in entry_points(group=f"tidemill.{family}"))})


def resolve(family: str, kind: str) -> type:
    """The class of a kind. Raises ConfigError that names the nearest known kind, MissingExtraError that says what to install."""
    target = _family(family).get(kind)
    if target is not None:
        return _load(target, f"{kind} {family}")
    for entry in entry_points(group=f"tidemill.{family}", name=kind):
        return entry.load()
    known = kinds(family)
    if kind in _LATER.get(family, ()):
        raise ConfigError(f"tidemill doesn't have {kind} yet; it has {', '.join(known)}")
    near = difflib.get_close_matches(kind, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise ConfigError(f"unknown {family} {kind!r}; {hint}")


def component_config(family: str, kind: str) -> Any:
    """The config class that stands beside the class of a kind: what a pipeline config asks for by name. Raises like `resolve`."""
    return resolve(family, kind).Config  # type: ignore[attr-defined]


def _load(target: str, what: str) -> type:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            raise
        raise MissingExtraError(f"{what} needs the package {error.name}: pip install 'tidemill[{extra}]'") from None


def _family(family: str) -> dict[str, str]:
    try:
        return _BUILT_IN[family]
    except KeyError:
        raise ConfigError(f"unknown family {family!r}; known: {', '.join(sorted(_BUILT_IN))}") from None
