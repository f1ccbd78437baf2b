"""Deploys to PAI-EAS: renders the service's JSON for a lineage, and gives it to `eascmd modify`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.clock import Clock, SystemClock
from tidemill.config.base import Config, Positive, Seconds, Unsigned
from tidemill.contracts import layout
from tidemill.errors import ConfigError, DeadlineError, LineageError
from tidemill.lineage.dates import dated
from tidemill.logs import log

_CLIENTS = ("eascmd", "eascmd64")
_TRIES = 4
_FIRST_PAUSE_S = 5.0
_SHOWN = 500
# The service finds these out by itself, and a given value can only be wrong (A16, A17).
_NOT_TOLD = (("distributed_embedding",), ("dense_hot_load", "current_json"))
_NOT_TOLD_ENV = "INPUT_TILE"


class EasConfig(Config):
    """The EAS service that a deployment modifies."""

    template: str
    """The service's JSON without what changes from lineage to lineage: metadata (with the name), processor, resources."""
    feature_view_name: str
    """The feature view that training writes to."""
    version: str = "ol_${bizdate}"
    """The version that training writes to."""
    oss_path: str = ""
    """The root as EAS mounts it (`oss://bucket/root`); empty: the cycle's own root."""
    mount_path: str = "/home/admin/docker_ml/workspace/model/"
    """Where the service finds the lineage's folder."""
    dense_poll_interval_minutes: Positive = 1
    """How often the service looks for a new dense version; every release is one."""
    sparse_poll_interval_secs: Unsigned = 0
    """How often it pulls embeddings; 0: once with each new dense version."""
    deadline_s: Seconds = 600.0
    """How long one call of eascmd may take."""


def read_template(path: str) -> dict[str, Any]:
    """The service's JSON as the operator wrote it. Raises ConfigError that names the file and what is wrong."""
    try:
        template = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't read this service JSON: {error}") from None
    problem = _problem(template)
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return dict(template)


def _problem(template: Any) -> str | None:
    if not isinstance(template, dict):
        return "must be one JSON object"
    for key, kind in (("metadata", dict), ("model_config", dict), ("storage", list), ("processor_envs", list)):
        if not isinstance(template.get(key, kind()), kind):
            return f"{key} must be {'an object' if kind is dict else 'a list'}"
    if not isinstance(template.get("metadata", {}).get("name"), str):
        return "metadata.name must name the service"
    for path in _NOT_TOLD:
        found: Any = template.get("model_config", {})
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None:
            return f"model_config.{'.'.join(path)}: leave it out; the service finds it out by itself"
    if any(isinstance(entry, dict) and entry.get("name") == _NOT_TOLD_ENV for entry in template.get("processor_envs", [])):
        return f"processor_envs: leave {_NOT_TOLD_ENV} out; the service finds it out by itself"
    return None


def render_service(eas: EasConfig, template: dict[str, Any], root: str, date: str) -> dict[str, Any]:
    """The service's JSON for a date's lineage (A16 to A19). Pure.

    One mounted folder, the lineage's own: it takes the place of the template's storage at `mount_path`, whose other keys stay.
    """
    polling: dict[str, Any] = {"feature_view_name": eas.feature_view_name, "version": dated(eas.version, date)}
    if eas.sparse_poll_interval_secs:
        polling["sparse_poll_interval_secs"] = eas.sparse_poll_interval_secs
    model = dict(template.get("model_config", {}))
    hot_load = {**model.get("dense_hot_load", {}), "dense_poll_interval_minutes": eas.dense_poll_interval_minutes}
    model |= {"dense_hot_load": hot_load, "feature_store_embedding_polling": polling}
    folder = f"{(eas.oss_path or root).rstrip('/')}/{layout.lineage(date)}/"
    return {**template, "storage": _storage(template.get("storage", []), eas.mount_path, folder), "model_config": model}


def _storage(given: list[Any], mount_path: str, folder: str) -> list[Any]:
    rendered, found = [], False
    for entry in given:
        if isinstance(entry, dict) and str(entry.get("mount_path", "")).rstrip("/") == mount_path.rstrip("/"):
            entry, found = {**entry, "oss": {**entry.get("oss", {}), "path": folder}}, True
        rendered.append(entry)
    return rendered if found else [*rendered, {"mount_path": mount_path, "oss": {"path": folder, "readOnly": True}}]


def service_text(service: dict[str, Any]) -> str:
    """A rendered service as a file's text."""
    return json.dumps(service, indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Modified:
    """What became of a deployment: the command, and whether it was run here."""

    command: str
    was_run: bool


def modify(eas: EasConfig, service: dict[str, Any], path: Path, *, clock: Clock | None = None) -> Modified:
    """Write the service's JSON to `path` and run `eascmd modify`, if it is on PATH; may be repeated.

    A call that fails is tried again after a pause. Raises LineageError with what eascmd printed, DeadlineError if the last call
    took longer than `deadline_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(service_text(service), encoding="utf-8")
    name = service["metadata"]["name"]
    client = next((found for found in map(shutil.which, _CLIENTS) if found), None)
    argv = [client or _CLIENTS[0], "modify", name, "-s", str(path)]
    command = shlex.join(argv)
    if client is None:
        log.warning("eascmd isn't on PATH; run this where it is: %s", command)
        return Modified(command, was_run=False)
    clock = clock or SystemClock()
    for attempt in range(1, _TRIES + 1):
        try:
            _call(argv, eas.deadline_s)
            break
        except (LineageError, DeadlineError) as error:
            if attempt == _TRIES:
                raise
            log.warning("%s; trying again", error)
        clock.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
    log.info("modified EAS service %s", name)
    return Modified(command, was_run=True)


def _call(argv: list[str], deadline_s: float) -> None:
    command = shlex.join(argv)
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise LineageError(f"{command}: can't be run: {error.strerror}") from None
    with process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"{command}: not done after {deadline_s:g} s") from None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        said = output.decode(errors="replace").strip()[-_SHOWN:]
        raise LineageError(f"{command}: ended with {process.returncode}: {said}")
