"""What README and docs say is true: links, commands and options, config keys, exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.docs.pages import REPOSITORY, Block, blocks, pages, prose
from tests.docs.shell import commands, tidemill_arguments
from tidemill import errors
from tidemill.cadence import ENDINGS
from tidemill.cli.main import app
from tidemill.config.explain import explain
from tidemill.config.load import load_pipeline
from tidemill.lineage.cycle import load_cycle
from tidemill.registry import component_config

TUTORIAL = REPOSITORY / "docs" / "tutorial" / "demo.md"
_ROOT_COMMAND = typer.main.get_command(app)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_URL_HOST = re.compile(r"https?://([^/\s\"'`)>:]+)")
_OWN_HOSTS = {"127.0.0.1", "localhost"}
_HOSTS = _OWN_HOSTS | {
    "download.pytorch.org",
    "github.com",
    "grouplens.org",
    "doi.org",
    "service.cn-hangzhou.maxcompute.aliyun.com",
}
_MACHINE = re.compile(r"(?<![\w.])/(work|home|Users|root|tmp)/")

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in _HEADING.findall(prose(page))}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@every_page
def test_commands_and_options_exist(page: Path) -> None:
    for block in blocks(page, "bash"):
        for words in commands(block.text):
            arguments = tidemill_arguments(words)
            if arguments is not None:
                parse(arguments, f"{block.where}: {' '.join(words)}")
            elif words[0].startswith("scripts/"):
                assert (REPOSITORY / words[0]).is_file(), block.where


@every_page
def test_commands_in_prose_exist(page: Path) -> None:
    text = prose(page)
    indented = [line.strip().partition("  ")[0] for line in text.splitlines() if line.startswith("    tidemill ")]
    for mention in [*indented, *(found for found in _INLINE.findall(text) if found.startswith("tidemill "))]:
        if mention.split()[1] != "COMMAND":
            find(mention.split()[1:], mention)


def parse(arguments: list[str], where: str) -> None:
    """Parse as the command line does, without running anything."""
    command, rest = find(arguments, where)
    try:
        command.make_context(command.name, list(rest))
    except Exception as error:
        raise AssertionError(f"{where}: {getattr(error, 'message', error)}") from error


def find(arguments: list[str], where: str) -> tuple[Any, list[str]]:
    """The command that the first words name, and the other arguments; their options must exist."""
    command: Any = _ROOT_COMMAND
    rest = list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        names = [name for word in rest[:1] for name in word.split("|")]
        unknown = [name for name in names if name not in command.commands]
        assert not unknown, f"{where}: no command {unknown}; there are {', '.join(command.commands)}"
        command = command.commands[names[0]]
        rest = rest[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    given = {word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"}
    assert given <= known, f"{where}: no options {sorted(given - known)}"
    return command, rest


def test_the_parser_of_this_test_finds_what_is_wrong() -> None:
    parse(["train", "p.yaml", "--model_dir=x"], "")
    for wrong in (["trian", "p.yaml"], ["train", "--modle_dir", "x"], ["cycle", "walk"], ["export", "p.yaml"], ["verify"]):
        with pytest.raises(AssertionError):
            parse(wrong, "")


def tutorial_config() -> dict[str, Any]:
    """The pipeline config that the tutorial writes; fragments are laid over it."""
    texts = [block.text for block in blocks(TUTORIAL, "bash") if block.text.startswith("cat > pipeline.yaml")]
    return yaml.safe_load(texts[0].partition("\n")[2].partition("\nEND")[0])


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}
    return over


def yaml_blocks(kind: str | None) -> list[Any]:
    found = [block for page in pages() for block in blocks(page, "yaml") if block.marks.get("kind") == kind]
    return [pytest.param(block, id=block.where) for block in found]


@pytest.mark.parametrize("block", yaml_blocks(None))
def test_config_fragments_are_config(block: Block) -> None:
    config = merged(tutorial_config(), yaml.safe_load(block.text))
    load_pipeline(json.dumps(config), component_config, format="json", environ={})


@pytest.mark.parametrize("block", yaml_blocks("cycle"))
def test_cycles_can_be_loaded(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "cycle.yaml"
    path.write_text(block.text)
    cycle = load_cycle(path)
    for job in (cycle.daily, cycle.stream):
        edits = {"data_config.dataset_type": "KafkaDataset", "train_input_path": job.input_path} if job is cycle.stream else {}
        check_edits({**edits, **job.edits})


def edits_in_commands() -> Iterator[tuple[str, str]]:
    for page in pages():
        for block in blocks(page, "bash"):
            for words in commands(block.text):
                for at, word in enumerate(words[:-1]):
                    if word == "--edit_config_json" and "$(" not in words[at + 1]:
                        yield block.where, words[at + 1]


def check_edits(edits: dict[str, Any]) -> None:
    load_pipeline(json.dumps(tutorial_config()), component_config, format="json", edits=json.dumps(edits), environ={})


def test_edits_in_commands_fit_the_config() -> None:
    found = list(edits_in_commands())
    assert found
    for where, text in found:
        edits = json.loads(text)
        if edits.get("data_config.dataset_type") == "KafkaDataset":
            edits["train_input_path"] = "kafka://localhost:9092/topic?group.id=readers"
        try:
            check_edits(edits)
        except errors.ConfigError as error:
            raise AssertionError(f"{where}: {error}") from error


def test_the_stream_of_the_tutorial_fits_its_config() -> None:
    text = next(block.text for block in blocks(TUTORIAL, "bash") if block.text.startswith("cat > stream.json"))
    check_edits(json.loads(text.partition("\n")[2].partition("\nEND")[0]))


@every_page
def test_keys_in_prose_exist(page: Path) -> None:
    for key in _INLINE.findall(prose(page)):
        if re.fullmatch(r"(train|data|eval|export)_config(\.\w+)+", key):
            explain(key, component_config)


def imports() -> Iterator[tuple[str, str, str]]:
    """(where, module, name) of everything of ours that the pages' programs import."""
    for page in pages():
        for line, text in enumerate(page.read_text().splitlines(), 1):
            if match := re.fullmatch(r"\s*from (tidemill[\w.]*) import (.+)", text):
                for name in match[2].split(","):
                    yield f"{page.relative_to(REPOSITORY)}:{line}", match[1], name.strip()


