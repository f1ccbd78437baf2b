"""`tidemill broker` in the foreground."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tidemill.testing.broker import DevelopmentBroker

TIMEOUT_S = 20.0
RUN = "import typer; from tidemill.cli.broker import broker; typer.run(broker)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_its_data(tmp_path, number):
    directory = tmp_path / "data"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "--dir", str(directory), "--port", "0", "--auto-create", "2", "--fsync", "always"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        address = await_address(directory / "broker.json")
        assert address["pid"] == process.pid
        assert address["control_port"] is None
        producer = Producer({"bootstrap.servers": f"127.0.0.1:{address['port']}", "log_level": 0})
        producer.produce("events", "a", partition=1)
        assert producer.flush(TIMEOUT_S) == 0
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
    with DevelopmentBroker(directory) as broker:
        listing = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0}).list_topics(timeout=TIMEOUT_S)
        assert len(listing.topics["events"].partitions) == 2
    assert (directory / "topics" / "events" / "1.log").stat().st_size > 0


def await_address(path: Path) -> dict[str, int | None]:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return json.loads(path.read_text())
