import numpy as np
import pytest
import torch
from torch import nn

from tidemill.config.model import MLP as MESSAGE
from tidemill.errors import ConfigError
from tidemill.models.layers.din import DINAttention
from tidemill.models.layers.mlp import MLP, activation
from tidemill.models.model import build_model
from tidemill.testing import model_contract as contract


def test_layers_are_in_order():
    mlp = MLP(3, MESSAGE(hidden_units=(5, 4), dropout_ratio=(0.1, 0.0), use_ln=True, activation="nn.LeakyReLU(0.2)"), "here")
    assert [type(layer).__name__ for layer in mlp.layers] == [
        "Linear", "LayerNorm", "LeakyReLU", "Dropout", "Linear", "LayerNorm", "LeakyReLU",
    ]  # fmt: skip
    assert mlp.out_features == 4
    assert mlp.layers[2].negative_slope == 0.2


def test_no_layers_are_the_identity():
    x = torch.randn(2, 3)
    assert torch.equal(MLP(3, MESSAGE(), "here")(x), x)


@pytest.mark.parametrize("text", ["nn.ReLU", "ReLU", "torch.nn.ReLU", "nn.ReLU()"])
def test_activation_by_path(text):
    assert isinstance(activation(text, "here"), nn.ReLU)


@pytest.mark.parametrize("text", ["nn.Linear", "Dice", "nn.ReLU(", "__import__('os')", "nn.ReLU(open('x'))", "nn.ReLU(1, 2, 3)"])
def test_a_wrong_activation_names_the_place(text):
    with pytest.raises(ConfigError, match="here"):
        activation(text, "here")


@pytest.mark.parametrize(
    ("message", "why"), [({"use_bn": True}, "padding"), ({"dropout_ratio": (0.1, 0.2, 0.3)}, "3 values for 2")]
)
def test_a_wrong_mlp_is_explained(message, why):
    with pytest.raises(ConfigError, match=f"here.*{why}"):
        MLP(3, MESSAGE(hidden_units=(4, 4), **message), "here")


def test_din_is_its_formula():
    torch.manual_seed(0)
    din = DINAttention(3, 5, MESSAGE(hidden_units=(7,)), "here")
    query, steps, lengths = torch.randn(4, 3), torch.randn(4, 6, 5), torch.tensor([6, 1, 0, 3])
    for row in range(4):
        steps[row, lengths[row] :] = 0
    with torch.no_grad():
        found = din(query, steps, lengths)
        for row in range(4):
            q = torch.cat([query[row], torch.zeros(2)])
            own = steps[row, : lengths[row]]
            scores = [din.score(din.mlp(torch.cat([q, s, q - s, q * s]))) for s in own]
            expected = torch.softmax(torch.cat(scores), 0) @ own if scores else torch.zeros(5)
            np.testing.assert_allclose(found[row], expected, atol=1e-6)


def test_din_of_an_empty_row_has_finite_gradients():
    din = DINAttention(2, 2, MESSAGE(hidden_units=(3,)), "here")
    query = torch.randn(1, 2, requires_grad=True)
    din(query, torch.zeros(1, 4, 2), torch.tensor([0])).sum().backward()
    assert torch.isfinite(query.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in din.parameters())


def test_a_query_wider_than_a_step_is_refused():
    with pytest.raises(ConfigError, match="query has 6 columns"):
        DINAttention(6, 5, MESSAGE(), "here")


@pytest.mark.parametrize(
    ("kind", "section", "message"),
    [
        ("multi_tower", {"towers": [{"input": "nowhere"}], "final": {}}, "'nowhere' isn't a DEEP"),
        ("multi_tower", {"towers": [], "final": {}}, "towers is empty"),
        ("multi_tower_din", {"din_towers": [{"input": "deep", "attn_mlp": {}}], "final": {}}, "isn't a SEQUENCE"),
    ],
)
def test_a_wrong_tower_is_named(kind, section, message):
    with pytest.raises(ConfigError, match=message):
        build_model(contract.contract_config(kind, section), contract.contract_features(), seed=0)


def test_initial_weights_follow_from_the_seed_alone():
    config, features = contract.contract_config("multi_tower_din"), contract.contract_features()
    torch.manual_seed(1)
    first = build_model(config, features, seed=4).program.state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn), "building a model moved the process's random state"
    again, other = (build_model(config, features, seed=seed).program.state_dict() for seed in (4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
