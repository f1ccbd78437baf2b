"""Values known from tzrec: hashes, and what its generator makes of ids and numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidemill import registry
from tidemill.features import feature_set, native, vectorized
from tidemill.features.feature_set import FeatureSet
from tidemill.features.hashing import hash_texts

KNOWN = json.loads((Path(__file__).parent / "known_values.json").read_text())
PAIRS_OF_100 = """
abc 33  efg 44  hij 66  xyz 13  x 35  y 30  z 54  0 26  1 95  2 70  3 13  4 56
ua_ia 37  ua_ib 90  ub_ia 5  ub_ib 97  uc_ic 60  ud_ic 56  ug_id 40  ug_ie 57  uh_if 55
ua_abc 2  ua_efg 42  ua_hij 3  ub_hij 23  10_1 93  11_1 23  12_1 25  13_2 38  0_3 12  match_feat_1 71
"""
# FarmHash's own implementation gives these for "abc...zabc..." of each length.
LONG_FARM = {
    65: 2608948203458330154,
    128: 14061449006046005066,
    129: 11176984671211548628,
    200: 2725806534515858166,
}


@pytest.fixture(params=[native, vectorized], ids=["compiled", "numpy"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_set, "encode", request.param.encode)


def encode_texts(texts: list[Any], hash_function: str, rows: int) -> list[int]:
    config = registry.resolve("feature", "id_feature").Config(
        feature_name="f", expression="user:f", embedding_dim=1, hash_bucket_size=rows
    )
    features = FeatureSet.compile([("id_feature", config)], hash_function=hash_function)
    return features.transform(pa.table({"f": texts})).ids.values.tolist()


@pytest.mark.parametrize("name", ["std", "farm"])
def test_hashes(name: str) -> None:
    texts = list(KNOWN["hash"])
    expected = [int(KNOWN["hash"][text][name]) for text in texts]
    assert hash_texts(name, texts).tolist() == expected
    rows = 2**63 - 1
    assert encode_texts(texts, name, rows) == [value % rows for value in expected]


def test_hashes_of_the_empty_text_and_of_one_letter() -> None:
    assert hash_texts("std", ["", "a"]).tolist() == [6142509188972423790, 4993892634952068459]
    assert hash_texts("farm", ["", "a"]).tolist() == [11160318154034397263, 12917804110809363939]


def test_buckets_of_100() -> None:
    words = PAIRS_OF_100.split()
    assert encode_texts(words[::2], "std", 100) == [int(value) for value in words[1::2]]


def test_farm_of_long_texts() -> None:
    texts = ["".join(chr(97 + at % 26) for at in range(size)) for size in LONG_FARM]
    assert hash_texts("farm", texts).tolist() == list(LONG_FARM.values())
    assert encode_texts(texts, "farm", 2**63 - 1) == [value % (2**63 - 1) for value in LONG_FARM.values()]


@pytest.mark.parametrize("case", KNOWN["cases"], ids=lambda case: f"{case['kind']}-{case['options']['type']}")
def test_generated_values(case: dict[str, Any]) -> None:
    options = {**case["options"], "feature_name": "f", "expression": "user:c", "embedding_dim": 4}
    kind = f"{options.pop('type')}_feature"
    hash_function = "farm" if options.pop("farm", False) else "std"
    is_sequence = case["kind"] == "sequence"
    if is_sequence:
        kind, options["value_dim"] = f"sequence_{kind}", 1
        options["sequence_delim"] = case["delim"]
    elif "\x1d" in options.get("default_value", "") and kind == "raw_feature":
        options["value_dim"] = 2
    config = registry.resolve("feature", kind).Config(**options)
    features = FeatureSet.compile([(kind, config)], hash_function=hash_function)
    batch = features.transform(pa.table({"c": case["columns"][0]}))
    if case["lengths"] is None if not is_sequence else False:
        assert batch.dense.reshape(-1).numpy() == pytest.approx(np.array(case["values"], np.float32))
        return
    ids = batch.sequences if is_sequence else batch.ids
    assert ids.lengths.tolist() == case["seq_lengths" if is_sequence else "lengths"]
    assert ids.values.tolist() == (_first_of_each_step(case) if is_sequence else case["values"])


def _first_of_each_step(case: dict[str, Any]) -> list[int]:
    """Steps hold one id here, so a known multi-valued step counts by its first."""
    begins = np.cumsum([0, *case["key_lengths"][:-1]])
    return [case["values"][at] for at in begins]
