"""The contract of a model, over every registered kind."""

import numpy as np
import pytest

from tidemill.registry import kinds
from tidemill.testing import model_contract
from tidemill.testing.ranks import run_ranks, single_process


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


def _scores_of_all_kinds(runtime):
    return {
        (kind, sharding): model_contract.scores_after_training(runtime, model_contract.contract_config(kind), sharding)
        for kind in sorted(model_contract.EXAMPLES)
        for sharding in ("row_wise", "table_wise")
    }


def test_shards():
    with single_process() as runtime:
        alone = _scores_of_all_kinds(runtime)
    for rank in run_ranks(2, _scores_of_all_kinds):
        for scenario, scores in alone.items():
            np.testing.assert_allclose(rank[scenario], scores, rtol=0, atol=1e-6, err_msg=str(scenario))


def test_dropout_is_not_exported():
    section = {"towers": [{"input": "deep", "mlp": {"hidden_units": [8], "dropout_ratio": [0.5]}}], "final": {"hidden_units": [4]}}
    model_contract.check_exports(model_contract.contract_config("multi_tower", section))
