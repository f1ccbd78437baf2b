from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from tidemill.demo import movielens
from tidemill.demo.folder import claim
from tidemill.demo.main import DemoSettings, run_demo
from tidemill.demo.movielens import FEATURES, SCHEMA, Blocks, find, read
from tidemill.demo.movielens_director import MovieLensDirector, MovieLensPlan
from tidemill.demo.movielens_players import Replay
from tidemill.demo.movielens_report import ScoredBlock, analyse, interval, mean_aucs, report, series, summary
from tidemill.demo.quality import auc
from tidemill.demo.report_html import render
from tidemill.errors import ConfigError, DataError
from tidemill.jobs import pipeline
from tidemill.lineage.cycle import StepName, commands, load_cycle
from tidemill.serving.protocol import parse_request

NUM_USERS, NUM_ITEMS = 12, 30


def write_files(folder: Path, rows: int = 200, seed: int = 1) -> Path:
    """Synthetic interactions in the form of the real files, out of order, several in one second."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    inter = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for _ in range(rows):
        user, item, rating = rng.integers(1, NUM_USERS + 1), rng.integers(1, NUM_ITEMS + 1), rng.integers(1, 6)
        inter.append(f"{user}\t{item}\t{rating}\t{880000000 + rng.integers(0, rows // 2)}")
    users = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    users += [f"{n}\t{20 + n}\t{'MF'[n % 2]}\tother\tV{n}N" for n in range(1, NUM_USERS + 1)]
    items = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    items += [f'{n}\tThe "{n}" story\t{1980 + n if n > 1 else ""}\tDrama Comedy' for n in range(1, NUM_ITEMS + 1)]
    for name, lines in (("inter", inter), ("user", users), ("item", items)):
        (folder / f"ml-100k.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    return read(write_files(tmp_path / "files"), block_rows=50)


def test_rows_come_in_time_order_each_with_what_was_known_before_it(tmp_path: Path) -> None:
    folder = write_files(tmp_path)
    rows = read(folder).rows
    assert rows.schema == SCHEMA
    times = rows["event_time"].to_numpy()
    assert np.all(np.diff(times) > 0)
    recorded = [line.split("\t") for line in (folder / "ml-100k.inter").read_text().splitlines()[1:]]
    assert np.array_equal(np.floor(times), np.sort([float(line[3]) for line in recorded]))
    assert sorted((user, item, int(float(r) >= 4), int(t)) for user, item, r, t in recorded) == sorted(
        (row["user_id"], row["item_id"], row["click"], int(row["event_time"])) for row in rows.to_pylist()
    )
    liked: dict[str, list[str]] = {}
    for row in rows.to_pylist():
        assert row["like_seq"] == ";".join(liked.get(row["user_id"], [])[-20:])
        if row["click"]:
            liked.setdefault(row["user_id"], []).append(row["item_id"])
    first = rows.to_pylist()[0]
    assert first["genres"] == "Drama;Comedy"
    assert first["age"] == 20 + int(first["user_id"])
    assert {row["release_year"] for row in rows.to_pylist() if row["item_id"] == "1"} <= {0}


def test_blocks_end_where_the_next_one_begins(blocks: Blocks, tmp_path: Path) -> None:
    assert blocks.count == 4
    assert blocks.dates == ("20000101", "20000102", "20000103", "20000104")
    for number in range(1, 5):
        times = blocks.block(number)["event_time"].to_numpy()
        assert len(times) == 50
        assert times.max() < blocks.boundary(number)
        if number < 4:
            assert blocks.block(number + 1)["event_time"].to_numpy().min() == blocks.boundary(number)
    blocks.write(2, tmp_path / "day")
    assert pq.read_table(tmp_path / "day" / "part-0.parquet").equals(blocks.block(2))
    assert blocks.first(2).count == 2
    assert blocks.first(2).boundary(2) == blocks.block(2)["event_time"].to_numpy().max() + 1.0


def test_files_that_are_something_else_are_named(tmp_path: Path) -> None:
    folder = write_files(tmp_path)
    (folder / "ml-100k.user").write_text("user_id:token\tage:token\n1\t20\n")
    with pytest.raises(DataError, match=r"ml-100k\.user: lacks gender, occupation"):
        read(folder)
    write_files(tmp_path)
    lines = (folder / "ml-100k.user").read_text().splitlines()
    (folder / "ml-100k.user").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(DataError, match="has interactions but no row"):
        read(folder)


def test_the_files_are_found_in_a_folder_or_in_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_files(tmp_path / "mine" / "ml-100k")
    assert find(folder) == folder
    assert find(tmp_path / "mine") == folder
    with pytest.raises(ConfigError, match=r"no ml-100k\.inter there"):
        find(tmp_path)
    # What pip leaves of a package that was installed without its dependencies; importing it would fail.
    site = tmp_path / "site"
    files = write_files(site / "recbole" / "dataset_example" / "ml-100k")
    (site / "recbole" / "__init__.py").write_text("import nothing_of_this_name\n")
    info = site / "recbole-1.2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recbole\nVersion: 1.2.1\n")
    (info / "RECORD").write_text("recbole/__init__.py,,\nrecbole/dataset_example/ml-100k/ml-100k.inter,,\n")
    monkeypatch.syspath_prepend(site)
    assert find(None) == files


def test_without_the_files_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movielens, "_PACKAGE", "no-such-package-of-interactions")
    with pytest.raises(ConfigError, match=r"pip install --no-deps .*movielens:FOLDER"):
        find(None)


def test_unknown_data_deletes_nothing(tmp_path: Path) -> None:
    folder = claim(tmp_path / "demo-run")
    (folder.path / "kept").touch()
    for data in ("netflix", f"movielens:{tmp_path}"):
        with pytest.raises(ConfigError, match="--data"):
            run_demo(DemoSettings(data=data, folder=folder.path, report=tmp_path / "report"))
    assert (folder.path / "kept").is_file()


def test_a_replay_asks_for_all_rows_in_order_and_ends(blocks: Blocks) -> None:
    rows = blocks.rows.slice(50, 75)
    replay = Replay(rows, 10)
    seen = []
    for number in range(8):
        ask = replay.ask(number)
        assert replay.event_time(number) == ask["event_time"][0].as_py()
        request = parse_request(replay.body(ask), list(FEATURES), max_rows=10)
        assert {name: column.to_pylist() for name, column in request.columns.items()} == {
            name: ask.column(name).to_pylist() for name in FEATURES
        }
        shown, scores = replay.see(ask, np.zeros(ask.num_rows))
        assert len(scores) == shown.num_rows
        seen += shown["event_id"].to_pylist()
    assert seen == rows["event_id"].to_pylist()
    assert replay.event_time(8) is None


def _director(blocks: Blocks, tmp_path: Path) -> MovieLensDirector:
    return MovieLensDirector(MovieLensPlan(), 1, (tmp_path / "files", blocks), claim(tmp_path / "demo-run"), print)


def test_the_written_configs_are_complete(tmp_path: Path) -> None:
    blocks = read(write_files(tmp_path / "files", rows=5000), block_rows=1250)
    director = _director(blocks, tmp_path)
    director._write_configs("127.0.0.1:4711")
    cycle = load_cycle(director.folder.cycle)
    assert cycle.boundary.times == {date: blocks.boundary(number) for number, date in enumerate(blocks.dates, start=1)}
    assert 0 < cycle.handover.tolerance_s == director.tolerance_s
    argv = commands(cycle, "20000102", "20000101")
    for step in (StepName.TRAIN_DAILY, StepName.TRAIN_STREAM):
        flags = dict(argument[2:].split("=", 1) for argument in argv[step] if argument.startswith("--") and "=" in argument)
        overrides = {
            "train_input_path": flags["train_input_path"],
            "model_dir": flags["model_dir"],
            "train_config.fine_tune_checkpoint": flags["fine_tune_checkpoint"],
        }
        loaded = pipeline.load(flags["pipeline_config_path"], overrides=overrides, edits=flags["edit_config_json"])
        assert loaded.config.train_config.lineage.boundary == blocks.boundary(2)


def _scored(number: int, seed: int, gain: float) -> ScoredBlock:
    """Rows of 40 users; online scores are better than frozen ones by `gain`."""
    rng = np.random.default_rng(seed)
    users = np.array([f"u{n}" for n in rng.integers(0, 40, 600)])
    labels = rng.integers(0, 2, 600)
    noise = rng.normal(size=600)
    return ScoredBlock(number, users, labels, noise + (0.5 + gain) * labels, noise + 0.5 * labels, None)


def test_means_are_of_blocks_and_the_interval_holds_the_difference() -> None:
    blocks = [_scored(2, 1, 0.5), _scored(3, 2, 0.5)]
    means = mean_aucs(blocks)
    expected = [auc(block.labels, block.online) for block in blocks]
    assert means["auc_online"] == pytest.approx(np.mean([value for value in expected if value is not None]))
    assert means["auc_served"] is None
    found = interval(blocks, seed=1, resamples=200)
    assert found is not None
    assert means["auc_online"] is not None
    assert means["auc_frozen"] is not None
    assert found[0] < means["auc_online"] - means["auc_frozen"] < found[1]
    assert found[0] > 0
    assert interval(blocks, seed=1, resamples=200) == found
    assert interval([], seed=1) is None


def test_equal_scores_have_an_interval_of_nothing() -> None:
    assert interval([_scored(2, 3, 0.0)], seed=1, resamples=20) == (0.0, 0.0)


def test_users_are_drawn_with_all_their_rows() -> None:
    """Were rows drawn, repeating each of them would make the interval narrower; it says nothing new of the users."""
    once = _scored(2, 4, 0.3)
    columns = (np.repeat(column, 5) for column in (once.users, once.labels, once.online, once.frozen))
    often = ScoredBlock(2, *columns, None)
    assert interval([often], seed=1, resamples=100) == pytest.approx(interval([once], seed=1, resamples=100))


def test_a_replay_that_was_stopped_at_once_has_a_report(blocks: Blocks, tmp_path: Path) -> None:
    director = _director(blocks, tmp_path)
    told = report(director, analyse(director), wall_s=1.0, error="StopRequestedError: stopped on request")
    assert not told["ok"]
    assert told["movielens"]["interval_95"] is None
    assert "GroupLens" in summary(told)
    assert orjson.loads(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY))["data"]["terms"] == movielens.TERMS


def test_no_file_of_the_data_is_in_the_package() -> None:
    package = Path(movielens.__file__).parent
    assert not [
        path for path in package.rglob("*") if path.suffix in (".inter", ".item", ".user") or path.name.startswith("ml-100k")
    ]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_three_small_blocks_are_played_through_the_whole_life(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files", rows=3000)
    blocks = read(files, block_rows=1000)
    director = MovieLensDirector(MovieLensPlan(requests_per_s=20.0), 1, (files, blocks), claim(tmp_path / "demo-run"), print)
    director.run()
    told = report(director, analyse(director), wall_s=1.0, error=None)
    assert told["ok"], told["failures"]
    assert told["handover"] == {
        "count": 1,
        "under_requests": told["handover"]["under_requests"],
        "retired": "lineages/20000101",
        "successor": "lineages/20000102",
        "lag_s": told["handover"]["lag_s"],
    }
    assert told["requests"]["total"] == 200
    assert told["rows"] == {"in_stream": 2000, "trained_once": 2000, "lost": 0, "doubled": 0, "undelivered": 0}
    assert [block["block"] for block in told["movielens"]["blocks"]] == [2, 3]
    assert all(block["rows"] == 1000 and block["auc_served"] is not None for block in told["movielens"]["blocks"])
    low, high = told["movielens"]["interval_95"]
    assert low < told["movielens"]["difference"] < high
    assert told["verify"]["keys_compared"] > 0
    assert told["verify"]["keys_different"] == 0
    for name, value in (("report", told), ("series", series(director))):
        (tmp_path / f"{name}.json").write_bytes(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    assert "MovieLens-100k" in render(tmp_path).read_text(encoding="utf-8")
