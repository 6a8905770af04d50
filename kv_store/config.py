"""The store process's options, checked when they are made."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from carrel.process.token import read_token
from kv_store.errors import ConfigError

# sockaddr_un.sun_path holds 108 bytes with the closing zero.
MAX_SOCKET_PATH = 107
RUNTIMES = ("process", "ray")
TRAINER_KINDS = ("threads", "ray")


def idle_cores() -> int:
    """Cores that this process may use, less one for the calls themselves; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Raises ConfigError, naming the flag, for a value that cannot be used.

    `listen` is `unix:PATH` or `HOST:PORT`; `arena_bytes` is a multiple of `slab_bytes`, a power of two.
    `lease_seconds`: a worker silent for longer loses what it holds. `max_points_per_centroid` bounds the rows
    an index is fitted on (all rows are encoded); 0 fits on every row. `store_token`, or what `store_token_file` holds:
    what every call must show; "": nothing, and then `listen` must be for this machine only. `arena_socket`, where the
    arena is handed out, lies beside a Unix socket; with TCP there is none unless it is named.
    """

    listen: str
    arena_bytes: int
    slab_bytes: int = 2 << 20
    arena_socket: str = ""
    num_trainers: int = field(default_factory=idle_cores)
    runtime: str = "process"
    max_restarts: int = 0
    lease_seconds: float = 30.0
    default_iterations: int = 10
    max_points_per_centroid: int = 128
    store_token: str = field(default="", repr=False)
    store_token_file: str = ""
    max_message_bytes: int = 16 << 20
    max_pending_builds: int = 96
    num_call_threads: int = 24

    def __post_init__(self) -> None:
        if self.slab_bytes < 4096 or self.slab_bytes & (self.slab_bytes - 1):
            raise ConfigError(f"--slab-bytes {self.slab_bytes}: must be a power of two from 4096 up")
        if self.arena_bytes < self.slab_bytes or self.arena_bytes % self.slab_bytes:
            raise ConfigError(
                f"--arena-bytes {self.arena_bytes}: must be a positive multiple of --slab-bytes {self.slab_bytes}"
            )
        if self.arena_bytes // self.slab_bytes >= 1 << 31:
            raise ConfigError(f"--arena-bytes {self.arena_bytes}: more than 2**31 slabs; raise --slab-bytes")
        for flag, value, least in (
            ("--trainers", self.num_trainers, 1),
            ("--max-restarts", self.max_restarts, 0),
            ("--default-iterations", self.default_iterations, 1),
            ("--max-points-per-centroid", self.max_points_per_centroid, 0),
        ):
            if value < least:
                raise ConfigError(f"{flag} {value}: must be at least {least}")
        if not self.lease_seconds > 0:
            raise ConfigError(f"--lease-seconds {self.lease_seconds}: must be above 0")
        if self.runtime not in RUNTIMES:
            raise ConfigError(f"--runtime {self.runtime!r}: must be one of {', '.join(RUNTIMES)}")
        try:
            object.__setattr__(self, "store_token", read_token(self.store_token, self.store_token_file))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_listen()
        if not self.arena_socket:
            if self.socket_path is not None:
                object.__setattr__(self, "arena_socket", str(self.socket_path.with_name("arena.sock")))
            elif self.trainer_kind == "ray":
                raise ConfigError(
                    f"--listen {self.listen}: TCP with --runtime ray needs --arena-socket PATH, by which trainers get "
                    "the arena; or take --runtime process"
                )
        for path in (str(self.socket_path or ""), self.arena_socket):
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise ConfigError(
                    f"socket path {path}: longer than {MAX_SOCKET_PATH} bytes; use a shorter folder"
                )

    @property
    def socket_path(self) -> Path | None:
        """The gRPC Unix socket, absolute, or None for TCP."""
        return Path(self.listen.removeprefix("unix:")).absolute() if self.listen.startswith("unix:") else None

    @property
    def trainer_kind(self) -> str:
        """Ray runs trainers as actors, a plain process as threads."""
        return "ray" if self.runtime == "ray" else "threads"

    def _check_listen(self) -> None:
        if self.listen.startswith("unix:"):
            if not self.listen.removeprefix("unix:"):
                raise ConfigError("--listen unix: names no path")
            return
        host = _host(self.listen)
        if host is None:
            raise ConfigError(f"--listen {self.listen!r}: must be unix:PATH or HOST:PORT")
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            loopback = False
        if not loopback and not self.store_token:
            raise ConfigError(
                f"--listen {self.listen}: beyond this machine the store asks for a token: give it and its workers "
                "--store-token-file or CARREL_STORE_TOKEN, or use a loopback address"
            )


def _host(address: str) -> str | None:
    """Of HOST:PORT; None for anything else."""
    host, _, port = address.rpartition(":")
    return host if host and port.isdigit() and int(port) <= 65535 else None
