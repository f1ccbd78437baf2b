from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.data.kafka_messages import committed_messages
from tests.data.kafka_topics import new_topic
from tidemill.errors import ConfigError, DataError, SchemaError
from tidemill.jobs.addresses import input_kind, output_kind, require_apart
from tidemill.jobs.predict import PredictRequest, predict
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.backends.local import LocalStorage
from tidemill.testing.broker import DevelopmentBroker
from tidemill.testing.maxcompute import MaxComputeEmulator

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def served(life, tmp_path: Path) -> PredictRequest:
    return PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "out"), scripted_model=str(life.lineage), overwrite=True)


@pytest.fixture
def trained(life, tmp_path: Path) -> PredictRequest:
    return PredictRequest(f"{life.day}/*.parquet", str(tmp_path / "out"), pipeline=str(life.pipeline), overwrite=True)


def result(request: PredictRequest) -> pa.Table:
    return pq.read_table(request.output_path)


def test_a_lineage_scores_with_its_newest_release_row_by_row(life, served: PredictRequest) -> None:
    written = predict(replace(served, reserved=["event_id", "click"], batch_rows=7))
    assert written.rows == 160
    found = result(served)
    assert found.column_names[:2] == ["event_id", "click"]
    day = pq.read_table(life.day)
    assert found["event_id"].to_pylist() == day["event_id"].to_pylist()
    expected = Predictor(load_generation(LocalStorage(life.lineage), "")).score_table(day)
    np.testing.assert_allclose(found["probs"].to_numpy(), expected["probs"], rtol=1e-6)


def test_a_checkpoint_scores_as_the_snapshot_that_was_exported_from_it(life, trained: PredictRequest, tmp_path: Path) -> None:
    predict(trained)
    day = pq.read_table(life.day)
    snapshot = Predictor(load_generation(LocalStorage(life.lineage), "", up_to=(0, 0)))
    np.testing.assert_allclose(result(trained)["probs"].to_numpy(), snapshot.score_table(day)["probs"], rtol=1e-5)


def test_another_checkpoint_can_be_named(life, trained: PredictRequest) -> None:
    predict(trained)
    before = result(trained)["probs"].to_numpy()
    predict(replace(trained, checkpoint=str(life.lineage)))
    assert not np.allclose(result(trained)["probs"].to_numpy(), before)


def test_all_columns_or_those_that_features_read_can_be_kept(life, served: PredictRequest) -> None:
    predict(replace(served, reserved=["ALL_COLUMNS"], outputs=["probs"]))
    assert result(served).column_names == [*pq.read_table(life.day).column_names, "probs"]
    predict(replace(served, reserved=["click", "ALL_EFFECTIVE_COLUMNS"], outputs=["probs"]))
    assert sorted(result(served).column_names) == ["click", "item_id", "price", "probs", "user_id"]


def test_an_unknown_column_is_refused_with_the_nearest_name(served: PredictRequest) -> None:
    with pytest.raises(ConfigError, match=r"no column 'event_idd'; did you mean 'event_id'\?"):
        predict(replace(served, reserved=["event_idd"]))
    with pytest.raises(ConfigError, match=r"no output 'prob'; did you mean 'probs'\?"):
        predict(replace(served, outputs=["prob"]))


def test_a_column_named_like_an_output_is_refused(served: PredictRequest, tmp_path: Path, life) -> None:
    table = pq.read_table(life.day)
    pq.write_table(table.append_column("probs", table["price"]), tmp_path / "clash.parquet")
    with pytest.raises(ConfigError, match="'probs' has the name of an output"):
        predict(replace(served, input_path=str(tmp_path / "clash.parquet"), reserved=["probs"]))


def test_exactly_one_model_must_be_named(served: PredictRequest, trained: PredictRequest) -> None:
    for request in (replace(served, scripted_model=None), replace(served, pipeline=trained.pipeline)):
        with pytest.raises(ConfigError, match="either --scripted_model_path"):
            predict(request)


