

@pytest.mark.slow
def test_checkpoint_measures_stall_bytes_and_the_way_back():
    figures = _figures("checkpoint.py", "--quick")
    training, crash = figures["training"], figures["crash"]
    assert training["checkpoints"] > 2
    assert 0 < training["blocked_share"] < 1
    full, few = figures["tables"][:2]
    assert (full["kind"], few["kind"]) == ("full", "incremental")
    assert few["bytes"] < full["bytes"] / 20
    assert crash["back_s"] > 0
