"""Kinds by their names, and what is said of those that nobody knows."""

from __future__ import annotations

import pytest

from tidemill.errors import ConfigError
from tidemill.registry import kinds, resolve


def test_a_kind_of_tzrec_that_is_not_there_yet_is_no_typing_mistake():
    """A config of tzrec is told what it can use instead, not a name that looks alike."""
    with pytest.raises(ConfigError) as caught:
        resolve("feature", "combo_feature")
    assert str(caught.value) == f"tidemill doesn't have combo_feature yet; it has {', '.join(kinds('feature'))}"


def test_a_misspelt_kind_is_told_the_nearest_one():
    with pytest.raises(ConfigError) as caught:
        resolve("source", "kafak")
    assert str(caught.value) == "unknown source 'kafak'; did you mean 'kafka'?"


def test_a_kind_like_no_other_is_told_all_of_them():
    with pytest.raises(ConfigError) as caught:
        resolve("storage", "zzz")
    assert str(caught.value) == "unknown storage 'zzz'; known: file, fsspec"
