"""The store process's options, checked when they are made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carrel.process.certificates import check_pair
from carrel.process.logs import LogOptions
from carrel.process.options import REQUIRED, is_loopback, num_bytes, option
from carrel.process.token import read_token
from carrel.process.tracing import TraceOptions
from kv_store.client import InvalidStoreRequest, Layout, RowFormat
from kv_store.errors import ConfigError
from kv_store.memory import available_bytes

# sockaddr_un.sun_path holds 108 bytes with the closing zero.
MAX_SOCKET_PATH = 107
# Of what is free when the store starts; the model's weights and what else runs need the rest.
ARENA_SHARE = 0.25
LEAST_ARENA_BYTES = 256 << 20
LEAST_SLAB_BYTES = 4096
# Prompts share whole slabs. Llama-3.1-8B has so many tokens in the default of 2 MiB.
MOST_SLAB_TOKENS = 512


def idle_cores() -> int:
    """Cores that this process may use, less one for the calls themselves; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def default_arena_bytes(slab_bytes: int) -> int:
    """A quarter of the memory that is free here, or that a container leaves, in whole slabs."""
    wanted = max(LEAST_ARENA_BYTES, int(available_bytes() * ARENA_SHARE))
    return max(1, wanted // slab_bytes) * slab_bytes


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How much the store holds, and how it trains indexes."""

    arena_bytes: int = option(
        None,
        "host memory for the KV cache (default: a quarter of what is free)",
        also=("kv-store-memory",),
        parse=num_bytes,
        metavar="SIZE",
    )
    slab_bytes: int = option(
        "2MiB",
        "unit of allocation in the arena, a power of two; carrel serve and deploy take less for a small model",
        parse=num_bytes,
        metavar="SIZE",
    )
    num_trainers: int = option(
        None,
        "cores that train indexes (default: all but one)",
        name="trainers",
        metavar="N",
        ge=1,
    )
    kv_store_path: Path | None = option(
        None,
        "folder on a disk that keeps known prefixes and sessions, also for the next store (default: none)",
        metavar="DIR",
    )
    kv_store_disk_bytes: int = option(
        "64GiB", "how much of that disk they may take, of each store", parse=num_bytes, metavar="SIZE"
    )


def slab_bytes_for(num_kv_heads: int, head_dim: int) -> int:
    """Return the default `slab_bytes` for a model: the largest power of two that holds `MOST_SLAB_TOKENS` tokens of
    16-bit numbers at most, from `LEAST_SLAB_BYTES` to the default of any model, which sizes out of range have too."""
    try:
        token_bytes = Layout(1, num_kv_heads, RowFormat(head_dim)).token_bytes
    except InvalidStoreRequest:
        return StoreOptions.slab_bytes
    wanted = 1 << (MOST_SLAB_TOKENS * token_bytes).bit_length() - 1
    return min(max(wanted, LEAST_SLAB_BYTES), StoreOptions.slab_bytes)


@dataclass(frozen=True, kw_only=True)
class StoreConfig(StoreOptions, LogOptions, TraceOptions):
    """Everything that the store process is told.

    `arena_bytes` is a multiple of `slab_bytes`. Raises ConfigError, naming the flag, for a value that cannot be used.
    """

    listen: str = option(
        REQUIRED, "unix:PATH or HOST:PORT; beyond this machine with a token only", metavar="ADDRESS"
    )
    arena_socket: str = option(
        "", "hands the arena out (default: arena.sock beside a Unix --listen; none for TCP)", metavar="PATH"
    )
    runtime: Literal["process", "ray"] = option(
        "ray", "ray: an actor, and trainers as actors; process: this process, and threads", metavar="NAME"
    )
    lease_seconds: float = option(
        30.0, "a worker silent for longer loses what it holds", metavar="S", gt=0, allow_inf_nan=False
    )
    max_restarts: int = option(0, "times that Ray starts a store again that dies", metavar="N", ge=0)
    store_token: str = option(
        "",
        "what every call must show; better in the environment, which no process listing shows",
        metavar="TOKEN",
        secret=True,
    )
    store_token_file: str = option("", "file that holds the token", metavar="FILE")
    store_ssl_keyfile: Path | None = option(
        None, "PEM file of the certificate's key; with it a TCP --listen is served over TLS", metavar="FILE"
    )
    store_ssl_certfile: Path | None = option(
        None,
        "PEM file of the certificate and its chain, for the name in the workers' --store",
        metavar="FILE",
    )
    json_events: bool = option(False, "one JSON object a line on stdout for a supervisor")
    max_message_bytes: int = 16 << 20
    max_pending_builds: int = 96
    num_call_threads: int = 24
    default_iterations: int = 10
    max_points_per_centroid: int = 128

    def __post_init__(self) -> None:
        if self.slab_bytes < LEAST_SLAB_BYTES or self.slab_bytes & (self.slab_bytes - 1):
            raise ConfigError(
                f"--slab-bytes {self.slab_bytes}: must be a power of two from {LEAST_SLAB_BYTES} up"
            )
        if self.arena_bytes is None:
            object.__setattr__(self, "arena_bytes", default_arena_bytes(self.slab_bytes))
        if self.num_trainers is None:
            object.__setattr__(self, "num_trainers", idle_cores())
        if self.arena_bytes < self.slab_bytes or self.arena_bytes % self.slab_bytes:
            raise ConfigError(
                f"--arena-bytes {self.arena_bytes}: must be a positive multiple of --slab-bytes {self.slab_bytes}"
            )
        if self.arena_bytes // self.slab_bytes >= 1 << 31:
            raise ConfigError(f"--arena-bytes {self.arena_bytes}: more than 2**31 slabs; raise --slab-bytes")
        try:
            object.__setattr__(self, "store_token", read_token(self.store_token, self.store_token_file))
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        if self.kv_store_path is not None:
            object.__setattr__(self, "kv_store_path", self.kv_store_path.absolute())
        self._check_listen()
        self._check_certificate()
        if not self.arena_socket:
            if self.socket_path is not None:
                object.__setattr__(self, "arena_socket", str(self.socket_path.with_name("arena.sock")))
            elif self.runtime == "ray":
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

    def _check_certificate(self) -> None:
        if self.store_ssl_certfile is not None and self.socket_path is not None:
            raise ConfigError("--store-ssl-certfile: a Unix socket has no TLS; leave it out")
        key, certificate = self.store_ssl_keyfile, self.store_ssl_certfile
        try:
            check_pair("--store-ssl-keyfile", key, "--store-ssl-certfile", certificate)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc

    def _check_listen(self) -> None:
        if self.listen.startswith("unix:"):
            if not self.listen.removeprefix("unix:"):
                raise ConfigError("--listen unix: names no path")
            return
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"--listen {self.listen!r}: must be unix:PATH or HOST:PORT")
        if not is_loopback(host) and not self.store_token:
            raise ConfigError(
                f"--listen {self.listen}: beyond this machine the store asks for a token: give it and its workers "
                "--store-token-file or CARREL_STORE_TOKEN, or use a loopback address"
            )


def parse_config(arguments: Sequence[str]) -> StoreConfig:
    """The configuration from options, variables and --config. Raises OptionError."""
    # imported late: making a record reads no options, and the libraries may be missing
    from carrel.process.settings import Parser, parse

    return parse(StoreConfig, Parser(prog="python -m kv_store", description="Carrel's KV store."), arguments)
