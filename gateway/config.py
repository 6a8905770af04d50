"""The gateway's configuration: options, then CARREL_* variables, then defaults."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from gateway.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
TRUE_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Everything that the gateway can be told.

    `grpc_port` 0 turns chat gRPC off. `max_body_bytes` None is 8 bytes a token of the model's maximum length.
    `api_keys` empty leaves the API open, on a loopback address only unless `is_open_allowed`.
    """

    model: str
    worker: str
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    served_model_name: str | None = None
    chat_template: Path | None = None
    api_keys: tuple[str, ...] = ()
    is_open_allowed: bool = False
    max_body_bytes: int | None = None
    max_concurrent: int = 256
    request_timeout_s: float = 1800.0
    shutdown_timeout_s: float = 30.0
    heartbeat_s: float = 10.0
    allowed_origins: tuple[str, ...] = ()
    has_docs: bool = True
    has_json_events: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} {port}: give a port from 0 to 65535")
        if self.port and self.port == self.grpc_port:
            raise ConfigError(f"--port and --grpc-port are both {self.port}: choose two different ports")
        for name, value in (
            ("--max-concurrent", self.max_concurrent),
            ("--request-timeout", self.request_timeout_s),
            ("--heartbeat", self.heartbeat_s),
            ("--max-body-bytes", 1 if self.max_body_bytes is None else self.max_body_bytes),
        ):
            if not value > 0:
                raise ConfigError(f"{name} {value}: give a number above 0")
        if not self.shutdown_timeout_s >= 0:
            raise ConfigError(f"--shutdown-timeout {self.shutdown_timeout_s}: give a number from 0 up")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"--log-level {self.log_level}: choose one of {', '.join(LOG_LEVELS)}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key is empty or holds characters that no header can carry")
        if not self.api_keys and not self.is_open_allowed and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from outside and no key is set: set CARREL_API_KEY or --api-key, "
                "or add --allow-open to serve everyone"
            )

    @property
    def model_name(self) -> str:
        """The name in the API."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model)
        return path.resolve().name if path.is_dir() else self.model

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["api_keys"] = f"({len(self.api_keys)} hidden)"
        return f"GatewayConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_config(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> GatewayConfig:
    """Read options and variables. Raises ConfigError, also for an unknown option."""
    parser = _parser(_defaults(environment))
    found = vars(parser.parse_args(arguments))
    for name in ("model", "worker"):
        if not found[name]:
            raise ConfigError(f"--{name} is missing: give it, or set CARREL_{name.upper()}")
    found["api_keys"] = tuple(found["api_keys"] or _words(environment.get("CARREL_API_KEY")))
    found["allowed_origins"] = tuple(
        found["allowed_origins"] or _words(environment.get("CARREL_ALLOWED_ORIGINS"))
    )
    return GatewayConfig(**found)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _defaults(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("CARREL_") and value}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m gateway --help")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m gateway",
        allow_abbrev=False,
        description="OpenAI-compatible REST and chat gRPC in front of one worker. Every option but the switches "
        "can be set as CARREL_NAME too.",
    )

    def option(
        flag: str, help: str, dest: str | None = None, parse: type = str, default: object = None
    ) -> None:
        name = "CARREL_" + flag.removeprefix("--").replace("-", "_").upper()
        parser.add_argument(
            flag, dest=dest, type=parse, default=environment.get(name, default), help=f"{help} [{name}]"
        )

    def switch(flag: str, dest: str, help: str, value: bool = True) -> None:
        name = "CARREL_" + flag.removeprefix("--").replace("-", "_").upper()
        given = TRUE_WORDS.get(environment.get(name, "0").lower())
        if given is None:
            raise ConfigError(f"{name}={environment[name]}: give true or false")
        parser.add_argument(
            flag,
            dest=dest,
            action="store_const",
            const=value,
            default=value if given else not value,
            help=help,
        )

    option("--model", "directory or hub id whose tokenizer is used")
    option("--worker", "the worker's gRPC target, such as unix:/run/carrel/gpu_worker.sock")
    option("--revision", "the model's revision on the hub")
    option("--host", "address to listen on", default="127.0.0.1")
    option("--port", "port of the REST API", parse=int, default=8000)
    option("--grpc-port", "port of chat gRPC; 0: off", parse=int, default=8001)
    option("--served-model-name", "name in the API (default: the model's)")
    option("--chat-template", "Jinja file instead of the model's template", parse=Path)
    option("--max-body-bytes", "largest request body (default: 8 bytes a token of context)", parse=int)
    option("--max-concurrent", "requests served at once; more get 503", parse=int, default=256)
    option(
        "--request-timeout", "seconds a request may take", "request_timeout_s", parse=float, default=1800.0
    )
    option(
        "--shutdown-timeout",
        "seconds that running requests get",
        "shutdown_timeout_s",
        parse=float,
        default=30.0,
    )
    option(
        "--heartbeat",
        "seconds of silence before a stream gets a comment",
        "heartbeat_s",
        parse=float,
        default=10.0,
    )
    option("--log-level", " ".join(LOG_LEVELS), default="info")
    parser.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        metavar="KEY",
        help="key that a client must send; may be repeated [CARREL_API_KEY, comma-separated]",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="web origins that may call the API (default: none) [CARREL_ALLOWED_ORIGINS, comma-separated]",
    )
    switch("--allow-open", "is_open_allowed", "serve a non-loopback address without a key")
    switch("--disable-docs", "has_docs", "no /docs and no /openapi.json", value=False)
    switch("--json-events", "has_json_events", "one JSON object a line on stdout for a supervisor")
    return parser