def test_a_run_that_fails_leaves_the_output_of_the_one_before(served: PredictRequest, tmp_path: Path, life) -> None:
    predict(replace(served, reserved=["event_id"]))
    before = result(served)
    table = pq.read_table(life.day)
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(table.drop_columns(["user_id"]), tmp_path / "1.parquet")
    with pytest.raises(SchemaError, match="no column 'user_id'"):
        predict(replace(served, input_path=f"{tmp_path}/[01].parquet"))
    bad = table.set_column(table.schema.get_field_index("price"), "price", pa.array(["x"] * table.num_rows))
    pq.write_table(bad, tmp_path / "2.parquet")
    with pytest.raises(DataError):
        predict(replace(served, input_path=f"{tmp_path}/2.parquet"))
    assert result(served).equals(before)
    assert not [info.key for info in LocalStorage(served.output_path).list("_temporary/")]


def test_a_smaller_result_leaves_no_part_of_a_larger_one(served: PredictRequest, tmp_path: Path, life) -> None:
    stale = Path(served.output_path) / "part-00007.parquet"
    predict(served)
    stale.write_bytes(b"of an earlier run")
    pq.write_table(pq.read_table(life.day).slice(0, 3), tmp_path / "few.parquet")
    written = predict(replace(served, input_path=str(tmp_path / "few.parquet")))
    assert [entry.key for entry in written.files] == ["part-00000.parquet"]
    assert not stale.exists()
    assert result(served).num_rows == 3


def test_csv_in_and_csv_out(life, served: PredictRequest, tmp_path: Path) -> None:
    predict(replace(served, reserved=["event_id"]))
    expected = result(served)
    pyarrow.csv.write_csv(pq.read_table(life.day), tmp_path / "rows.csv")
    request = replace(
        served,
        input_path=str(tmp_path / "rows.csv"),
        output_path=f"{tmp_path}/scores/*.csv.gz",
        reserved=["event_id", "click"],
        csv_header=True,
    )
    assert predict(request).rows == 160
    assert [path.name for path in sorted((tmp_path / "scores").iterdir())] == ["_SUCCESS", "part-00000.csv.gz"]
    found = pyarrow.csv.read_csv(tmp_path / "scores" / "part-00000.csv.gz")
    assert found.column_names[:2] == ["event_id", "click"]
    assert found["event_id"].to_pylist() == expected["event_id"].to_pylist()
    np.testing.assert_allclose(found["probs"].to_numpy(), expected["probs"].to_numpy(), rtol=1e-6)


def test_edits_of_an_exported_config_say_how_rows_are_read(life, served: PredictRequest, tmp_path: Path) -> None:
    day = pq.read_table(life.day)
    pyarrow.csv.write_csv(day, tmp_path / "rows.csv", pyarrow.csv.WriteOptions(delimiter="|", include_header=False))
    names = ";".join(f"{name}:{'DOUBLE' if name == 'price' else 'STRING'}" for name in day.column_names)
    edits = {"data_config.delimiter": "|", "data_config.input_fields_str": names, "data_config.input_fields": []}
    request = replace(served, input_path=str(tmp_path / "rows.csv"), reserved=["click"], edits=json.dumps(edits))
    predict(request)
    assert result(served)["click"].to_pylist() == [str(click) for click in day["click"].to_pylist()]
    for edit in ({"data_config.fg_mode": "FG_NONE"}, {"train_config.num_steps": 3}):
        with pytest.raises(ConfigError, match="only how rows are read counts"):
            predict(replace(served, edits=json.dumps(edit)))


def test_an_output_that_is_there_needs_overwrite(served: PredictRequest) -> None:
    predict(served)
    with pytest.raises(ConfigError, match=r"holds an output already \(_SUCCESS\).*--overwrite"):
        predict(replace(served, overwrite=False))


