"""The receiving end of the arena socket: one fixed header and one file descriptor, every field checked."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import HandoffRefused, StoreUnreachable

MAGIC = b"CARRELKV"
VERSION = 1
HEADER = struct.Struct("<8sI16sQQ")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PEER_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """The identity of an arena: `region_id` (16 bytes) and `epoch` are new at every start of the store."""

    region_id: bytes
    epoch: int
    num_bytes: int

    def pack(self) -> bytes:
        """The header that goes in front of the descriptor."""
        return HEADER.pack(MAGIC, VERSION, self.region_id, self.epoch, self.num_bytes)

    @classmethod
    def unpack(cls, header: bytes) -> ArenaHandle:
        """Raises HandoffRefused for anything but a whole header of this version."""
        if len(header) != HEADER.size:
            raise HandoffRefused(f"the arena socket sent {len(header)} bytes, a header has {HEADER.size}")
        magic, version, region_id, epoch, num_bytes = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise HandoffRefused("the arena socket sent something that is no arena header of this version")
        return cls(region_id, epoch, num_bytes)


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return _PEER_CREDENTIALS.unpack(raw)[1]


def receive_arena(path: str, expected: ArenaHandle, timeout_seconds: float) -> npt.NDArray[np.uint8]:
    """Map the arena that the store hands out at `path`: uint8 [num_bytes], shared and writable.

    The mapping lives as long as an array that views it. Raises StoreUnreachable without an answer, and
    HandoffRefused when the owner, header, descriptor, size or seals are not what `expected` says.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(path)
            if peer_uid(connection) != os.getuid():
                raise HandoffRefused(f"the arena socket {path} belongs to another user")
            header, descriptors, flags, _ = socket.recv_fds(connection, HEADER.size, 1)
    except OSError as exc:
        raise StoreUnreachable(f"the arena socket {path} does not answer: {exc}") from exc
    try:
        if flags & socket.MSG_CTRUNC or len(descriptors) != 1:
            raise HandoffRefused(
                f"the arena socket sent {len(descriptors)} usable descriptors instead of one"
            )
        if ArenaHandle.unpack(header) != expected:
            raise HandoffRefused(
                "the arena socket handed out another arena: the store was restarted meanwhile"
            )
        return _map(descriptors[0], expected.num_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map(descriptor: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes or num_bytes < 1:
        raise HandoffRefused(f"the descriptor is no file of {num_bytes} bytes")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals & SEALS != SEALS:
            raise HandoffRefused("the arena is not sealed against shrinking and growing")
        mapping = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as exc:
        raise HandoffRefused(f"the descriptor cannot be mapped: {exc}") from exc
    return np.frombuffer(mapping, np.uint8)
