from __future__ import annotations

import numpy as np
import orjson
import pyarrow as pa
import pytest

from tidemill.data.click_world import FEATURE_FIELDS, World
from tidemill.demo.plan import demo_world
from tidemill.demo.players import Crowd, PlayOptions
from tidemill.serving.protocol import parse_request

OPTIONS = PlayOptions(
    url="",
    model="clicks",
    bootstrap="",
    topic="impressions",
    seed=3,
    day=1,
    speed=1000.0,
    requests_per_s=40.0,
    candidates=20,
    best_shown=4,
)


@pytest.fixture(scope="module")
def world() -> World:
    return demo_world(OPTIONS.seed)


def test_the_server_understands_the_request(world: World) -> None:
    crowd = Crowd(world, OPTIONS)
    ask = crowd.ask(0)
    names = [field.name for field in FEATURE_FIELDS]
    request = parse_request(crowd.body(ask), names, max_rows=100)
    assert request.num_rows == OPTIONS.candidates
    assert {name: column.type for name, column in request.columns.items()} == {field.name: field.type for field in FEATURE_FIELDS}
    assert request.columns["item_id"].to_pylist() == world.item_ids.take(pa.array(ask.items)).to_pylist()
    assert orjson.loads(crowd.body(ask))["inputs"][0]["shape"] == [1]


def test_users_see_the_best_and_as_many_random_ones(world: World) -> None:
    crowd = Crowd(world, OPTIONS)
    ask = crowd.ask(17)
    time = world.day_start(1) + 17 / 40.0 * 1000.0
    scores = np.random.default_rng(0).random(OPTIONS.candidates)
    rows, shown_scores = crowd.see(ask, scores)
    flags = rows["is_random"].to_numpy()
    items = np.array([world.item_ids.to_pylist().index(name) for name in rows["item_id"].to_pylist()])
    assert set(items[flags == 1]) == set(ask.items[:4])
    assert sorted(shown_scores[flags == 0], reverse=True) == sorted(scores[4:], reverse=True)[:4]
    assert np.array_equal(shown_scores, [scores[list(ask.items).index(item)] for item in items])
    assert set(rows["event_time"].to_pylist()) == {time}
    assert len(set(rows["event_id"].to_pylist())) == 8
    assert np.allclose(rows["true_probability"].to_numpy(), world.true_probability(np.full(8, ask.user), items, time))


def test_which_items_are_random_does_not_depend_on_the_scores(world: World) -> None:
    """Else the AUCs would be of rows that a model chose."""
    shown = []
    for sign in (1.0, -1.0):
        crowd = Crowd(world, OPTIONS)
        ask = crowd.ask(0)
        rows, _ = crowd.see(ask, sign * np.arange(OPTIONS.candidates, dtype=float))
        shown.append({row["item_id"] for row in rows.to_pylist() if row["is_random"]})
    assert shown[0] == shown[1]


def test_clicks_are_in_the_next_history_of_that_user(world: World) -> None:
    crowd = Crowd(world, OPTIONS)
    seen: dict[int, list[str]] = {}
    for number in range(3000):
        ask = crowd.ask(number)
        history = ask.click_seq[0].as_py().split(";")
        if ask.user in seen:
            clicked = seen[ask.user]
            assert history[len(history) - len(clicked) :] == clicked
            break
        rows, _ = crowd.see(ask, np.zeros(OPTIONS.candidates))
        clicked = [row["item_id"] for row in rows.to_pylist() if row["click"]]
        if clicked:
            seen[ask.user] = clicked
    else:
        pytest.fail("no user came back")
