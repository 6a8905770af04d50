"""The worker's options of where it listens, where its store is, and how both are known."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from carrel.process.certificates import Identity, read_identity
from carrel.process.options import REQUIRED, is_loopback, option
from carrel.process.token import read_token
from gpu_worker.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107
ADDRESS = "unix:PATH or HOST:PORT"


@dataclass(frozen=True, kw_only=True)
class NeighbourOptions:
    """Where the worker listens, and where its store is."""

    listen: str = option(REQUIRED, f"{ADDRESS} to serve gRPC on", metavar="ADDRESS")
    store: str = option(REQUIRED, f"{ADDRESS} of the KV store", metavar="ADDRESS")
    allow_remote: bool = option(False, "permit a --listen address beyond this machine without TLS")
    worker_ssl_keyfile: Path | None = option(
        None,
        "PEM file of the certificate's key; with it a TCP --listen is served over mutual TLS",
        metavar="FILE",
    )
    worker_ssl_certfile: Path | None = option(
        None,
        "PEM file of the certificate and its chain, for the name in the gateway's --worker",
        metavar="FILE",
    )
    worker_client_ca_file: Path | None = option(
        None,
        "PEM file of the certificates by which gateways are known; nobody else is served",
        metavar="FILE",
    )
    store_timeout_s: float = option(
        60.0, "seconds to wait for the store at the start", name="store-timeout", metavar="S", ge=0, le=86400
    )
    store_token: str = option(
        "",
        "what the store asks every call for; better in the environment, which no process listing shows",
        metavar="TOKEN",
        secret=True,
    )
    store_token_file: str = option("", "file that holds the token", metavar="FILE")
    store_ca_file: str = option(
        "",
        "PEM file of the certificates by which a store on another host is known; with it that is called over TLS",
        metavar="FILE",
    )
    allow_plain_store: bool = option(False, "permit a --store beyond this machine without TLS")

    def check_neighbours(self) -> None:
        """Reads the token's file. Raises ConfigError."""
        try:
            has_tls = self.identity is not None
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        if has_tls and self.listen.startswith("unix:"):
            raise ConfigError("--worker-ssl-certfile: a Unix socket has no TLS; leave it out")
        _check_address("--listen", self.listen)
        _check_address("--store", self.store)
        if not (has_tls or self.allow_remote or _is_near(self.listen)):
            raise ConfigError(
                f"--listen {self.listen!r}: not a loopback address; use 127.0.0.1, give --worker-ssl-certfile and what "
                "belongs to it, or add --allow-remote"
            )
        if not (self.store_ca_file or self.allow_plain_store or _is_near(self.store)):
            raise ConfigError(
                f"--store {self.store!r}: the token and the rows of prompts would cross a network unencrypted, to "
                "whoever answers there: give --store-ca-file, or add --allow-plain-store"
            )
        try:
            object.__setattr__(self, "store_token", read_token(self.store_token, self.store_token_file))
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        if self.store_ca_file and self.store.startswith("unix:"):
            raise ConfigError(f"--store-ca-file {self.store_ca_file}: a Unix socket has no TLS; leave it out")
        _ = self.store_root

    @property
    def identity(self) -> Identity | None:
        """The worker's identity towards its gateway; None: without TLS. Raises ValueError."""
        return read_identity(
            {
                "--worker-ssl-keyfile": self.worker_ssl_keyfile,
                "--worker-ssl-certfile": self.worker_ssl_certfile,
                "--worker-client-ca-file": self.worker_client_ca_file,
            }
        )

    @property
    def store_root(self) -> bytes:
        """The certificates by which the store is known, PEM; empty: no TLS. Raises ConfigError."""
        try:
            return Path(self.store_ca_file).read_bytes() if self.store_ca_file else b""
        except OSError as exc:
            raise ConfigError(f"--store-ca-file {self.store_ca_file} cannot be read: {exc.strerror}") from exc


def _is_near(address: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def _check_address(flag: str, address: str) -> None:
    scheme, _, path = address.partition(":")
    if scheme == "unix":
        if not path or "\0" in path:
            raise ConfigError(
                f"{flag} {address!r}: name a socket's path, as in unix:/run/carrel/gpu_worker.sock"
            )
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                f"{flag} {address!r}: a socket's path has at most {MAX_UNIX_PATH_BYTES} bytes; use a shorter one"
            )
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{flag} {address!r}: use {ADDRESS} with a port from 1 to 65535")