def test_a_table_becomes_a_table(life, served: PredictRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 3: predict from a table to a table, with reserved columns, its partition's among them."""
    day = pq.read_table(life.day)
    with MaxComputeEmulator(tmp_path / "maxcompute") as emulator:
        emulator.add_table("prj", "events", {"dt=1": day.slice(0, 100), "dt=2": day.slice(100)})
        credentials = tmp_path / "odps.ini"
        credentials.write_text(f"access_id=id\naccess_key=secret\nend_point={emulator.endpoint}\n")
        monkeypatch.setenv("ODPS_CONFIG_FILE_PATH", str(credentials))
        monkeypatch.setenv("ODPS_TABLE_LIFECYCLE", "30")
        request = replace(
            served,
            input_path="odps://prj/tables/events/dt=1&dt=2",
            output_path="odps://prj/tables/scores/day=20240102",
            reserved=["event_id", "dt"],
            overwrite=False,
        )
        assert predict(request).rows == 160
        found = emulator.read_table("prj", "scores", "day=20240102")
        with pytest.raises(ConfigError, match="holds rows already"):
            predict(request)
        with pytest.raises(ConfigError, match=r"no column 'dtt'; did you mean 'dt'\?"):
            predict(replace(request, reserved=["dtt"]))
    assert found["dt"].to_pylist() == ["1"] * 100 + ["2"] * 60
    assert found["event_id"].to_pylist() == day["event_id"].to_pylist()
    expected = Predictor(load_generation(LocalStorage(life.lineage), "")).score_table(day)
    np.testing.assert_allclose(found["probs"].to_numpy(), expected["probs"], rtol=1e-6)


def test_a_topic_gets_the_scores(life, served: PredictRequest, tmp_path: Path) -> None:
    with DevelopmentBroker(tmp_path / "broker") as broker:
        topic = new_topic(broker)
        address = f"kafka://{broker.bootstrap}/{topic}"
        predict(replace(served, output_path=address, reserved=["event_id"], overwrite=False))
        found = pa.concat_tables(pa.ipc.open_stream(part).read_all() for part in committed_messages(broker.bootstrap, topic))
        assert found.column_names[0] == "event_id"
        assert found["event_id"].to_pylist() == pq.read_table(life.day)["event_id"].to_pylist()
        with pytest.raises(ConfigError, match="can't be overwritten"):
            predict(replace(served, output_path=address))


def test_what_is_read_is_never_replaced(life, served: PredictRequest, tmp_path: Path) -> None:
    folder = tmp_path / "rows of a day"
    folder.mkdir()
    pq.write_table(pq.read_table(life.day), folder / "part-00000.parquet")
    for output in (str(folder), f"{folder}/*.csv"):
        with pytest.raises(ConfigError, match="which is read: write to another folder"):
            predict(replace(served, input_path=f"{folder}/*.parquet", output_path=output))
    predict(replace(served, input_path=f"{folder}/*.parquet", output_path=str(folder / "scores")))
    assert pq.read_table(folder / "part-00000.parquet").num_rows == 160


@pytest.mark.parametrize(
    ("read", "written", "refused"),
    [
        ("t/dt=1&dt=2", "t/dt=2", True),
        ("t/dt=1/hr=2", "t/hr=2/dt=1", True),
        ("t", "t/dt=2", True),
        ("t/dt=1", "t/dt=2", False),
        ("t/dt=1", "other/dt=1", False),
        ("s.t/dt=1", "t/dt=1", False),
    ],
)
def test_a_partition_that_is_read_is_never_replaced(read: str, written: str, refused: bool) -> None:
    source, target = f"odps://p/tables/{read}", f"odps://p/tables/{written}"
    with pytest.raises(ConfigError, match="is read too") if refused else nullcontext():
        require_apart(source, [], "maxcompute", target, "")


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        ("kafka://b:1/t?group.id=g", "out", "predict reads what has an end"),
        ("a.parquet,b.csv", "out", "csv and parquet together"),
        ("a.parquet", "out/scores.csv", "in parts"),
        ("a.parquet", "odps://prj/nothing", "isn't of the form"),
    ],
)
def test_addresses_that_mean_nothing_are_refused(served: PredictRequest, source: str, target: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        predict(replace(served, input_path=source, output_path=target))


def test_types_may_be_named_as_tzrec_names_them() -> None:
    assert output_kind("x", "CsvWriter") == "csv"
    assert input_kind("x", "CsvDataset") == "csv"
    assert output_kind("odps://p/tables/t", "OdpsWriter") == "maxcompute"
    for address, name in (("odps://p/tables/t", "CsvWriter"), ("x", "OdpsWriter"), ("x/*.csv", "ParquetWriter"), ("x", "Nonsense")):
        with pytest.raises(ConfigError, match="writer_type"):
            output_kind(address, name)
