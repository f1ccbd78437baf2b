"""`tidemill broker`: run the development Kafka broker in the foreground."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidemill.testing.broker import BrokerOptions, run_broker


class FsyncPolicy(StrEnum):
    ALWAYS = "always"
    NEVER = "never"


def broker(
    directory: Annotated[Path, typer.Option("--dir", help="Folder that holds topics and offsets; made if missing.")],
    port: Annotated[int, typer.Option(help="Port of Kafka's protocol; 0 picks a free one.")] = 9092,
    control_port: Annotated[int | None, typer.Option(help="Loopback port for fault injection; 0 picks one.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    fsync: Annotated[FsyncPolicy, typer.Option(help="always: also survive a power cut.")] = FsyncPolicy.NEVER,
    auto_create: Annotated[int, typer.Option(help="Partitions of topics made on first use; 0: none are.")] = 0,
    max_request_bytes: Annotated[int, typer.Option(help="Larger requests close their connection.")] = 100_000_000,
) -> None:
    """Run a development Kafka broker (one node, no replication) until Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run_broker(
        BrokerOptions(
            directory=directory,
            host=host,
            port=port,
            control_port=control_port,
            fsync=fsync is FsyncPolicy.ALWAYS,
            auto_create=auto_create,
            max_request_bytes=max_request_bytes,
        )
    )
