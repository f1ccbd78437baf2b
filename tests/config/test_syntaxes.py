"""The three syntaxes: the same config gives equal objects, and what isn't of the syntax is named by line."""

from __future__ import annotations

import contextlib
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config import json_syntax, proto_syntax, yaml_syntax
from tidemill.config.load import detect_format
from tidemill.config.tree import ConfigSyntaxError, plain


def test_the_three_syntaxes_give_equal_configs(load, taobao):
    from_proto = load(taobao["proto"], format="proto")
    from_yaml = load(taobao["yaml"], format="yaml")
    from_json = load(json.dumps(yaml.safe_load(taobao["yaml"].replace("1e-3", "0.001").replace("430548_1007", '"430548_1007"'))))
    assert from_proto.config == from_yaml.config == from_json.config
    assert from_json.source.format == "json"
    assert from_proto.warnings == from_yaml.warnings == ()


def test_what_a_taobao_config_means(load, taobao):
    config = load(taobao["proto"]).config
    assert config.model_dir == "experiments/multi_tower_din_taobao"
    assert [entry.kind for entry in config.feature_configs] == ["id_feature"] * 3 + ["raw_feature", "sequence_id_feature"]
    assert config.feature_configs[1].config.separator == "\x1d"
    assert config.feature_configs[2].config.vocab_dict == {"430548_1007": 2, "店A": 3}
    assert config.feature_configs[3].config.boundaries == (-1.5, 2.2, 30, 40)
    assert config.model.kind == "multi_tower_din"
    assert config.model.config.din_towers[0].attn_mlp.hidden_units == (36, 18)
    assert config.train_config.sparse_optimizer.optimizer[1].lr == 0.001
    name, block = config.train_config.dense_optimizer.schedule
    assert (name, block.decay_size, block.staircase) == ("exponential_decay_learning_rate", 16, False)


def test_the_format_of_a_text_without_a_telling_name(taobao):
    assert detect_format("pipeline.config", taobao["proto"]) == "proto"
    assert detect_format("pipeline.config", taobao["yaml"]) == "yaml"
    assert detect_format("pipeline.config", ' {"a": 1}') == "json"
    assert detect_format("", "train_config { num_steps: 1 }") == "proto"
    assert detect_format("x.YML", "{}") == "yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n b: 2", "f:2: not YAML: mapping values are not allowed in this context"),
        ("a: 1\nb: 2\na: 3", "f:3: a: given twice, first on line 1"),
        ("a: &x\n  - *x", "f:1: this alias contains itself"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "f:3: merge keys (<<) aren't supported; write the fields out"),
        ("? [a]\n: 1", "f:1: a key must be a name"),
    ],
)
def test_wrong_yaml(text, message):
    with pytest.raises(ConfigSyntaxError) as caught:
        yaml_syntax.parse(text, "f")
    assert str(caught.value.finding) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "f:2: a: given twice, first on line 1"),
        ('{"a": 1,\n}', "f:2: not JSON: a comma before '}'"),
        ('{"a": 1\n "b": 2}', "f:2: not JSON: expected ',', found '\"'"),
        ('{"a": [1, 2}', "f:1: not JSON: expected ',', found '}'"),
        ('{"a": tru}', "f:1: not JSON: expecting value"),
        ("{a: 1}", "f:1: not JSON: expected a key in double quotes"),
        ('{"a": 1', "f:1: not JSON: expected ',', found the end"),
        ("{}\nx", "f:2: not JSON: text after the end of the document"),
    ],
)
def test_wrong_json(text, message):
    with pytest.raises(ConfigSyntaxError) as caught:
        json_syntax.parse(text, "f")
    assert str(caught.value.finding) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb 2", "f:2: not protobuf text: expected ':' or '{' after 'b', found '2'"),
        ("a {\n b: 1", "f:2: not protobuf text: expected '}', found the end of the text"),
        ("a: 1 }", "f:1: not protobuf text: expected a field name, found '}'"),
        ("a {\n b: 1 >", "f:2: not protobuf text: expected a field name, found '>'"),
        ("a: [1 2]", "f:1: not protobuf text: expected ',' or ']', found '2'"),
        ("a: }", "f:1: not protobuf text: expected a value, found '}'"),
        ("a: - x", "f:1: not protobuf text: expected a value, found 'x'"),
        ('\na: "\\q"', "f:2: not protobuf text: unknown escape '\\q'"),
        ('a: "\\xff"', "f:1: not protobuf text: a string that isn't UTF-8"),
        ('a: "x\ny"', "f:1: not protobuf text: unexpected '\"x'"),
        ("a: 12abc", "f:1: not protobuf text: unexpected '12abc'"),
    ],
)
def test_wrong_protobuf_text(text, message):
    with pytest.raises(ConfigSyntaxError) as caught:
        proto_syntax.parse(text, "f")
    assert str(caught.value.finding) == message


