"""All id features of a set as flat arrays that a kernel walks in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.errors import ConfigError
from tidemill.features.hashing import hash_texts
from tidemill.features.normalize import bucketize
from tidemill.features.plan import IdPlan

# How a value becomes an id; columns of Program.plans.
STD, FARM, NUMBER, VOCABULARY, COPY = range(5)
RULE, MODULUS, SEPARATOR, DELIMITER, LIMIT, DEFAULT_START, DEFAULT_STOP, TABLE, TABLE_MASK, UNKNOWN, WIDTH = range(11)

# What a kernel reports for a value it can't turn into an id.
NOT_A_NUMBER, OUT_OF_RANGE, EMPTY_STEP = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Program:
    """The stacked id features; immutable, so threads share it.

    plans: (F, WIDTH) int64, a row per feature: RULE; MODULUS (number of ids); SEPARATOR and DELIMITER (bytes, -1 =
    none; a delimiter makes a sequence); LIMIT (values or steps kept, 0 = all); DEFAULT_START..STOP (ids for a missing
    row or step, in `defaults`); TABLE and TABLE_MASK (first slot and number of slots - 1 of its vocabulary); UNKNOWN.
    """

    plans: np.ndarray
    defaults: np.ndarray
    """(n,) int64"""
    keys: np.ndarray
    """(slots,) uint64: the std hash of a token, open addressing with linear probing"""
    ids: np.ndarray
    """(slots,) int64: the token's id, -1 = free slot"""


def build_program(plans: Sequence[IdPlan], hash_name: str) -> Program:
    """Raises ConfigError for a default_value that has no id, or two tokens of one vocabulary with the same hash."""
    rows = np.zeros((len(plans), WIDTH), np.int64)
    defaults: list[int] = []
    keys, ids = [np.zeros(1, np.uint64)], [np.full(1, -1, np.int64)]
    for row, plan in zip(rows, plans, strict=True):
        row[RULE] = _rule(plan, hash_name)
        row[MODULUS] = plan.bucketizer.num_buckets
        row[SEPARATOR] = ord(plan.separator)
        row[DELIMITER] = ord(plan.delimiter) if plan.is_sequence else -1
        row[LIMIT] = plan.sequence_length if plan.is_sequence else plan.value_dim
        row[UNKNOWN] = plan.bucketizer.oov
        row[DEFAULT_START] = len(defaults)
        defaults += default_ids(plan, hash_name)
        row[DEFAULT_STOP] = len(defaults)
        if row[RULE] == VOCABULARY:
            row[TABLE] = sum(len(part) for part in keys)
            table_keys, table_ids = _table(plan)
            row[TABLE_MASK] = len(table_keys) - 1
            keys.append(table_keys)
            ids.append(table_ids)
    return Program(rows, np.array(defaults, np.int64), np.concatenate(keys), np.concatenate(ids))


def default_ids(plan: IdPlan, hash_name: str) -> list[int]:
    """The ids that stand for a missing row (for a sequence: a missing step); empty if nothing does."""
    texts = [text for text in plan.default.split(plan.separator) if text]
    limit = 1 if plan.is_sequence else plan.value_dim
    texts = texts[:limit] if limit else texts
    bucketizer = plan.bucketizer
    if bucketizer.kind == "hash":
        return [int(value) % bucketizer.num_buckets for value in hash_texts(hash_name, texts)]
    if bucketizer.kind == "vocabulary":
        positions = dict(zip(bucketizer.tokens, bucketizer.indices, strict=True))
        return [positions.get(text, bucketizer.oov) for text in texts]
    numbers = [_default_number(plan, text) for text in texts]
    if bucketizer.kind == "boundaries":
        numbers = bucketize(np.array(numbers), bucketizer.boundaries).tolist()
    return [int(number) for number in numbers]


def _default_number(plan: IdPlan, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"feature {plan.name!r}: default value {text!r} isn't a number") from None
    last = plan.bucketizer.num_buckets - 1
    if plan.bucketizer.kind == "number" and not (text.isascii() and text.isdigit() and number <= last):
        raise ConfigError(f"feature {plan.name!r}: default value {text!r} isn't a whole number in 0..{last}")
    return number


def _rule(plan: IdPlan, hash_name: str) -> int:
    if plan.bucketizer.kind == "hash":
        return {"std": STD, "farm": FARM}[hash_name]
    return {"number": NUMBER, "vocabulary": VOCABULARY, "boundaries": COPY}[plan.bucketizer.kind]


def _table(plan: IdPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots for the tokens, at most half full. Tokens are known by their 64-bit hash alone, hence the check."""
    hashes = hash_texts("std", plan.bucketizer.tokens)
    if len(np.unique(hashes)) != len(hashes):
        raise ConfigError(f"feature {plan.name!r}: two tokens of its vocabulary have the same hash; rename one")
    size = 1 << (2 * len(hashes)).bit_length()
    keys, ids = np.zeros(size, np.uint64), np.full(size, -1, np.int64)
    for key, index in zip(hashes.tolist(), plan.bucketizer.indices, strict=True):
        slot = key & (size - 1)
        while ids[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        keys[slot], ids[slot] = key, index
    return keys, ids
