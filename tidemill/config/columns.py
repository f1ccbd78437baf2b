"""The columns that a config names, and whether what it says of them can be: sides, and names that are near to others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches

from tidemill.config.feature import LATER_SIDES, SIDES, FeatureEntry
from tidemill.config.pipeline import PipelineConfig
from tidemill.config.tree import Finding, Node, Path, did_you_mean, instead, locate, path_text

_TYPO = 0.8
"""How alike two names are of which one seems to be the other, misspelt; `user_id_1` and `user_id_2` are, too."""


def used_columns(config: PipelineConfig) -> Iterator[tuple[Path, str]]:
    """Where a column is named, and its name; an expression that can't be read names none."""
    data = config.data_config
    section: Path = ("data_config",)
    for field in ("label_fields", "sample_weight_fields", "log_columns"):
        yield from (((*section, field, at), name) for at, name in enumerate(getattr(data, field)))
    singles: list[tuple[Path, str]] = [
        (("id_column",), data.id_column),
        (("sample_cost_field",), data.sample_cost_field),
        (("event_time", "column"), data.event_time.column),
    ]
    yield from (((*section, *field), name) for field, name in singles if name)
    for path, entry, prefix in _features(config):
        if data.mode == "FG_NONE":
            if entry.name:
                yield (*path, "feature_name"), prefix + entry.name
            continue
        _, _, column = _expression(entry).partition(":")
        if column:
            yield (*path, "expression"), prefix + column


def check_expressions(config: PipelineConfig) -> Iterator[tuple[Path, str]]:
    """Errors of `side:column`; encoded data (FG_NONE) need none. A missing one is its feature's own matter."""
    if config.data_config.mode == "FG_NONE":
        return
    for path, entry, _ in _features(config):
        text, where = _expression(entry), (*path, "expression")
        if not text:
            continue
        side, colon, column = text.partition(":")
        if not colon or not column:
            yield where, f"{text!r} isn't of the form side:column; write user:COLUMN, item:COLUMN or context:COLUMN"
        elif side in LATER_SIDES:
            yield where, f"tidemill doesn't have side {side!r} yet; it has {', '.join(SIDES)}"
        elif side not in SIDES:
            yield where, f"unknown side {side!r} of {text!r}{instead(side, SIDES)}"


def check_declared(config: PipelineConfig) -> Iterator[tuple[Path, str]]:
    """Columns that seem to be misspelt: not among input_fields, and like one of them that nothing uses.

    input_fields need not name all columns, but must for CSV files without a header, which have no names of their own.
    """
    data = config.data_config
    try:
        declared = set(data.columns)
    except ValueError:  # told elsewhere
        return
    if not declared or "" in declared:
        return
    all_named = data.dataset_type == "CsvDataset" and not data.with_header
    unused = declared - {name for _, name in used_columns(config)}
    for path, name in used_columns(config):
        near = get_close_matches(name, sorted(unused), n=1, cutoff=_TYPO)
        if name not in declared and (near or all_named):
            yield path, f"no column {name!r} in input_fields{did_you_mean(name, near) or instead(name, declared)}"


def check_present(config: PipelineConfig, root: Node, columns: Collection[str], file: str) -> list[Finding]:
    """Errors for the columns that a data file lacks. `root`: the tree that the config was built from."""
    return [
        Finding(locate(root, path), path_text(path), f"no column {name!r} in {file}{instead(name, columns)}")
        for path, name in used_columns(config)
        if name not in columns
    ]


def _features(config: PipelineConfig) -> Iterator[tuple[Path, FeatureEntry, str]]:
    """Each feature with the prefix of its columns; those of a sequence too."""
    for index, entry in enumerate(config.feature_configs):
        path: Path = ("feature_configs", index, entry.kind)
        members = getattr(entry.config, "features", None)
        if members is None:
            yield path, entry, ""
            continue
        prefix = f"{getattr(entry.config, 'sequence_name', '')}__"
        yield from (((*path, "features", at, member.kind), member, prefix) for at, member in enumerate(members))


def _expression(entry: FeatureEntry) -> str:
    return getattr(entry.config, "expression", None) or ""