def test_what_programs_in_pages_import_exists() -> None:
    found = list(imports())
    assert found
    missing = [f"{where}: {module} has no {name}" for where, module, name in found if not hasattr(import_module(module), name)]
    assert not missing


@every_page
def test_no_page_knows_the_machine_that_it_was_written_on(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not _MACHINE.search(text)
    assert set(_URL_HOST.findall(text)) <= _HOSTS


@pytest.mark.parametrize(
    "name", ["scripts/setup", "scripts/test", "scripts/demo", "pyproject.toml", "requirements.lock", ".ci/run"]
)
def test_no_script_knows_a_registry_besides_pytorchs(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert not _MACHINE.search(text)
    assert set(_URL_HOST.findall(text)) <= {"download.pytorch.org"}


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table whose header begins with a text."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} "))
    rows = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_endings_is_the_codes() -> None:
    words = {True: "yes", False: "no"}
    expected = {
        (
            *(words[does] for does in (ending.evaluate, ending.checkpoint, ending.release)),
            ending.record,
            "the error's own" if ending.exit_code is None else str(ending.exit_code),
        )
        for ending in ENDINGS.values()
    }
    rows = table(REPOSITORY / "docs" / "howto" / "resume.md", "reason")
    found = {(a, b, c, record.split("`")[1], code) for _, a, b, c, record, code in rows}
    assert found == expected


def test_the_table_of_exit_codes_is_complete() -> None:
    def tree(cls: type[errors.TidemillError]) -> Iterator[type[errors.TidemillError]]:
        # Other parts may have errors of their own, such as the demo's, if something has imported them.
        if cls.__module__ == errors.__name__:
            yield cls
        for child in cls.__subclasses__():
            yield from tree(child)

    listed = {int(row[0]) for row in table(REPOSITORY / "docs" / "howto" / "resume.md", "code")}
    serving = {cls.exit_code for cls in tree(errors.ServingError)}
    assert listed == {cls.exit_code for cls in tree(errors.TidemillError)} - {errors.TidemillError.exit_code} - serving


def test_every_decision_is_listed() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    files = sorted(path.name for path in folder.glob("0*.md"))
    assert _LINK.findall((folder / "README.md").read_text()) == files
    numbers = [int(name[:4]) for name in files]
    assert numbers == list(range(1, len(files) + 1))
