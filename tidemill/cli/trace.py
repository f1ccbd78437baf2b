"""`tidemill trace`: where one event went."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidemill.jobs.trace import Served, Trace


def trace(
    event: Annotated[str, typer.Argument(metavar="EVENT", help="topic:partition:offset, or topic:partition:offset:row.")],
    lineage: Annotated[str, typer.Option(metavar="FOLDER|ROOT", help="A lineage's folder, or a root: all its lineages.")],
    events: Annotated[list[Path] | None, typer.Option(help="Event log of a server (serve --events); may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Follow an event: the step that trained it, the first release that holds it, the servers that reflect it.

    Exit code 1 if no lineage has trained it.
    """
    import orjson

    from tidemill.jobs.trace import Event, trace

    traces = trace(Event.parse(event), lineage, server_events=events or [])
    if as_json:
        body = {"event": event, "lineages": [dataclasses.asdict(found) for found in traces]}
        typer.echo(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode())
    else:
        for line in (line for found in traces for line in _lines(event, found)):
            typer.echo(line)
    if not any(found.trained for found in traces):
        raise typer.Exit(1)


def _lines(event: str, found: Trace) -> Iterator[str]:
    yield f"{event} in {found.lineage}"
    if not found.trained:
        yield "  not trained"
    for step in found.trained:
        fate = "" if step.survives else ", lost: a later run went on from an earlier checkpoint"
        yield f"  trained   {_time(step.at)}  step {step.step} of run {step.run_id} (term {step.term}){fate}"
    release = found.release
    if release is None:
        if found.trained:
            yield "  released  not yet"
        return
    name = f"release {release.sequence} (term {release.term}, step {release.step})"
    yield f"  released  {_time(release.committed_at)}  {name}, cut {_time(release.cut_at)}"
    for server in found.served:
        yield f"  served    {_served(server)}"


def _served(server: Served) -> str:
    generation = f"{server.lineage}, release {server.sequence} (term {server.term})"
    if not server.reflected:
        return f"not by {server.server}, which serves {generation}"
    since = _time(server.since) if server.since is not None else "an unknown time"
    return f"{since}  {server.server}: {generation}{'' if server.exact else '; the event at the latest since then'}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
