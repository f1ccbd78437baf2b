"""Where MaxCompute's credentials come from: in tzrec's order, and never to be seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.config.env import odps_credentials
from tidemill.errors import ConfigError

LINES = "# mine\naccess_id=ID-1\naccess_key = KEY-1\nend_point=http://service/api\nproject_name=p\n"
CHAIN = {"ALIBABA_CLOUD_ECS_METADATA": "role", "ODPS_ENDPOINT": "http://chain/api"}


def home(folder: Path) -> dict[str, str]:
    (folder / ".odps_config.ini").write_text(LINES.replace("ID-1", "ID-2"))
    return {"HOME": str(folder)}


def test_the_named_file_comes_first(tmp_path):
    (tmp_path / "mine.conf").write_text(LINES)
    found = odps_credentials({**home(tmp_path), **CHAIN, "ODPS_CONFIG_FILE_PATH": str(tmp_path / "mine.conf")})
    assert (found.access_id, found.access_key, found.endpoint) == ("ID-1", "KEY-1", "http://service/api")
    assert not found.uses_chain


def test_then_the_cloud_chain_then_the_home_file(tmp_path):
    chained = odps_credentials({**home(tmp_path), **CHAIN})
    assert chained.uses_chain
    assert (chained.endpoint, chained.access_key) == ("http://chain/api", "")
    assert odps_credentials(home(tmp_path)).access_id == "ID-2"


def test_keys_are_never_shown_and_nothing_goes_to_the_environment(tmp_path):
    before = dict(os.environ)
    found = odps_credentials(home(tmp_path))
    assert "KEY-1" not in repr(found)
    assert "ID-2" not in f"{found}"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no MaxCompute credentials: set ODPS_CONFIG_FILE_PATH"),
        ({"ODPS_CONFIG_FILE_PATH": "/no/such.conf"}, "ODPS_CONFIG_FILE_PATH (/no/such.conf): can't be read: No such file"),
        ({**CHAIN, "ODPS_ENDPOINT": "chain/api"}, "ODPS_ENDPOINT: needs to begin with http:// or https://, got 'chain/api'"),
        ({"ALIBABA_CLOUD_SECURITY_TOKEN": "TOKEN-9"}, "ODPS_ENDPOINT: needed with ALIBABA_CLOUD_SECURITY_TOKEN"),
    ],
)
def test_what_is_missing_is_named(environ, message):
    with pytest.raises(ConfigError) as caught:
        odps_credentials(environ)
    assert message in str(caught.value)
    assert "TOKEN-9" not in str(caught.value)


def test_a_file_without_a_key_names_the_line_and_no_value(tmp_path):
    (tmp_path / ".odps_config.ini").write_text("access_id=ID-1\nend_point=http://x\n")
    with pytest.raises(ConfigError, match=r"odps_config.ini: has no line access_key=") as caught:
        odps_credentials({"HOME": str(tmp_path)})
    assert "ID-1" not in str(caught.value)
