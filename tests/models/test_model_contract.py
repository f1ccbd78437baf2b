"""The contract of a model, over every registered kind."""

import pytest

from tidemill.registry import kinds
from tidemill.testing import model_contract
from tidemill.testing.ranks import single_process


def test_every_registered_kind_has_an_example():
    assert sorted(model_contract.EXAMPLES) == kinds("model")


@pytest.mark.parametrize("kind", sorted(model_contract.EXAMPLES))
@pytest.mark.parametrize("check", [model_contract.check_trains, model_contract.check_rows_are_independent])
def test_runs(kind, check):
    with single_process() as runtime:
        check(runtime, model_contract.contract_config(kind))


@pytest.mark.parametrize("kind", sorted(model_contract.EXAMPLES))
def test_exports(kind):
    model_contract.check_exports(model_contract.contract_config(kind))


def test_dropout_is_not_exported():
    section = {"towers": [{"input": "deep", "mlp": {"hidden_units": [8], "dropout_ratio": [0.5]}}], "final": {"hidden_units": [4]}}
    model_contract.check_exports(model_contract.contract_config("multi_tower", section))
