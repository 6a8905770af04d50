"""The gateway's options."""

from __future__ import annotations

import functools
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from carrel.process.certificates import Identity, check_pair, read_identity
from carrel.process.log_lines import LogFormat
from carrel.process.logs import FORMAT_HELP
from carrel.process.options import REQUIRED, is_loopback, num_bytes, option
from carrel.process.settings import Parser, parse
from carrel.process.tracing import OTLP_HELP
from gateway.auth import api_keys
from gateway.errors import ConfigError
from gateway.key_file import read_keys

MOST_CONNECTIONS = 8192
# descriptors for what is no HTTP connection
OTHER_DESCRIPTORS = 128


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where the API is served, and to whom."""

    host: str = option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = option(8000, "HTTP port", metavar="N", ge=0, le=65535)
    uds: Path | None = option(None, "listen for HTTP on this Unix socket, not on --port", metavar="PATH")
    ssl_keyfile: Path | None = option(
        None, "PEM file of the certificate's key; with it HTTP and gRPC are served over TLS", metavar="FILE"
    )
    ssl_certfile: Path | None = option(None, "PEM file of the certificate and its chain", metavar="FILE")
    api_keys: tuple[str, ...] = option(
        (),
        "keys of which a client must send one, with commas between; better in the environment, which no "
        "process listing shows",
        name="api-key",
        metavar="KEY",
        parse=api_keys,
        secret=True,
    )
    api_keys_file: Path | None = option(
        None,
        "YAML list of keys, each with a name and limits of its own; it is read again when it changes",
        metavar="FILE",
    )
    max_connections: int | None = None
    header_timeout_s: float = option(
        10.0,
        "seconds that an HTTP connection may be without a request: from its start, or its last answer, to the end of a "
        "request's head",
        name="header-timeout",
        metavar="S",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Return the keys of the options and the current ones of the file. Raises ConfigError."""
        listed = () if self.api_keys_file is None else read_keys(self.api_keys_file)
        return (*self.api_keys, *(each.key for each in listed))


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of what the gateway accepts and how it answers."""

    grpc_port: int = option(
        8001, "port of chat gRPC; 0: off; of carrel serve --port N: N + 1", metavar="N", ge=0, le=65535
    )
    root_path: str = option("", "path under which a proxy serves the API", metavar="PATH")
    allow_open: bool = option(False, "serve an address beyond this machine without a key")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "without keys: names that a request's Host may have beside localhost and the listen address; * for any",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web origins that may call the API (default: none)", metavar="ORIGIN"
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "names in the API (default: the model's); answers carry the first",
        name="served-model-name",
        metavar="NAME",
    )
    served_model_aliases: tuple[str, ...] = option(
        (),
        "patterns of further names that a request may give, such as claude-* or gpt-*; no list has them",
        name="served-model-alias",
        metavar="PATTERN",
    )
    strict_fields: bool = option(
        False, "refuse hints of clients, such as effort and verbosity, that are otherwise ignored and named"
    )
    tokenizer: str | None = option(
        None, "directory, GGUF file or hub id whose tokenizer is used (default: the model's)", metavar="MODEL"
    )
    chat_template: Path | None = option(None, "Jinja file instead of the model's template", metavar="FILE")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = option(
        "auto",
        "how the model writes calls of tools: hermes (Qwen too), llama3_json, mistral; auto: as its chat template says",
        metavar="NAME",
    )
    reasoning_parser: Literal["auto", "none", "think", "deepseek_r1", "qwen3"] = option(
        "auto",
        "whether what the model thinks within <think> is told apart: auto (where its chat template has the tag), none, "
        "or think, which deepseek_r1 and qwen3 are",
        metavar="NAME",
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", metavar="NAME")
    max_concurrent: int = option(256, "requests served at once; more get 503", metavar="N", ge=1)
    max_concurrent_per_key: int | None = None
    max_body_bytes: int | None = option(
        None, "largest request body (default: 32 bytes a token of context)", parse=num_bytes, metavar="SIZE"
    )
    max_incoming_bytes: int = 256 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float = option(
        1800.0, "seconds a request may take", name="request-timeout", metavar="S", gt=0, allow_inf_nan=False
    )
    write_timeout_s: float = 30.0
    heartbeat_s: float = option(
        10.0,
        "seconds of silence before a stream gets a comment",
        name="heartbeat",
        metavar="S",
        gt=0,
        allow_inf_nan=False,
    )
    shutdown_timeout_s: float = option(
        30.0,
        "seconds that running requests get to finish",
        name="shutdown-timeout",
        metavar="S",
        ge=0,
        le=86400,
    )
    disable_docs: bool = option(False, "no page at /, no /docs and no /openapi.json")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "debug, info, warning or error", metavar="LEVEL"
    )
    log_format: LogFormat = option("auto", FORMAT_HELP, metavar="FORMAT")
    otlp_endpoint: str | None = option(None, OTLP_HELP, metavar="URL")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ListenOptions, GatewayOptions):
    """Everything that the gateway process is told.

    Without keys the API is open, on a loopback address only unless `allow_open`, and to no other site's pages:
    see HostGuard. `max_body_bytes` None is 32 bytes a token of the model's maximum length.
    """

    model: str = option(REQUIRED, "directory, GGUF file or hub id whose tokenizer is used", metavar="MODEL")
    worker: str = option(
        REQUIRED, "the worker's gRPC target, such as unix:/run/carrel/gpu_worker.sock", metavar="TARGET"
    )
    worker_ca_file: Path | None = option(
        None,
        "PEM file of the certificates by which a worker on another host is known; with it that is called over mutual "
        "TLS",
        metavar="FILE",
    )
    worker_client_keyfile: Path | None = option(
        None, "PEM file of the key of the certificate that the worker is shown", metavar="FILE"
    )
    worker_client_certfile: Path | None = option(
        None, "PEM file of the certificate, and its chain, that the worker is shown", metavar="FILE"
    )
    allow_plain_worker: bool = option(False, "permit a --worker beyond this machine without TLS")
    no_warmup: bool = option(False, "be ready at once, without a request of its own to the worker first")
    json_events: bool = option(False, "one JSON object a line on stdout for a supervisor")

    def __post_init__(self) -> None:
        if self.port and self.port == self.grpc_port and self.uds is None:
            raise ConfigError(f"--port and --grpc-port are both {self.port}: choose two different ports")
        if any(not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("--api-key holds characters that no header can carry")
        try:
            check_pair("--ssl-keyfile", self.ssl_keyfile, "--ssl-certfile", self.ssl_certfile)
            is_proven = self.worker_identity is not None
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        self._check_worker(is_proven)
        if self.api_keys_file is not None:
            read_keys(self.api_keys_file)
        if self.chat_template is not None and not self.chat_template.is_file():
            # told before a model is loaded
            raise ConfigError(f"--chat-template {self.chat_template}: there is no such file")
        if not self.has_keys and not self.allow_open and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from outside and no key is set: set CARREL_API_KEY, --api-key "
                "or --api-keys-file, or add --allow-open to serve everyone"
            )

    @property
    def worker_identity(self) -> Identity | None:
        """The gateway's TLS identity towards its worker; None: without TLS. Raises ValueError."""
        return read_identity(
            {
                "--worker-client-keyfile": self.worker_client_keyfile,
                "--worker-client-certfile": self.worker_client_certfile,
                "--worker-ca-file": self.worker_ca_file,
            }
        )

    def _check_worker(self, has_tls: bool) -> None:
        if self.worker.startswith("unix:"):
            if has_tls:
                raise ConfigError(
                    f"--worker-ca-file {self.worker_ca_file}: a Unix socket has no TLS; leave it out"
                )
            return
        host = self.worker.rpartition(":")[0] or self.worker
        if not has_tls and not self.allow_plain_worker and not is_loopback(host):
            raise ConfigError(
                f"--worker {self.worker}: prompts and answers would cross a network unencrypted, to whoever answers "
                "there: give --worker-ca-file, --worker-client-certfile and --worker-client-keyfile, or add "
                "--allow-plain-worker"
            )

    @property
    def has_keys(self) -> bool:
        """True if a client must send a key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    def max_per_key(self, num_keys: int) -> int | None:
        """Requests at once of one of so many keys, where it has no limit of its own; None: as many as of all."""
        if self.max_concurrent_per_key is None and num_keys > 1:
            return max(1, self.max_concurrent // 4)
        return self.max_concurrent_per_key

    @property
    def connection_limit(self) -> int:
        """Open HTTP connections at most; chat gRPC, the worker and files have the other descriptors."""
        free = num_descriptors() - OTHER_DESCRIPTORS
        return self.max_connections or max(1, min(num_descriptors() * 3 // 4, free, MOST_CONNECTIONS))

    @property
    def grpc_connection_limit(self) -> int:
        """Open connections of chat gRPC at most: half of the descriptors that HTTP leaves."""
        return max(1, min((num_descriptors() - self.connection_limit) // 2, MOST_CONNECTIONS))

    @functools.cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names in the API; answers carry the first."""
        path = Path(self.model)
        own = path.resolve().name if path.is_dir() else path.stem if path.is_file() else self.model
        return self.served_model_names or (own,)

    def serves(self, name: str) -> bool:
        """Return whether a request may ask for the model by this name."""
        own = name in (*self.model_names, self.model)
        return own or any(fnmatchcase(name, pattern) for pattern in self.served_model_aliases)


def num_descriptors() -> int:
    """That this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def parse_config(arguments: Sequence[str]) -> GatewayConfig:
    """The configuration from options, variables and --config. Raises OptionError."""
    parser = Parser(
        prog="python -m gateway", description="OpenAI-compatible REST and chat gRPC in front of one worker."
    )
    return parse(GatewayConfig, parser, arguments)