def test_values_of_protobuf_text():
    text = r"""i: -12 h: 0xfF o: 017 f: 1.5f e: -2E-3 d: .5 t: true n: -inf
      s: 'a"' "b\n\t\\" '\x41\102\u00e9' w: FG_DAG m: < x: 1 > c: [] # "comment"
      l: [1, 2,  3]; q { } , p: "last" """
    assert plain(proto_syntax.parse(text, "f")) == {
        "i": -12,
        "h": 255,
        "o": 15,
        "f": 1.5,
        "e": -0.002,
        "d": 0.5,
        "t": True,
        "n": float("-inf"),
        "s": 'a"b\n\t\\ABé',
        "w": "FG_DAG",
        "m": {"x": 1},
        "c": [],
        "l": [1, 2, 3],
        "q": {},
        "p": "last",
    }


def test_yaml_scalars_follow_1_2():
    text = "a: yes\nb: 010\nc: 1:30\nd: 2024-01-02\ne: true\nf: ~\ng: 1_0\nh: '1'\ni: .5\nj: on"
    assert plain(yaml_syntax.parse(text, "f")) == {
        "a": "yes",
        "b": "010",
        "c": "1:30",
        "d": "2024-01-02",
        "e": True,
        "f": None,
        "g": "1_0",
        "h": "1",
        "i": 0.5,
        "j": "on",
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(_JSON, st.sampled_from([None, 1, "\t"]))
def test_json_reads_what_json_writes(value, indent):
    assert plain(json_syntax.parse(json.dumps(value, indent=indent), "f")) == value


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.booleans())
def test_protobuf_strings_survive_escaping(text, octal):
    escaped = "".join(f"\\{byte:03o}" if octal else f"\\x{byte:02x}" for byte in text.encode())
    assert plain(proto_syntax.parse(f'a: "{escaped}"', "f")) == {"a": text}


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text):
    for parse in (proto_syntax.parse, json_syntax.parse, yaml_syntax.parse):
        with contextlib.suppress(ConfigSyntaxError):
            assert parse(text, "f").origin.name == "f"


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (yaml_syntax.parse, f"a: {'[' * 900}{']' * 900}"),
        (yaml_syntax.parse, "".join(f"{' ' * depth}a:\n" for depth in range(800))),
        (json_syntax.parse, "[" * 5000),
        (proto_syntax.parse, "a {\n" * 5000),
    ],
)
def test_nesting_without_end_is_refused(parse, text):
    with pytest.raises(ConfigSyntaxError, match="nested too deeply"):
        parse(text, "f")


@pytest.mark.parametrize(
    ("parse", "text"), [(yaml_syntax.parse, "a: {}"), (json_syntax.parse, '{{"a": {}}}'), (proto_syntax.parse, "a {{ b: {} }}")]
)
def test_a_number_of_thousands_of_digits_is_refused(parse, text):
    with pytest.raises(ConfigSyntaxError, match="a number that can't be read"):
        parse(text.format("1" * 5000), "f")
