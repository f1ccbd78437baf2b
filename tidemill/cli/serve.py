"""`tidemill serve`: score requests with the newest release, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    target: Annotated[str, typer.Argument(help="A root (follows its newest deployment), or a lineage's or snapshot's folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8080,
    port_file: Annotated[Path | None, typer.Option(help="Write the port here once connections are accepted.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name in requests; default: the snapshot's own.")] = None,
    server_name: Annotated[str | None, typer.Option(help="Name of the status file; default: host name and port.")] = None,
    poll_interval: Annotated[float, typer.Option(min=0.01, help="Seconds between looks for releases.")] = 0.5,
    max_candidates: Annotated[int, typer.Option(min=1, help="Rows that one request may have.")] = 5000,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may wait for scoring.")] = 5.0,
    drain: Annotated[float, typer.Option(min=1, help="Seconds that requests in flight may take after SIGTERM.")] = 10.0,
    events: Annotated[Path | None, typer.Option(help="Append swaps and load errors here, as JSON lines.")] = None,
    torch_threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores but one.")] = None,
) -> None:
    """Serve a model over HTTP (Open Inference Protocol v2, docs/reference/serving-api.md)."""
    from tidemill import logs
    from tidemill.serving.app import Limits
    from tidemill.serving.server import ServeOptions, write_port_file
    from tidemill.serving.server import serve as run_server

    logs.set_up()
    if events is not None:
        logs.send_events_to(logs.EventLog(events))

    def announce(bound_host: str, bound_port: int) -> None:
        if port_file is not None:
            write_port_file(port_file, bound_port)
        typer.echo(f"serving {target} on http://{bound_host}:{bound_port}")

    options = ServeOptions(
        target=target,
        host=host,
        port=port,
        model_name=model_name,
        server_name=server_name,
        poll_interval_s=poll_interval,
        drain_s=drain,
        torch_threads=torch_threads,
        limits=Limits(candidates=max_candidates, deadline_s=deadline),
    )
    run_server(options, on_bound=announce)
