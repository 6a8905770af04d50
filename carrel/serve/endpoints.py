"""Addresses of one box: sockets in a private folder, which also holds what its processes leave, and ports that are
held before anything is loaded."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from carrel.errors import PortInUseError
from carrel.process.options import OptionError
from gateway.listener import tcp_socket

PREFIX = "carrel-"
LOCK = "lock"
NUM_PORTS = 1 << 16
# a Unix socket's path has 107 bytes, and Ray's own take some 80 below the folder
MAX_BASE_LENGTH = 20
# below it Ray ends with a traceback at its first log
MIN_FREE_BYTES = 512 << 10
REMEDY = (
    f"make room there, or name another folder, of {MAX_BASE_LENGTH} characters at most: XDG_RUNTIME_DIR=DIR"
)


@dataclass(frozen=True)
class Endpoints:
    """Where everything listens. Both ports are real ones; with `uds` HTTP is served there instead."""

    run: Path
    host: str
    port: int
    grpc_port: int
    uds: Path | None = None
    has_tls: bool = False

    @property
    def store_socket(self) -> Path:
        return self.run / "kv_store.sock"

    @property
    def worker_socket(self) -> Path:
        return self.run / "gpu_worker.sock"

    @property
    def url(self) -> str:
        scheme = "https" if self.has_tls else "http"
        return f"{scheme}://localhost" if self.uds else f"{scheme}://{reachable_host(self.host)}:{self.port}"

    def client(self, timeout_s: float) -> httpx.Client:
        """Return a client for the gateway, our own child: no proxy, and its certificate is for other names."""
        way = httpx.HTTPTransport(uds=None if self.uds is None else str(self.uds), verify=False)
        return httpx.Client(base_url=self.url, transport=way, trust_env=False, timeout=timeout_s)


@contextmanager
def held_port(host: str, port: int, flag: str) -> Iterator[int]:
    """`port`, or a free one for 0, which no connection of another process can take while the block runs.

    Loading a model takes minutes, in which Ray and others are given ports by the kernel; it gives none that is bound.
    Servers set SO_REUSEADDR, and with it one can listen beside a socket that is bound and does not. Raises
    PortInUseError, which names `flag`, where another listens.
    """
    try:
        holder = tcp_socket(host, port)
    except socket.gaierror as exc:
        raise PortInUseError(host, port, "--host", exc.strerror or str(exc)) from exc
    except OSError as exc:
        raise PortInUseError(host, port, flag, os.strerror(exc.errno or 0)) from exc
    with holder:
        yield int(holder.getsockname()[1])


@contextmanager
def held_next_port(host: str, port: int, flag: str) -> Iterator[int]:
    """The port after `port`, or a free one where that is taken; else as `held_port`."""
    with ExitStack() as stack:
        try:
            # after the last port comes 0, which is any
            held = stack.enter_context(held_port(host, (port + 1) % NUM_PORTS, flag))
        except PortInUseError:
            held = stack.enter_context(held_port(host, 0, flag))
        yield held


def reachable_host(host: str) -> str:
    """The address, in URL form, at which this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def base_dir() -> Path:
    """XDG_RUNTIME_DIR when it is usable and short enough for socket paths, else /tmp."""
    candidate = os.environ.get("XDG_RUNTIME_DIR", "")
    if candidate and len(candidate) <= MAX_BASE_LENGTH and os.access(candidate, os.W_OK | os.X_OK):
        return Path(candidate)
    return Path("/tmp")


@contextmanager
def runtime_dir(base: Path | None = None) -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end with all that is in it.

    Its lock is held meanwhile, so a later run can tell, and remove, a folder whose owner was killed. Raises OptionError
    when `base` is full or may not be written to.
    """
    base = base_dir() if base is None else base
    remove_stale(base)
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise OptionError(f"{base} cannot hold sockets and logs: {error.strerror}; {REMEDY}") from error
    if free < MIN_FREE_BYTES:
        path.rmdir()
        raise OptionError(f"{base} cannot hold sockets and logs: {free:,} bytes are free; {REMEDY}")
    # held before it has the name by which a start beside this one looks for folders without an owner
    unnamed = path / f"{LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(path / LOCK)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_stale(base: Path) -> None:
    """Remove our user's folders under `base` whose owner is gone."""
    for path in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            # a folder of another user, or one just removed by its owner, is none of ours
            if path.parent.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        # held: its owner lives
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        os.close(lock)
