"""What is on other people's disks: every document byte for byte, and every published name."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.examples import EXAMPLES
from tidemill import contracts
from tidemill.contracts import layout
from tidemill.contracts.base import Document
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import CorruptError

GOLDEN = Path(__file__).parent / "golden"


def golden_file(document: type[Document], version: int) -> Path:
    return GOLDEN / f"{document.schema_name}-{version}.json"


def documents() -> list[type[Document]]:
    for module in pkgutil.iter_modules(contracts.__path__):
        importlib.import_module(f"{contracts.__name__}.{module.name}")
    return [cls for cls in descendants(Document) if cls.__module__.startswith(f"{contracts.__name__}.")]


def descendants(cls: type[Document]) -> Iterator[type[Document]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_document_has_an_example_and_a_name_of_its_own():
    assert {type(example) for example in EXAMPLES} == set(documents())
    assert len({cls.schema_name for cls in documents()}) == len(documents())


def test_every_golden_file_is_some_documents():
    assert {path.name for path in GOLDEN.iterdir()} == {
        golden_file(cls, version).name for cls in documents() for version in range(1, cls.schema_version + 1)
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.schema_name)
def test_a_document_is_written_as_it_always_was(example: Document):
    assert example.to_bytes() == golden_file(type(example), example.schema_version).read_bytes()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.schema_name)
def test_every_version_can_be_read(example: Document):
    cls = type(example)
    for version in range(1, cls.schema_version + 1):
        read = cls.parse(golden_file(cls, version).read_bytes(), where="golden")
        assert version < cls.schema_version or read == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.schema_name)
def test_the_digest_of_every_version_is_that_of_its_bytes(example: Document):
    """A snapshot names its checkpoint by the digest that it had when it was exported, and a later version must know it again."""
    cls = type(example)
    for version in range(1, cls.schema_version + 1):
        data = golden_file(cls, version).read_bytes()
        read = cls.parse(data, where="golden")
        assert read.digest() == read.model_copy().digest() == hashlib.sha256(data).hexdigest()


def test_a_changed_copy_of_an_older_version_has_a_digest_of_its_own():
    read = CheckpointManifest.parse(golden_file(CheckpointManifest, 1).read_bytes(), where="golden")
    changed = read.model_copy(update={"examples": read.examples + 1})
    assert changed.digest() == hashlib.sha256(changed.to_bytes()).hexdigest() != read.digest()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (layout.ACTIVE, "active.json"),
        (layout.deployment(3), "deployments/00000003.json"),
        (layout.serving_status("a"), "serving/a.json"),
        (layout.daily("20240102"), "daily/20240102"),
        (layout.lineage("20240102"), "lineages/20240102"),
        (layout.SNAPSHOT, "snapshot.json"),
        (layout.SNAPSHOT_FILES, "snapshot"),
        (layout.LINEAGE, "lineage.json"),
        (layout.PROGRESS, "progress.json"),
        (layout.CURRENT, "dense_hot_export/current.json"),
        (layout.term(2), "terms/00000002.json"),
        (layout.segments(2, 5), "segments/00000002/00000005"),
        (layout.release(8), "releases/00000008.json"),
        (layout.compaction(8), "compactions/00000008.json"),
        (layout.checkpoint(200), "model.ckpt-200"),
        (layout.checkpoint_files(200, 2), "model.ckpt-200/00000002/000000"),
        (layout.checkpoint_files(200, 2, 7), "model.ckpt-200/00000002/000007"),
        (layout.checkpoint_manifest(200, 2), "model.ckpt-200/manifest-00000002.json"),
        (layout.checkpoint_manifest(200, 2, 7), "model.ckpt-200/manifest-00000002-000007.json"),
        (layout.DATALOADER_STATE, "dataloader_state.json"),
        (layout.PIPELINE, "pipeline.config"),
        (layout.run("r"), "runs/r"),
        (layout.RECORD, "record.json"),
        (layout.EVENTS, "events.jsonl"),
        (layout.step_log(1), "steps-00001.jsonl"),
        (layout.score_log(1), "scores-00001.arrows"),
        (layout.EVALUATIONS, "eval_result.txt"),
        (layout.output_part(1, "parquet"), "part-00001.parquet"),
        (layout.SUCCESS, "_SUCCESS"),
    ],
)
def test_published_names_never_change(key: str, expected: str):
    assert key == expected


@pytest.mark.parametrize("number", [0, 1, 99_999_999, 100_000_000])
def test_numbers_are_read_back_from_names(number: int):
    assert layout.deployment_number(layout.deployment(number)) == number
    assert layout.term_number(layout.term(number)) == number
    assert layout.release_sequence(layout.release(number)) == number
    assert layout.compaction_sequence(layout.compaction(number)) == number
    assert layout.output_part_number(layout.output_part(number, "csv.gz")) == number
    assert layout.checkpoint_of_manifest(layout.checkpoint_manifest(number, 3)) == (3, number, 0)
    assert layout.checkpoint_of_manifest(layout.checkpoint_manifest(3, 4, number)) == (4, 3, number)
    assert layout.checkpoint_of_file(f"{layout.checkpoint_files(3, number, 5)}/tables/x") == (number, 3, 5)


@pytest.mark.parametrize(
    "key", ["", "releases/", "releases/8.json.tmp", "x/releases/00000008.json", "releases/-1.json", "terms/1.json"]
)
def test_other_names_are_no_releases(key: str):
    assert layout.release_sequence(key) is None


def test_a_manifest_is_no_file_of_its_checkpoint():
    manifest = layout.checkpoint_manifest(200, 2)
    assert layout.checkpoint_of_file(manifest) is None
    assert layout.checkpoint_of_manifest(f"{layout.checkpoint_files(200, 2)}/x") is None


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.sealed_from], ids=lambda example: example.schema_name)
def test_a_flipped_bit_in_a_sealed_document_is_noticed(example: Document):
    """Whichever byte it is in, unless it leaves the content as it was."""
    data = example.to_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        try:
            read = type(example).parse(bytes(damaged), where="here")
        except CorruptError:
            continue
        assert read == example
        assert data[at : at + 1].isspace(), at
