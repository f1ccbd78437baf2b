"""Ranks as processes of one machine that agree over loopback TCP: what `distributed.agreement` is, without torch."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tidemill.cadence import RankReport
from tidemill.errors import PeerLostError

_LENGTH = struct.Struct("<q")
_POLL_S = 0.02


class SocketPending:
    """A gather in flight (`training.loop.Pending`)."""

    def __init__(self, agreement: SocketAgreement, report: RankReport) -> None:
        self._agreement = agreement
        self._mine = report.to_array().tobytes()
        agreement.send_up(self._mine)

    def wait(self) -> list[RankReport]:
        gathered = self._agreement.gather(self._mine)
        return [RankReport.from_array(np.frombuffer(one, np.float64)) for one in gathered]


class SocketAgreement:
    """One rank's agreement (`training.loop.Agreement`), rank 0 in the middle. Belongs to the training thread.

    Every wait ends after `timeout_s`: PeerLostError, as when a peer's process is gone.
    """

    def __init__(self, rank: int, world_size: int, meeting_point: Path, *, timeout_s: float) -> None:
        """Meet the other ranks: rank 0 writes into the file `meeting_point` where it listens. Collective."""
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._peers: list[socket.socket] = []
        try:
            self._peers = self._await_peers(meeting_point) if rank == 0 else [self._call(meeting_point)]
        except OSError as error:
            raise PeerLostError(f"rank {rank}: the others don't come within {timeout_s:g} s ({error})") from error

    def issue(self, report: RankReport) -> SocketPending:
        """Start the gather of a round's reports."""
        return SocketPending(self, report)

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; what the others pass is ignored. Collective."""
        mine = orjson.dumps(value) if self.rank == 0 else b""
        self.send_up(mine)
        return orjson.loads(self.gather(mine)[0])

    def send_up(self, mine: bytes) -> None:
        """This rank's part of a gather, to rank 0."""
        if self.rank > 0:
            self._send(self._peers[0], mine)

    def gather(self, mine: bytes) -> list[bytes]:
        """All ranks' parts, in rank order, once each has sent its own."""
        if self.rank > 0:
            return [self._receive(self._peers[0]) for _ in range(self.world_size)]
        parts = [mine, *(self._receive(peer) for peer in self._peers)]
        for peer in self._peers:
            for part in parts:
                self._send(peer, part)
        return parts

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _await_peers(self, meeting_point: Path) -> list[socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(self._timeout_s)
            written = meeting_point.with_suffix(".tmp")
            written.write_text(str(server.getsockname()[1]))
            written.rename(meeting_point)
            come: dict[int, socket.socket] = {}
            while len(come) < self.world_size - 1:
                peer, _ = server.accept()
                self._prepare(peer)
                come[int(self._receive(peer))] = peer
        return [come[rank] for rank in sorted(come)]

    def _call(self, meeting_point: Path) -> socket.socket:
        until = time.monotonic() + self._timeout_s
        while not meeting_point.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no {meeting_point.name}")
            time.sleep(_POLL_S)
        peer = socket.create_connection(("127.0.0.1", int(meeting_point.read_text())), self._timeout_s)
        self._prepare(peer)
        self._send(peer, str(self.rank).encode())
        return peer

    def _prepare(self, peer: socket.socket) -> None:
        peer.settimeout(self._timeout_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, peer: socket.socket, data: bytes) -> None:
        try:
            peer.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise PeerLostError(f"rank {self.rank}: a peer is gone ({error})") from error

    def _receive(self, peer: socket.socket) -> bytes:
        (length,) = _LENGTH.unpack(self._receive_exactly(peer, _LENGTH.size))
        return self._receive_exactly(peer, length)

    def _receive_exactly(self, peer: socket.socket, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = peer.recv(size - len(data))
            except OSError as error:
                raise PeerLostError(f"rank {self.rank}: nothing from a peer for {self._timeout_s:g} s ({error})") from error
            if not part:
                raise PeerLostError(f"rank {self.rank}: a peer is gone")
            data += part
        return bytes(data)
