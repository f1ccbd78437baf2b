"""A step whose peer is gone ends with an error that says so."""

import time

import pytest

from tidemill.errors import PeerLostError
from tidemill.models.model import build_model
from tidemill.testing import model_contract as contract
from tidemill.testing.ranks import run_ranks


def _rank_one_leaves(runtime):
    model = build_model(contract.contract_config("multi_tower"), contract.contract_features(), seed=3)
    step, _, _ = contract.contract_step(runtime, model)
    batch = contract.random_batch(runtime.rank, 16)
    step(batch, 32.0)
    if runtime.rank == 1:
        runtime.close()
        return None
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"all ranks in a step \(rank 0\)"):
        step(batch, 32.0)
    return time.monotonic() - began


def test_a_peer_that_leaves_is_noticed_before_the_timeout():
    waited, _ = run_ranks(2, _rank_one_leaves, group_timeout_s=30.0)
    assert waited < 20
