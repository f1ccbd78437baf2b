"""The broker's two listeners: Kafka's protocol, and the control port that injects faults."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import resource
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tidemill.errors import ConfigError
from tidemill.testing.broker import admin_api, data_api, group_api, metadata_api, records
from tidemill.testing.broker.log import PartitionLog
from tidemill.testing.broker.protocol import (
    ApiKey,
    ErrorCode,
    MalformedRequestError,
    RequestReader,
    ResponseWriter,
)
from tidemill.testing.broker.state import DROP_ANSWER, DROP_REQUEST, Broker, BrokerOptions, Call, Faults
from tidemill.testing.broker.store import write_atomically

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ADDRESS_FILE = "broker.json"
_TICK_S = 0.05
# Longer than a client's usual long poll.
_CLIENTS_END_S = 2.0
_READ_AHEAD_BYTES = 1 << 20
# Port 0 picks from below the range that systems give to outgoing connections: after a kill the port can be bound
# again, and a client that keeps trying to connect to it can't by accident get it as its own.
_FREE_PORTS = range(20000, 32000)
_PORT_ATTEMPTS = 200
_COMMANDS = (
    "rtt MS | err API CODE COUNT | down | up | clear | gap TOPIC PARTITION COUNT | marker TOPIC PARTITION commit/abort | stats"
)
_LENGTH = struct.Struct(">i")
_RESPONSE_HEADER = struct.Struct(">ii")

Handler = Callable[[Broker, Call], Awaitable[ResponseWriter | None]]


class _Api(NamedTuple):
    max_version: int
    handle: Handler
    flexible_from: int = 1 << 15
    """The first version whose headers have tagged fields."""


class _RequestHeader(NamedTuple):
    api: int
    version: int
    correlation_id: int


_APIS: dict[int, _Api] = {
    ApiKey.PRODUCE: _Api(7, data_api.produce),
    ApiKey.FETCH: _Api(11, data_api.fetch),
    ApiKey.LIST_OFFSETS: _Api(3, data_api.list_offsets),
    ApiKey.METADATA: _Api(12, metadata_api.metadata, metadata_api.FLEXIBLE_FROM),
    ApiKey.INIT_PRODUCER_ID: _Api(1, data_api.init_producer_id),
    ApiKey.OFFSET_COMMIT: _Api(5, group_api.offset_commit),
    ApiKey.OFFSET_FETCH: _Api(4, group_api.offset_fetch),
    ApiKey.FIND_COORDINATOR: _Api(2, group_api.find_coordinator),
    ApiKey.JOIN_GROUP: _Api(5, group_api.join_group),
    ApiKey.HEARTBEAT: _Api(3, group_api.heartbeat),
    ApiKey.LEAVE_GROUP: _Api(1, group_api.leave_group),
    ApiKey.SYNC_GROUP: _Api(3, group_api.sync_group),
    ApiKey.LIST_GROUPS: _Api(2, group_api.list_groups),
    ApiKey.CREATE_TOPICS: _Api(4, admin_api.create_topics),
    ApiKey.DELETE_TOPICS: _Api(3, admin_api.delete_topics),
    ApiKey.DELETE_RECORDS: _Api(1, admin_api.delete_records),
    ApiKey.CREATE_PARTITIONS: _Api(1, admin_api.create_partitions),
}
_API_VERSIONS_MAX = 3


class BrokerServer:
    """Serves one Broker until `run` is cancelled, a signal comes, or the parent process is gone."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connections: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        options = self._broker.options
        listener = _listen(options.host, options.port)
        control_listener = None if options.control_port is None else _listen(LOOPBACK, options.control_port)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        servers = [await asyncio.start_server(self._serve_client, sock=listener, limit=_READ_AHEAD_BYTES)]
        if control_listener is not None:
            servers.append(await asyncio.start_server(self._serve_control, sock=control_listener))
        self._announce(listener, control_listener)
        try:
            await self._tick_until_stopped()
        finally:
            for server in servers:
                server.close()
            self._drop_connections()
            await self._let_clients_end()
            (options.directory / ADDRESS_FILE).unlink(missing_ok=True)

    def _announce(self, listener: socket.socket, control_listener: socket.socket | None) -> None:
        options = self._broker.options
        address = {
            "pid": os.getpid(),
            "host": options.host,
            "port": listener.getsockname()[1],
            "control_port": None if control_listener is None else control_listener.getsockname()[1],
        }
        write_atomically(options.directory / ADDRESS_FILE, json.dumps(address))
        logger.info("development broker ready: %s", json.dumps(address))

    async def _tick_until_stopped(self) -> None:
        parent = self._broker.options.parent
        while not self._stop.is_set():
            if parent is not None and os.getppid() != parent:
                logger.info("process %d, which started this broker, is gone", parent)
                return
            self._broker.tick()
            try:
                await asyncio.wait_for(self._stop.wait(), _TICK_S)
            except TimeoutError:
                continue

    def _drop_connections(self) -> None:
        for writer in list(self._connections):
            writer.transport.abort()

    async def _let_clients_end(self) -> None:
        """Tasks that the event loop has to cancel when it closes end in a traceback of asyncio's own."""
        if self._clients:
            await asyncio.wait(self._clients, timeout=_CLIENTS_END_S)

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request. Whatever a client sends, only its own connection ends."""
        if self._broker.faults.down:
            writer.transport.abort()
            return
        self._connections.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        self._broker.counts["connections"] += 1
        peer = writer.get_extra_info("peername")
        try:
            while await self._serve_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        except MalformedRequestError as error:
            logger.warning("closed the connection of %s: %s", peer, error)
        except Exception:
            logger.exception("closed the connection of %s: its request failed", peer)
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False: close the connection."""
        body = await self._read_request(reader)
        header = _RequestHeader(body.int16(), body.int16(), body.int32())
        body.nullable_string()  # client id
        is_flexible = False
        if header.api == ApiKey.API_VERSIONS:
            response: ResponseWriter | None = _api_versions(header.version)
        else:
            api = _find_api(header)
            is_flexible = header.version >= api.flexible_from
            if is_flexible:
                body.tags()
            error = self._broker.faults.take_error(ApiKey(header.api))
            if error == DROP_REQUEST:
                return False
            if self._broker.faults.round_trip_s:
                await asyncio.sleep(self._broker.faults.round_trip_s)
            host, port = writer.get_extra_info("sockname")[:2]
            told_error = ErrorCode.NONE if error == DROP_ANSWER else error
            response = await api.handle(self._broker, Call(body, header.version, told_error, host, port))
            if error == DROP_ANSWER:
                return False
        self._broker.counts[ApiKey(header.api).name.lower()] += 1
        if response is not None:
            tags = b"\0" if is_flexible else b""
            writer.write(_RESPONSE_HEADER.pack(len(response) + 4 + len(tags), header.correlation_id) + tags)
            writer.writelines(response.chunks)
            await writer.drain()
        return True

    async def _read_request(self, reader: asyncio.StreamReader) -> RequestReader:
        (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        limit = self._broker.options.max_request_bytes
        if not 0 <= num_bytes <= limit:
            raise MalformedRequestError(f"a request of {num_bytes} bytes; the limit is {limit} (max_request_bytes)")
        return RequestReader(memoryview(await reader.readexactly(num_bytes)))

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                try:
                    answer = self._control(line.decode().split())
                except (ValueError, KeyError, IndexError) as error:
                    answer = f"error: {error!r}; commands: {_COMMANDS}"
                writer.write(f"{answer}\n".encode())
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # gone, or a line longer than any command
        finally:
            writer.close()

    def _control(self, words: list[str]) -> str:
        faults = self._broker.faults
        match words:
            case ["rtt", milliseconds]:
                faults.round_trip_s = float(milliseconds) / 1000
            case ["err", api, code, count]:
                faults.errors[_parse_api(api)].extend([int(code)] * int(count))
            case ["down"]:
                faults.down = True
                self._drop_connections()
            case ["up"]:
                faults.down = False
            case ["clear"]:
                self._broker.faults = Faults()
            case ["gap", topic, partition, count]:
                self._log(topic, partition).append_own(records.emptied_batch(int(count), _now_ms()))
            case ["marker", topic, partition, "commit" | "abort" as kind]:
                self._log(topic, partition).append_own(records.transaction_marker(kind == "commit", _now_ms()))
            case ["stats"]:
                return json.dumps(dict(self._broker.counts), sort_keys=True)
            case _:
                raise ValueError(" ".join(words))
        return "ok"

    def _log(self, topic: str, partition: str) -> PartitionLog:
        log = self._broker.topics.partition(topic, int(partition))
        if log is None:
            raise ValueError(f"no partition {topic}:{partition}")
        return log


def _now_ms() -> int:
    return int(time.time() * 1000)


def _parse_api(text: str) -> ApiKey:
    """By number, or by name: `0` and `produce` are the same."""
    return ApiKey(int(text)) if text.isdecimal() else ApiKey[text.upper()]


def _find_api(header: _RequestHeader) -> _Api:
    api = _APIS.get(header.api)
    if api is None or not 0 <= header.version <= api.max_version:
        raise MalformedRequestError(f"API {header.api} version {header.version} is not offered")
    return api


def _api_versions(version: int) -> ResponseWriter:
    """The one answer in two encodings: version 3 is "flexible"; later ones get version 0 with an error, and the client
    asks again with what it finds there."""
    ranges = [*((int(key), api.max_version) for key, api in _APIS.items()), (int(ApiKey.API_VERSIONS), _API_VERSIONS_MAX)]
    response = ResponseWriter()
    if version == _API_VERSIONS_MAX:
        response.int16(ErrorCode.NONE).raw(bytes([len(ranges) + 1]))  # compact array: its length + 1
        for key, max_version in ranges:
            response.int16(key).int16(0).int16(max_version).raw(b"\0")
        return response.int32(0).raw(b"\0")
    response.int16(ErrorCode.NONE if 0 <= version < _API_VERSIONS_MAX else ErrorCode.UNSUPPORTED_VERSION)
    response.int32(len(ranges))
    for key, max_version in ranges:
        response.int16(key).int16(0).int16(max_version)
    return response.int32(0) if 1 <= version < _API_VERSIONS_MAX else response


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError if the address can't be had."""
    candidates = random.sample(_FREE_PORTS, _PORT_ATTEMPTS) if port == 0 else [port]
    for candidate in candidates:
        try:
            return socket.create_server((host, candidate), backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port:
                raise ConfigError(f"can't listen on {host}:{candidate}: {error.strerror or error}") from error
    raise ConfigError(f"no free port on {host} in {_PORT_ATTEMPTS} attempts; name one")


def run_broker(options: BrokerOptions) -> None:
    """Run a broker in this process until SIGINT or SIGTERM.

    Raises StorageError if another broker writes in the folder, ConfigError if a port is taken.
    """
    # Each partition is an open file; the usual soft limit of 1024 is soon reached.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    broker = Broker(options)
    try:
        asyncio.run(_serve(broker))
    finally:
        broker.close()


async def _serve(broker: Broker) -> None:
    await BrokerServer(broker).run()
