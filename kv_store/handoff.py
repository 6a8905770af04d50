"""The giving end of the arena socket: header and descriptor to every local process of the same user."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

from kv_store.arena import Arena
from kv_store.client.handoff import peer_uid
from kv_store.errors import ConfigError

_log = logging.getLogger(__name__)
_SEND_TIMEOUT_SECONDS = 2.0


def claim_socket_path(path: str) -> None:
    """Make way for a new Unix socket. Raises ConfigError when a live process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
    raise ConfigError(f"socket {path}: another store listens there; stop it or choose another folder")


class HandoffServer:
    """Listens at `path` (mode 0600) in a thread of its own until `close`; what peers send is never read."""

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
        self._thread = threading.Thread(target=self._serve, name="arena-handoff", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    self._hand_out(connection)
                except OSError as exc:
                    _log.warning("arena handoff failed: %s", exc)

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
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
