"""The region of host memory that holds every row, and the socket that hands it to local processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import socket
import stat
import threading

import numpy as np

from carrel.process.ready_threads import NoThreads, start_thread
from kv_store.client.handoff import SEALS, ArenaHandle, peer_uid
from kv_store.errors import ConfigError


class Arena:
    """Owns the memory until `close`; `data` is uint8 [num_bytes]. Raises ConfigError when it cannot be made."""

    def __init__(self, num_bytes: int) -> None:
        # 63 bits: the epoch survives a trip through any signed 64-bit field, and 0 never is one.
        self.handle = ArenaHandle(secrets.token_bytes(16), secrets.randbits(63) | 1, num_bytes)
        self.descriptor = os.memfd_create("carrel-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            mapping = mmap.mmap(self.descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as exc:
            os.close(self.descriptor)
            raise ConfigError(
                f"--arena-bytes {num_bytes}: the arena cannot be mapped: {exc}; choose less"
            ) from exc
        self.data = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last array that views it goes."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.data = np.empty(0, np.uint8)


_log = logging.getLogger(__name__)
_SEND_TIMEOUT_SECONDS = 2.0
_RETRY_SECONDS = 0.1


def claim_socket_path(path: str) -> None:
    """Make way for a new Unix socket. Raises ConfigError for a live process's socket, or a file that is none."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"socket {path}: a file that is no socket lies there; choose another path")
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ConfigError(f"socket {path}: {exc}") from exc
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            # A dead process's.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as exc:
            raise ConfigError(f"socket {path}: {exc}") from exc
    raise ConfigError(f"socket {path}: another store listens there; stop it or choose another folder")


class HandoffServer:
    """Listens at `path` (mode 0600) in a thread of its own until `close`; what peers send is never read. Raises
    ConfigError, NoThreads."""

    def __init__(self, arena: Arena, path: str) -> None:
        claim_socket_path(path)
        self._arena = arena
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(path)
            os.chmod(path, 0o600)
            self._socket.listen(16)
        except OSError as exc:
            self._socket.close()
            raise ConfigError(f"--arena-socket {path}: {exc}") from exc
        self._closing = threading.Event()
        try:
            self._thread = start_thread(self._serve, "arena-handoff")
        except NoThreads:
            self._remove()
            raise

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except Exception as exc:
                if not self._closing.wait(_RETRY_SECONDS):
                    # Out of descriptors, say: the next worker may be luckier.
                    _log.warning("arena handoff: %r", exc)
                continue
            with connection:
                try:
                    self._hand_out(connection)
                except Exception as exc:
                    _log.warning("arena handoff failed: %r", exc)

    def _hand_out(self, connection: socket.socket) -> None:
        if self._closing.is_set():
            return
        connection.settimeout(_SEND_TIMEOUT_SECONDS)
        if (uid := peer_uid(connection)) != os.getuid():
            _log.warning("arena handoff refused to user id %d", uid)
            return
        socket.send_fds(connection, [self._arena.handle.pack()], [self._arena.descriptor])

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._closing.set()
        # shutdown wakes a thread that waits in accept; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5.0)
        self._remove()

    def _remove(self) -> None:
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
